"""The result of playing held-out items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.failure import Failure
from monarch_rl.rollout.episode_failed import EpisodeFailed


@dataclass(slots=True)
class Evaluation:
    """Held-out items played once each."""

    rewards: np.ndarray
    """float32[n]; 0 where the episode failed."""
    failed: dict[str, int]
    """Episodes that failed, by reason."""
    first: dict[str, Failure] = field(default_factory=dict)
    """The first of these failures, by reason."""

    @classmethod
    def of(cls, played: Sequence[Episode | EpisodeFailed]) -> Evaluation:
        """The result of one episode for each item."""
        failures = [episode for episode in played if isinstance(episode, EpisodeFailed)]
        rewards = [0.0 if isinstance(episode, EpisodeFailed) else episode.reward for episode in played]
        first = {failed.reason: failed.failure for failed in reversed(failures)}
        return cls(np.asarray(rewards, np.float32), dict(Counter(failure.reason for failure in failures)), first)

    @classmethod
    def joined(cls, parts: Iterable[Evaluation]) -> Evaluation:
        """The result of items that were played by several workers."""
        parts, failed, first = list(parts), Counter[str](), dict[str, Failure]()
        for part in parts:
            failed.update(part.failed)
            first = part.first | first
        return cls(np.concatenate([part.rewards for part in parts]), dict(failed), first)

    @property
    def accuracy(self) -> float:
        """Share of items with the full reward, 1."""
        return float(np.mean(self.rewards >= 1.0))

    def metrics(self, held_out: str = "") -> dict[str, float]:
        """By the names of docs/metrics.md. ``held_out``: name of the set, if it is not the first one."""
        group = f"held_out/{held_out}" if held_out else "held_out"
        reward, failed = float(np.mean(self.rewards)), float(sum(self.failed.values()))
        return {f"{group}/accuracy": self.accuracy, f"{group}/reward": reward, f"{group}/failed": failed}

    def __str__(self) -> str:
        failed = "".join(f", {count} failed: {reason}" for reason, count in self.failed.items())
        return f"held-out accuracy {self.accuracy:.1%}, mean reward {np.mean(self.rewards):.3f}{failed}"
