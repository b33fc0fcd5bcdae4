"""Counters of a rollout worker, in which evaluation episodes are not counted, and its progress at one time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from monarch_rl.episode.episode import Episode
from monarch_rl.rollout.episode_failed import EpisodeFailed


class StageTime(NamedTuple):
    """Sums over groups."""

    groups: int = 0
    waited_s: float = 0.0
    """Seconds that the groups waited to enter the stage."""
    seconds: float = 0.0
    """Seconds that the groups were in the stage."""

    def plus(self, groups: int, waited_s: float, seconds: float) -> StageTime:
        return StageTime(self.groups + groups, self.waited_s + waited_s, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class EpisodeProgress:
    """How far a running episode is."""

    task: str
    item: int
    """Index of its item."""
    group: int
    """Id of its group; negative for a held-out item."""
    turns: int
    """Turns of its longest conversation so far."""
    tokens: int
    """Tokens of that conversation, prompts included."""
    in_own_code: bool
    """Whether its own code runs; otherwise it waits for the policy or another model."""
    seconds: float
    """For how long it has done so."""

    def __str__(self) -> str:
        item = f"{'held-out ' if self.group < 0 else ''}item {self.item}{f' of task {self.task}' if self.task else ''}"
        does = "in its own code" if self.in_own_code else "waiting for a model's answer"
        return f"{self.turns} turns, {self.tokens:,} tokens ({item}, {does} for {self.seconds:.0f} s)"


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """What a worker is doing, for the user of a run in which nothing is finished for a while."""

    held_out: int
    """Held-out episodes that have ended since the evaluation began."""
    longest: EpisodeProgress | None
    """The longest of the running episodes that were asked for."""


@dataclass(slots=True)
class WorkerStats:
    """Counters of one worker."""

    worker: str
    pid: int
    groups_playing: int = 0
    groups_waiting: int = 0
    """Concurrent groups that wait for a slot of the buffer, that is, for the trainer."""
    groups_put: int = 0
    groups_dropped: int = 0
    episodes: int = 0
    """Number of scored episodes."""
    full_contexts: int = 0
    """Number of scored episodes that a full context ended."""
    turn_limits: int = 0
    """Number of scored episodes that ``max_turns`` ended."""
    without_turn: int = 0
    """Number of episodes that ended before the policy's turn; ``episodes`` does not include them."""
    failed: dict[str, int] = field(default_factory=dict)
    """Number of failed episodes, by reason."""
    infrastructure: int = 0
    """Number of failed episodes for which a service is to blame (``errors.is_infrastructure``)."""
    tokens: int = 0
    """Tokens sampled for scored episodes."""
    failed_tokens: int = 0
    """Tokens sampled for failed episodes."""
    stages: dict[str, StageTime] = field(default_factory=dict)
    """Times of groups in each stage."""


def summed(workers: Iterable[WorkerStats]) -> WorkerStats:
    """Sums of the counters of several workers, under a name that no worker has; without the times of stages."""
    total: dict[str, Any] = {}
    for worker in workers:
        for each in fields(worker):
            value = getattr(worker, each.name)
            if isinstance(value, dict) and each.name != "stages":
                sums = total.setdefault(each.name, {})
                sums.update({key: sums.get(key, 0) + count for key, count in value.items()})
            elif isinstance(value, int | float) and each.name != "pid":
                total[each.name] = total.get(each.name, 0) + value
    return WorkerStats("before the run was resumed", 0, **total)


class Statistics:
    """Counts the groups and episodes of one worker."""

    def __init__(self, worker: str) -> None:
        self._stats = WorkerStats(worker, os.getpid())

    def stats(self) -> WorkerStats:
        """A copy of the counters."""
        return replace(self._stats, failed=dict(self._stats.failed), stages=dict(self._stats.stages))

    @contextmanager
    def group_waiting(self) -> Iterator[None]:
        """Count a group that waits for a slot, during the block."""
        self._stats.groups_waiting += 1
        try:
            yield
        finally:
            self._stats.groups_waiting -= 1

    @contextmanager
    def group_running(self) -> Iterator[None]:
        """Count a group that is being generated, during the block."""
        self._stats.groups_playing += 1
        try:
            yield
        finally:
            self._stats.groups_playing -= 1

    def add_episodes(self, results: Sequence[Sequence[Episode] | EpisodeFailed]) -> None:
        """Count the episodes of a group, by their sequences with a turn."""
        stats = self._stats
        for result in results:
            if isinstance(result, EpisodeFailed):
                stats.failed[result.reason] = stats.failed.get(result.reason, 0) + 1
                stats.failed_tokens += result.tokens
                stats.infrastructure += result.infrastructure
            elif not result:
                stats.without_turn += 1
            else:
                stats.episodes += 1
                stats.tokens += sum(sequence.num_trainable for sequence in result)
                stats.full_contexts += any(sequence.finish_reason == "context" for sequence in result)
                stats.turn_limits += any(sequence.finish_reason == "turns" for sequence in result)

    def add_stage(self, name: str, waited_s: float, seconds: float) -> None:
        """Count the time of a group in a stage."""
        self._stats.stages[name] = self._stats.stages.get(name, StageTime()).plus(1, waited_s, seconds)

    def add_submitted(self) -> None:
        """Count a group that the buffer has accepted."""
        self._stats.groups_put += 1

    def add_dropped(self) -> None:
        """Count a group that had too few episodes to compare, or that a stage dropped."""
        self._stats.groups_dropped += 1
