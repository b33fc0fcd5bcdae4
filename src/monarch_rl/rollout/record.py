"""The record that a worker keeps of its episodes: lines of JSON, which the controller takes and writes to the run's
folder (``rollouts/episodes-*.jsonl``, docs/run_folder.md)."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from monarch_rl.episode.episode import Episode, Group
from monarch_rl.episode.failure import KINDS
from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.observe.cpu_clock import CpuClock
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.transcripts import as_line, episode_rows, failed_row, shown, version_runs
from monarch_rl.runtime.deadlines import now

logger = logging.getLogger("monarch_rl")

OUTBOX_BYTES = 16 * 2**20
"""Maximum characters of the lines that wait for the controller, which takes them every few seconds."""
PER_KIND, PER_S = 8, 60.0
"""Failed episodes of a kind, and dropped groups of a reason, that are recorded in so many seconds, besides those of
logged groups: a task whose every episode fails must not fill the record."""
INLINE_TOKENS = 8192
"""Maximum tokens that are decoded on the event loop, which takes a few milliseconds."""
REMEMBERED_GROUPS = 1024
"""Newest groups of which it is remembered that a line with their item was written."""


class WorkerRows(NamedTuple):
    """What a worker has recorded since the controller last asked."""

    lines: list[str]
    lost: int = 0
    """Lines that were dropped because too many waited for the controller."""
    skipped: int = 0
    """Failed episodes and episodes of dropped groups that were not recorded, because enough of their kind were."""
    cpu_s: float = 0.0
    """CPU seconds spent on recording."""


class EpisodeRecord:
    """Makes the lines of ended episodes and holds them until they are taken.

    Args:
        worker: name of the worker.
        template: decodes tokens.
        logged: the groups whose trained episodes are recorded, with their tokens.
    """

    def __init__(self, worker: str, template: ChatTemplate, logged: LoggedGroups) -> None:
        self._worker, self._template, self._logged = worker, template, logged
        self._outbox = Outbox(OUTBOX_BYTES)
        self._limit = KindLimit(PER_KIND, PER_S)
        self._with_item: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Group and attempt of the newest groups of which a line has the item."""
        self._skipped, self._cpu = 0, CpuClock()
        self._failed = False
        """Whether an episode that could not be recorded has been logged."""

    def take(self) -> WorkerRows:
        """Everything recorded since the last call."""
        lines, lost = self._outbox.take()
        rows = WorkerRows(lines, lost, self._skipped, self._cpu.take())
        self._skipped = 0
        return rows

    async def add_group(self, group: Group, item: Any, dropped: str = "") -> None:
        """Record the episodes of a group.

        Args:
            dropped: why the worker dropped the group; "" if it is submitted.
        """
        logged = group.group_id in self._logged
        if not logged and (not dropped or self._is_over_limit(("dropped", dropped), len(group.episodes))):
            return
        more = {"dropped": dropped} if dropped else {}
        await self._add(
            group.episodes,
            {"kind": "dropped" if dropped else "train", "group": group.group_id, "attempt": group.attempt},
            {"task": group.task, "task_index": group.task_index},
            item,
            more,
            with_tokens=logged and not dropped,
        )

    async def add_failed(
        self, failed: EpisodeFailed, number: int, group_id: int, attempt: int, task: str, task_index: int, item: Any
    ) -> None:
        """Record a failed episode of a group; ``number`` is its position among all episodes of the group."""
        if group_id not in self._logged and self._is_over_limit(("failed", failed.reason), 1):
            return
        with self._not_fatal(1), self._cpu.running():
            row: dict[str, Any] = {"kind": "failed", "group": group_id, "attempt": attempt, "episode": number}
            row |= {"rollout": number, "task": task, "task_index": task_index}
            self._send([row | failed_row(failed, self._template)], item)

    async def add_held_out(
        self, result: Sequence[Episode] | EpisodeFailed, held_out: str, sample: int, task: str, index: int, item: Any
    ) -> None:
        """Record an episode of a held-out item; ``sample`` is its number among the item's episodes."""
        head: dict[str, Any] = {"kind": "held_out", "group": -1 - index, "attempt": 0}
        of_task = {"task": task, "task_index": index}
        more: dict[str, Any] = {"held_out": held_out, "sample": sample}
        if isinstance(result, EpisodeFailed):
            with self._not_fatal(1), self._cpu.running():
                row = head | {"kind": "failed", "episode": sample, "rollout": sample} | of_task | more
                self._send([row | failed_row(result, self._template)], item if sample == 0 else _NO_ITEM)
            return
        versions = [version for one in result if one.turns for version, _ in version_runs(one)]
        more |= {"version": [min(versions), max(versions)] if versions else None, "rollout": sample}
        await self._add(result, head, of_task, item if sample == 0 else _NO_ITEM, more, with_tokens=False)

    async def _add(
        self,
        episodes: Sequence[Episode],
        head: Mapping[str, Any],
        of_task: Mapping[str, Any],
        item: Any,
        more: Mapping[str, Any],
        with_tokens: bool,
    ) -> None:
        def add() -> None:
            with self._not_fatal(len(episodes)), self._cpu.running():
                found = episode_rows(episodes, self._template, with_tokens)
                self._send(
                    [
                        {**head, "episode": place, "rollout": max(0, episode.rollout), **of_task, **row, **more}
                        for place, (episode, row) in enumerate(zip(episodes, found, strict=True))
                    ],
                    item,
                )

        if sum(episode.num_tokens for episode in episodes) <= INLINE_TOKENS:
            add()
        else:
            await asyncio.to_thread(add)

    def _send(self, rows: Sequence[dict[str, Any]], item: Any) -> None:
        for row in rows:
            row["worker"] = self._worker
            if item is not _NO_ITEM and self._is_first(row["group"], row["attempt"]):
                row["item"] = shown(item)
        for line in [as_line(row) for row in rows]:  # all or none
            self._outbox.add(line)

    @contextmanager
    def _not_fatal(self, lines: int) -> Iterator[None]:
        """Count what cannot be recorded, such as ``info`` that JSON does not support, as lost: it is not worth an
        episode."""
        try:
            yield
        except Exception:
            if not self._failed:
                logger.exception("%s cannot record an episode; further ones are only counted", self._worker)
            self._failed = True
            self._outbox.lose(lines)

    def _is_first(self, group_id: int, attempt: int) -> bool:
        """Whether no line of the group has its item yet; held-out items are played again in each evaluation."""
        if group_id < 0:
            return True
        if (group_id, attempt) in self._with_item:
            return False
        self._with_item[group_id, attempt] = None
        if len(self._with_item) > REMEMBERED_GROUPS:
            self._with_item.popitem(last=False)
        return True

    def _is_over_limit(self, kind: tuple[str, str], episodes: int) -> bool:
        if self._limit.accepts(kind):
            return False
        self._skipped += episodes
        return True


_NO_ITEM = object()
"""Stands for the item of a line that does not have it."""


class Outbox:
    """Lines that wait to be taken; when it is full, further ones are counted and dropped.

    Args:
        characters: maximum characters of all lines.
    """

    def __init__(self, characters: int) -> None:
        self._most, self._size = characters, 0
        self._lines: list[str] = []
        self._lost = 0

    def add(self, line: str) -> None:
        if self._size + len(line) > self._most:
            self._lost += 1
            return
        self._lines.append(line)
        self._size += len(line)

    def lose(self, lines: int) -> None:
        """Count lines that could not be made."""
        self._lost += lines

    def take(self) -> tuple[list[str], int]:
        """Remove the lines; returns them, and how many were dropped since the last call."""
        taken = self._lines, self._lost
        self._lines, self._size, self._lost = [], 0, 0
        return taken


class KindLimit:
    """Accepts a number of events of each kind per interval.

    Args:
        most: events of a kind per interval.
        seconds: length of an interval, which begins with the first event.
        clock: returns the time in seconds.
    """

    def __init__(self, most: int, seconds: float, clock: Callable[[], float] = now) -> None:
        self._most, self._seconds, self._clock = most, seconds, clock
        self._kinds: dict[object, tuple[float, int]] = {}
        """Start of the interval, and number of events in it. Kinds after the first :data:`KINDS` share a limit."""

    def accepts(self, kind: object) -> bool:
        """Count an event; returns whether it is within the limit."""
        key = kind if kind in self._kinds or len(self._kinds) < KINDS else None
        moment = self._clock()
        began, count = self._kinds.get(key, (moment, 0))
        if moment - began >= self._seconds:
            began, count = moment, 0
        self._kinds[key] = began, count + 1
        return count < self._most
