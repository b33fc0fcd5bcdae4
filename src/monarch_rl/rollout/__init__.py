"""Rollout workers: episodes of a task, the policy that these talk to, scoring, stages, submission to the buffer."""
