"""The record that a worker keeps of its episodes: lines of JSON, which the controller takes and writes to the run's
folder (``rollouts/episodes-*.jsonl``, docs/run_folder.md)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from monarch_rl.episode.episode import Episode, Group
from monarch_rl.episode.failure import KINDS
from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.observe.cpu_clock import CpuClock
from monarch_rl.observe.redact import mask, secrets_in
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.transcripts import as_line, episode_rows, failed_row, shown, version_spans
from monarch_rl.runtime.deadlines import now

logger = logging.getLogger("monarch_rl")

PENDING_BYTES = 16 * 2**20
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
        self._pending = PendingLines(PENDING_BYTES)
        self._limit = KindLimit(PER_KIND, PER_S)
        self._with_item: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Group and attempt of the newest groups of which a line has the item."""
        self._skipped, self._cpu = 0, CpuClock()
        self._secrets = secrets_in(os.environ)
        """What a tool may have printed."""
        self._failed = False
        """Whether an episode that could not be recorded has been logged."""

    def take(self) -> WorkerRows:
        """Everything recorded since the last call."""
        lines, lost = self._pending.take()
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
        head: dict[str, Any] = {"kind": "dropped" if dropped else "train", "group": group.group_id}
        head |= {"attempt": group.attempt, "task": group.task, "task_index": group.task_index}
        head |= {"dropped": dropped} if dropped else {}

        def make() -> list[dict[str, Any]]:
            found = self._rows(group.episodes, with_tokens=logged and not dropped)
            return [
                {"episode": place, "rollout": max(0, episode.rollout), **row}
                for place, (episode, row) in enumerate(zip(group.episodes, found, strict=True))
            ]

        await self._add(head, make, len(group.episodes), item, _num_tokens(group.episodes))

    async def add_failed(
        self, failed: EpisodeFailed, number: int, group_id: int, attempt: int, task: str, task_index: int, item: Any
    ) -> None:
        """Record a failed episode of a group; ``number`` is its position among all episodes of the group."""
        if group_id not in self._logged and self._is_over_limit(("failed", failed.reason), 1):
            return
        head = {"kind": "failed", "group": group_id, "attempt": attempt}
        more = {"episode": number, "rollout": number, "task": task, "task_index": task_index}
        await self._add(head, lambda: [more | failed_row(failed, self._template)], 1, item)

    async def add_held_out(
        self, result: Sequence[Episode] | EpisodeFailed, held_out: str, sample: int, task: str, index: int, item: Any
    ) -> None:
        """Record an episode of a held-out item; ``sample`` is its number among the item's episodes."""
        head = {"group": -1 - index, "attempt": 0, "task": task, "task_index": index}
        head |= {"rollout": sample, "held_out": held_out, "sample": sample}
        item = item if sample == 0 else _NO_ITEM

        if isinstance(result, EpisodeFailed):
            of_failed = head | {"kind": "failed", "episode": sample}
            await self._add(of_failed, lambda: [failed_row(result, self._template)], 1, item)
            return

        def make() -> list[dict[str, Any]]:
            versions = [version for one in result if one.turns for version, _ in version_spans(one)]
            more = {"version": [min(versions), max(versions)] if versions else None}
            return [more | {"episode": place} | row for place, row in enumerate(self._rows(result, False))]

        await self._add(head | {"kind": "held_out"}, make, len(result), item, _num_tokens(result))

    def _rows(self, episodes: Sequence[Episode], with_tokens: bool) -> list[dict[str, Any]]:
        return episode_rows(episodes, self._template, with_tokens)

    async def _add(
        self, head: dict[str, Any], make: Callable[[], list[dict[str, Any]]], rows: int, item: Any, tokens: int = 0
    ) -> None:
        """Record rows. What cannot be recorded is counted as lost: it is not worth an episode.

        Args:
            head: keys of all rows, with ``group`` and ``attempt``.
            make: returns the other keys of each row.
            rows: number of rows.
            item: in the first row, if no line of the group has it yet.
            tokens: number of tokens that ``make`` decodes; many are decoded on a thread.
        """
        head = head | {"worker": self._worker}
        with_item = item is not _NO_ITEM and rows > 0 and self._is_first(head["group"], head["attempt"])

        def lines() -> list[str] | Exception:
            """All lines, or why there are none. Changes no state, which belongs to the event loop."""
            with self._cpu.running():
                try:
                    made = [head | row for row in make()]
                    if with_item:
                        made[0]["item"] = shown(item)
                    return [mask(as_line(row), self._secrets) for row in made]
                except Exception as error:  # such as info that contains itself
                    return error

        found = lines() if tokens <= INLINE_TOKENS else await asyncio.to_thread(lines)
        if isinstance(found, Exception):
            self._lose(rows, found)
            return
        for line in found:
            self._pending.add(line)

    def _lose(self, rows: int, error: Exception) -> None:
        if not self._failed:
            message = "%s cannot record an episode; further ones are only counted"
            logger.error(message, self._worker, exc_info=error)
        self._failed = True
        self._pending.lose(rows)

    def _is_first(self, group_id: int, attempt: int) -> bool:
        """Whether no line of the group has its item yet; held-out items are run again in each evaluation."""
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


def _num_tokens(episodes: Sequence[Episode]) -> int:
    return sum(episode.num_tokens for episode in episodes)


_NO_ITEM = object()
"""Stands for the item of a line that does not have it."""


class PendingLines:
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
