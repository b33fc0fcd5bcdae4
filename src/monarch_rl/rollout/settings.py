"""What a user sets about rollouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutSettings:
    """How episodes are played and scored."""

    workers: int = 1
    """CPU processes that play episodes."""
    concurrent_groups: int = 16
    """Groups that one worker plays at once. More than the buffer has slots brings nothing."""
    group_size: int = 8
    """Episodes of one prompt, which are compared with each other (GRPO, arXiv:2402.03300, and most code use 8)."""
    max_new_tokens: int = 64
    """Tokens of one turn; longer ones are cut."""
    temperature: float = 1.0
    """Of training rollouts; the held-out evaluation is greedy. 1 draws from the policy that is trained."""
    max_turns: int = 1
    """Turns of an episode, if the environment does not end it before."""
    seed: int | None = None
    """Makes draws repeatable for the same weights: each episode's seed derives from it, its group and its place."""
    scorer_processes: int = 1
    """Processes of each worker that compute scores."""
    score_deadline_s: float = 10.0
    """Seconds of one score; one that takes longer is killed and costs its episode."""
    step_deadline_s: float = 300.0
    """Seconds of one step of an environment, its wait for a scoring process included; more costs the episode."""
    generate_deadline_s: float = 600.0
    """Seconds of one turn of the policy; more ends the run."""
    slot_deadline_s: float = 3600.0
    """Seconds that a worker may wait for a free slot of the buffer, or for room, that is, for the trainer; more ends
    the run."""

    def __post_init__(self) -> None:
        for name in ("workers", "concurrent_groups", "group_size", "max_new_tokens", "max_turns", "scorer_processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.temperature < 0:
            raise ValueError(f"rollout.temperature must not be negative, got {self.temperature}")
        for name in ("score_deadline_s", "step_deadline_s", "generate_deadline_s", "slot_deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"rollout.{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
