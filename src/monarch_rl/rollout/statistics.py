"""What a rollout worker counts, and the episodes that it keeps to look at. Evaluation episodes are in neither."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.failure import shortened
from monarch_rl.rollout.episode_failed import EpisodeFailed

MAX_SAMPLES = 256
"""Newest episodes of a worker that are kept to look at."""
SHOWN_CHARACTERS = 1000
"""Of an item that is no JSON value."""


@dataclass(slots=True)
class WorkerStats:
    """What one worker did so far."""

    worker: str
    pid: int
    groups_playing: int = 0
    groups_waiting: int = 0
    """Places for a group that wait for a slot of the buffer, that is, for the trainer."""
    groups_put: int = 0
    groups_dropped: int = 0
    episodes: int = 0
    """Episodes scored."""
    full_contexts: int = 0
    """Of them, those that ended because their context was full."""
    failed: dict[str, int] = field(default_factory=dict)
    """Episodes that failed, by reason."""
    tokens: int = 0
    """Tokens drawn for scored episodes."""
    failed_tokens: int = 0
    """Tokens drawn for episodes that failed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A training episode to look at."""

    group_id: int
    index: int
    """Which item of the training set was played."""
    item: Any
    episode: Episode

    def row(self, decode: Callable[[list[int]], str], show: Callable[[list[int]], str]) -> dict[str, Any]:
        """As a JSON object.

        Args:
            decode: makes text of the ids of a turn, which takes milliseconds if they are many.
            show: the same, with special tokens.
        """
        episode = self.episode
        first = episode.turns[0]
        versions = episode.policy_versions[episode.trainable]
        return {
            "group": self.group_id,
            "task_index": self.index,
            "item": _shown(self.item),
            "prompt": show(first.token_ids[~first.trainable].tolist()),
            "turns": [decode(turn.token_ids[turn.trainable].tolist()) for turn in episode.turns],
            "reward": episode.reward,
            "parts": episode.parts,
            "info": episode.info,
            "finish_reason": episode.finish_reason,
            "tokens": episode.num_trainable,
            "versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
        }


class Statistics:
    """Counts the groups and episodes of one worker, and keeps its newest episodes."""

    def __init__(self, worker: str) -> None:
        self._stats = WorkerStats(worker, os.getpid())
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def stats(self) -> WorkerStats:
        """A copy of the counts."""
        return replace(self._stats, failed=dict(self._stats.failed))

    def take_samples(self, limit: int) -> list[Sample]:
        """The newest ``limit`` episodes since the last call."""
        newest = list(self._samples)[-limit:]
        self._samples.clear()
        return newest

    @contextmanager
    def group_waiting(self) -> Iterator[None]:
        """Count a group that waits for a slot, as long as the block lasts."""
        self._stats.groups_waiting += 1
        try:
            yield
        finally:
            self._stats.groups_waiting -= 1

    @contextmanager
    def group_playing(self) -> Iterator[None]:
        """Count a group that is being played, as long as the block lasts."""
        self._stats.groups_playing += 1
        try:
            yield
        finally:
            self._stats.groups_playing -= 1

    def add_episodes(self, group_id: int, index: int, item: Any, played: Sequence[Episode | EpisodeFailed]) -> None:
        """Count what became of the episodes of a group, and keep those that did not fail."""
        stats = self._stats
        for episode in played:
            if isinstance(episode, EpisodeFailed):
                stats.failed[episode.reason] = stats.failed.get(episode.reason, 0) + 1
                stats.failed_tokens += episode.tokens
            else:
                stats.episodes += 1
                stats.tokens += episode.num_trainable
                stats.full_contexts += episode.finish_reason == "context"
                self._samples.append(Sample(group_id, index, item, episode))

    def add_put(self) -> None:
        """Count a group that the buffer has."""
        self._stats.groups_put += 1

    def add_dropped(self) -> None:
        """Count a group that had too few episodes to compare."""
        self._stats.groups_dropped += 1


def _shown(item: Any) -> Any:
    """An item as a JSON value; what JSON does not know is its representation."""
    if is_dataclass(item) and not isinstance(item, type):
        item = asdict(item)
    return json.loads(json.dumps(item, default=lambda value: shortened(repr(value), SHOWN_CHARACTERS), skipkeys=True))
