"""The timeline of a process: when its actors worked, and when they waited for whom.

Work and waits are recorded as spans. Spans of one lane, kind and awaited party never overlap: concurrent ones are
recorded as their union, so an actor with hundreds of waits stays as cheap as one with a single wait. A process keeps
its newest :data:`RING` spans until the run's controller takes them (``watch/span_collector.py``).

Recording only appends an event to a queue, without a lock, because a wait may end anywhere: also when the garbage
collector closes a coroutine in the middle of another one's recording.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

FOLDER, STEM = "timeline", "spans"
"""Folder of the timeline in a run's folder, and beginning of its files' names."""
RING = 4096
"""Number of ended spans that a process keeps; the oldest are dropped, and counted."""
SHORTEST_S = 0.005
"""Shorter spans are not recorded, except work of a step; shorter gaps between equal spans are closed. In seconds."""
CUT_S = 60.0
"""A span that has lasted this many seconds is recorded in parts, so that the timeline of a live run shows it."""
QUEUED_EVENTS = 2048
"""Number of events from which they are made into spans, even if nobody takes these."""

Kind = Literal["work", "wait"]


class Span(NamedTuple):
    """Something that has ended. Times are ``time.monotonic()`` of its machine."""

    lane: str
    """Name of an actor: ``"trainer rank 0"``. Work that runs besides its main work has a lane of its own, named after
    it: ``"trainer rank 0, transfers"``."""
    kind: Kind
    what: str
    """``"update"``; for a wait, what was awaited first."""
    step: int | None
    """The step that the work belongs to, which is also the version that the step makes; None for waits."""
    on: str
    """Whom the actor waited for, as in :class:`~monarch_rl.runtime.wait_registry.Wait`; empty for work."""
    begin: float
    end: float


@dataclass(slots=True)
class _Current:
    """A span that may continue."""

    what: str
    step: int | None
    begin: float
    count: int
    """Number of things that are under way; 0 if it has ended, and continues only if an equal one begins soon."""
    end: float = 0.0
    """When ``count`` became 0."""


class Timeline:
    """The spans of one process. All methods may be called on any thread.

    Args:
        clock: returns seconds; replaced in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._events: deque[tuple[float, tuple[str, Kind, str], tuple[str, int | None] | None]] = deque()
        """Time; lane, kind and awaited party; what begins and its step, or None for an end."""
        self._current: dict[tuple[str, Kind, str], _Current] = {}
        self._ended: deque[Span] = deque()
        self._dropped = 0
        self._cpu_s = 0.0
        self._folding = threading.Lock()

    def begin(self, lane: str, kind: Kind, what: str, on: str = "", step: int | None = None) -> None:
        """Record the begin of work or of a wait."""
        self._add((lane, kind, on), (what, step))

    def end(self, lane: str, kind: Kind, on: str = "") -> None:
        """Record the end of work or of a wait that has begun."""
        self._add((lane, kind, on), None)

    @contextmanager
    def span(self, what: str, lane: str, step: int | None = None) -> Iterator[None]:
        """Record the block as work."""
        self.begin(lane, "work", what, step=step)
        try:
            yield
        finally:
            self.end(lane, "work")

    def take(self, cut_s: float = CUT_S) -> tuple[list[Span], int]:
        """Remove and return the spans that have ended, ordered in time within each lane, and the number of spans that
        were dropped since the last call.

        Args:
            cut_s: spans that continue are included up to now if they have lasted so many seconds; 0 takes everything,
                because nothing will follow.
        """
        with self._folding:
            self._fold()
            now = self._clock()
            for key, current in list(self._current.items()):
                if current.count and now - current.begin >= cut_s:
                    self._record(key, current, now)
                    current.begin = now
                elif not current.count and now - current.end >= min(SHORTEST_S, cut_s):
                    self._record(key, current, current.end)
                    del self._current[key]
            taken, self._ended = list(self._ended), deque()
            dropped, self._dropped = self._dropped, 0
        return taken, dropped

    def cpu_s(self) -> float:
        """CPU seconds since the last call that were spent on making spans of events."""
        with self._folding:
            seconds, self._cpu_s = self._cpu_s, 0.0
        return seconds

    def _add(self, key: tuple[str, Kind, str], begins: tuple[str, int | None] | None) -> None:
        self._events.append((self._clock(), key, begins))
        # Without waiting: another thread may be folding, or this one, which was interrupted.
        if len(self._events) > QUEUED_EVENTS and self._folding.acquire(blocking=False):
            try:
                self._fold()
            finally:
                self._folding.release()

    def _fold(self) -> None:
        """Make spans of the events so far. The caller holds the lock."""
        began = time.thread_time()
        for _ in range(len(self._events)):
            at, key, begins = self._events.popleft()
            current = self._current.get(key)
            if begins is None:
                if current is not None and current.count:
                    current.count -= 1
                    current.end = max(at, current.begin)
                continue
            what, step = begins
            if current is not None and not current.count:
                if (what, step) == (current.what, current.step) and at - current.end < SHORTEST_S:
                    current.count = 1
                    continue
                self._record(key, current, current.end)
                at = max(at, current.end)  # events of several threads may be out of order by microseconds
                current = None
            if current is None:
                self._current[key] = _Current(what, step, at, 1)
            else:
                current.count += 1
        self._cpu_s += time.thread_time() - began

    def _record(self, key: tuple[str, Kind, str], current: _Current, end: float) -> None:
        if end - current.begin < SHORTEST_S and current.step is None:
            return
        if len(self._ended) == RING:
            self._ended.popleft()
            self._dropped += 1
        lane, kind, on = key
        self._ended.append(Span(lane, kind, current.what, current.step, on, current.begin, end))


_timeline = Timeline()
"""The timeline of this process."""

begin, end, span = _timeline.begin, _timeline.end, _timeline.span
take, cpu_s = _timeline.take, _timeline.cpu_s
