"""The timeline of a run, ``timeline/spans-*.jsonl``: when each actor worked, and when it waited for whom.

The controller takes new spans (``runtime/timeline.py``) from the monitors of all processes and appends them. A process
that is lost takes its last seconds with it. Runs on the thread and event loop of ``watch/watch.py``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_rl.errors import DeadlineExceeded
from monarch_rl.observe.cpu_clock import CpuClock
from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.pieces import PieceLog
from monarch_rl.runtime import monitor, wait_registry
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.runtime.machine import own_id
from monarch_rl.runtime.monitor import ProcessMonitor, SpanReport
from monarch_rl.runtime.timeline import CUT_S, FOLDER, SHORTEST_S, STEM, Kind, Span
from monarch_rl.runtime.wait_registry import CONTROLLER

logger = logging.getLogger("monarch_rl")

BOUND = 64 << 20
"""Bytes of the timeline on disk."""
EVERY_S = 5.0
"""Seconds between two requests for a process's spans, in which it keeps far more than it records."""
LAST_S = 2.0
"""Seconds for all processes to hand over their last spans at the end of a run."""
DRIFT = 50e-6
"""Seconds per second by which the clocks of two machines may drift apart."""
CLOCK_STEP_S = 0.05
"""Difference in seconds from which the wall clock was set, or stood still with a suspended machine."""


@dataclass(slots=True)
class _Clock:
    """A machine's monotonic clock, relative to that of this process."""

    offset_s: float = 0.0
    """The machine's clock minus this process's."""
    error_s: float = math.inf
    """Bound of the offset's error when it was measured."""
    measured_at: float = 0.0

    def measure(self, asked: float, there: float, answered: float) -> None:
        """Take a measurement if it is better than the last one is by now: ``there`` was read in between."""
        error_s = (answered - asked) / 2
        if error_s <= self.error_s + DRIFT * (answered - self.measured_at):
            self.offset_s, self.error_s, self.measured_at = there - (asked + answered) / 2, error_s, answered


class TimelineLog:
    """Writes spans to disk, in seconds of this machine's wall clock.

    Args:
        run: the run's folder.
        monotonic: ``time.monotonic``; replaced in tests, as is ``wall``.
        wall: ``time.time``.
    """

    def __init__(
        self, run: Path, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._log = PieceLog(run / FOLDER, STEM, BOUND)
        self._disk = DiskThread("timeline", self._log.close)
        self._monotonic, self._wall = monotonic, wall
        self._wall_offset_s = math.inf
        self.cpu = CpuClock()
        """Of writing, and of :meth:`append`."""
        self._ends: dict[tuple[str, Kind, str], float] = {}
        """By lane, kind and awaited party: the end of the last span on disk, in wall-clock time."""

    @property
    def lost(self) -> int:
        """Number of spans so far that are in no piece."""
        return self._log.lost

    def append(self, spans: list[Span], dropped: int, offset_s: float) -> None:
        """Append spans of one process.

        Args:
            spans: in their order.
            dropped: number of further spans that the process has dropped.
            offset_s: its machine's monotonic clock minus that of this process.
        """
        wall_offset_s = self._wall() - self._monotonic()
        if abs(wall_offset_s - self._wall_offset_s) > CLOCK_STEP_S:
            self._wall_offset_s = wall_offset_s
            self._ends.clear()
        with self.cpu.running():
            lines = [line for span in spans if (line := self._line(span, self._wall_offset_s - offset_s)) is not None]

        def write() -> None:
            with self.cpu.running():
                self._log.append(*lines)

        if lines:
            self._disk.begin(write, lambda: self._log.lose(len(lines), "the disk is slower than the run"))
        if dropped:
            self._log.lose(dropped, "a process recorded more spans than it keeps")

    def _line(self, span: Span, offset_s: float) -> str | None:
        """A span as JSON; None if too little is left after the previous one of its kind, which may have been converted
        with a slightly different offset."""
        key = span.lane, span.kind, span.on
        begin = max(round(span.begin + offset_s, 6), self._ends.get(key, 0.0))
        end = round(span.end + offset_s, 6)
        if end <= begin or (end - begin < SHORTEST_S and span.step is None):
            return None
        self._ends[key] = end
        values = {"lane": span.lane, "kind": span.kind, "what": span.what, "step": span.step, "on": span.on}
        return json.dumps(values | {"from": begin, "to": end})

    def close(self) -> None:
        """Finish pending writes. Blocks."""
        self._disk.close()


class SpanCollector:
    """Collects the spans of all processes of ``cluster``, including those spawned later, into the folder of a run."""

    def __init__(self, cluster: Cluster, run: Path) -> None:
        self._cluster, self._log = cluster, TimelineLog(run)
        self._clocks: dict[str, _Clock] = {own_id(): _Clock(0.0, 0.0, math.inf)}
        """By machine."""
        self._collected: dict[int, ProcessMonitor] = {}
        """Every monitor that has been asked, by ``id``, which is not used again while it is here."""
        self._tasks: dict[asyncio.Task[None], ProcessMonitor | None] = {}
        """The tasks that collect, with the monitors of their processes, which are not lost; None for this process."""
        self._ended: asyncio.Future[None] | None = None
        """Done at the end of the run; None until the first :meth:`add_new`."""

    @property
    def lost(self) -> int:
        """Number of spans so far that are not on disk."""
        return self._log.lost

    def cpu_s(self) -> float:
        """CPU seconds that all processes spent on the timeline since the last call."""
        return self._log.cpu.take()

    def add_new(self) -> None:
        """Start to collect from the processes that were spawned since the last call."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
            self._begin(None, self._collect_own(self._ended))
        in_cluster = {id(handle): handle for _, monitors in self._cluster.monitors for handle in monitors}
        for number, handle in in_cluster.items():
            if number not in self._collected:
                self._begin(handle, self._collect(handle, self._ended))
        self._collected = in_cluster | {id(handle): handle for handle in self._tasks.values() if handle is not None}

    def _begin(self, handle: ProcessMonitor | None, collecting: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(collecting)
        self._tasks[task] = handle
        task.add_done_callback(self._tasks.pop)

    async def close(self) -> None:
        """Take the last spans of all processes that answer, and close the file."""
        if self._ended is not None:
            self._ended.set_result(None)
        if self._tasks:
            _, pending = await asyncio.wait(list(self._tasks), timeout=LAST_S)
            for task in pending:
                task.cancel()
        await asyncio.to_thread(self._log.close)

    async def _collect(self, handle: ProcessMonitor, ended: asyncio.Future[None]) -> None:
        """Take the spans of one process regularly, until it is lost or the run ends."""
        try:
            while not ended.done():
                with suppress(DeadlineExceeded):  # it may continue
                    await self._take(handle, CALL_DEADLINE_S, CUT_S)  # waits: that is its deadline
                await asyncio.wait([ended], timeout=EVERY_S)
            await self._take(handle, LAST_S, 0.0)  # waits: that is its deadline
        except Exception as error:  # the poller reports it
            logger.debug("the spans of a process can no longer be collected: %s", error)

    async def _take(self, handle: ProcessMonitor, limit_s: float, cut_s: float) -> None:
        asked = time.monotonic()
        report = await within(limit_s, handle.spans.call_one(cut_s), "the spans of a process", on="Monarch")
        clock = self._clocks.setdefault(report.machine, _Clock())
        clock.measure(asked, report.now, time.monotonic())
        self._append(report, report.spans, clock.offset_s)

    async def _collect_own(self, ended: asyncio.Future[None]) -> None:
        while not ended.done():
            self._take_own(CUT_S)
            await asyncio.wait([ended], timeout=EVERY_S)
        self._take_own(0.0)

    def _take_own(self, cut_s: float) -> None:
        """Take the spans of this process, without the waits of the watch itself."""
        report, watch = monitor.own_spans(cut_s), wait_registry.registered_name()
        unnamed = f"process {os.getpid()}"  # until the watch has begun, the controller's event loop has no name
        spans = [span._replace(lane=CONTROLLER) if span.lane == unnamed else span for span in report.spans]
        self._append(report, [span for span in spans if span.lane != watch], 0.0)

    def _append(self, report: SpanReport, spans: list[Span], offset_s: float) -> None:
        self._log.cpu.add(report.cpu_s)
        self._log.append(spans, report.dropped, offset_s)
