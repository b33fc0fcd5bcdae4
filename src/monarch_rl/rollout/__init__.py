"""Rollout workers: run a task's episodes with the policy, score them, run stages and submit groups to the buffer."""
