"""The spans of all processes on disk, by the clock of the controller's machine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.observe.lines import read_rows
from monarch_rl.observe.pieces import pieces_of
from monarch_rl.runtime.monitor import SpanReport
from monarch_rl.runtime.timeline import FOLDER, SHORTEST_S, STEM, Span, Timeline
from monarch_rl.watch.span_collector import SpanCollector, TimelineLog, _Clock

WALL = 1.79e9


def spans_in(run: Path) -> list[dict[str, Any]]:
    return [row for piece in pieces_of(run / FOLDER, STEM) for row in read_rows(piece)[0]]


def test_times_are_those_of_this_machines_wall_clock(tmp_path: Path) -> None:
    log = TimelineLog(tmp_path, monotonic=lambda: 500.0, wall=lambda: WALL)
    log.append([Span("generator 0", "wait", "version 3", None, "trainer ranks", 1090.0, 1092.5)], 0, offset_s=600.0)
    log.append([Span("trainer rank 0", "work", "update", 3, "", 490.0, 490.001)], 0, offset_s=0.0)
    log.close()
    assert spans_in(tmp_path) == [
        {
            "lane": "generator 0",
            "kind": "wait",
            "what": "version 3",
            "step": None,
            "on": "trainer ranks",
            "from": WALL - 10,
            "to": WALL - 7.5,
        },
        {
            "lane": "trainer rank 0",
            "kind": "work",
            "what": "update",
            "step": 3,
            "on": "",
            "from": WALL - 10,
            "to": pytest.approx(WALL - 9.999),
        },
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.001, 1), st.floats(-0.04, 0.04)), min_size=1, max_size=30))
def test_spans_do_not_overlap_although_the_clocks_are_measured_anew(spans: list[tuple[float, float, float]]) -> None:
    """``spans``: seconds since the last one, duration, and the error of the clocks' offset."""
    with tempfile.TemporaryDirectory() as scratch:
        log, at = TimelineLog(Path(scratch), monotonic=lambda: 0.0, wall=lambda: WALL), 0.0
        for pause_s, seconds, error_s in spans:
            begin, at = at + pause_s, at + pause_s + seconds
            log.append([Span("a", "work", "update", 1, "", begin, at)], 0, error_s)
        log.close()
        rows = spans_in(Path(scratch))
        assert all(row["from"] < row["to"] for row in rows)
        assert all(first["to"] <= second["from"] for first, second in pairwise(rows))
        assert len(rows) >= sum(seconds > 0.081 for _, seconds, _ in spans)


def test_a_wall_clock_that_is_set_back_does_not_end_the_timeline(tmp_path: Path) -> None:
    wall = [WALL]
    log = TimelineLog(tmp_path, monotonic=lambda: 100.0, wall=lambda: wall[0])
    for begin, now in ((10.0, WALL), (20.0, WALL - 3600)):
        wall[0] = now
        log.append([Span("a", "work", "update", 1, "", begin, begin + 1)], 0, 0.0)
    log.close()
    assert [row["from"] for row in spans_in(tmp_path)] == [WALL - 90, WALL - 3600 - 80]


def test_dropped_spans_and_those_that_the_disk_refuses_are_counted(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("no folder")
    log = TimelineLog(tmp_path)
    log.append([Span("a", "work", "update", 1, "", 0.0, 1.0)], 4, 0.0)
    log.close()
    assert log.lost == 5


def test_the_best_measurement_of_a_clock_counts_until_it_may_have_drifted() -> None:
    clock = _Clock()
    clock.measure(10.0, 110.5, 11.0)
    assert clock.offset_s == 100.0
    clock.measure(12.0, 120.0, 15.0)
    assert clock.offset_s == 100.0, "a slower answer says less"
    clock.measure(16.0, 116.15, 16.1)
    assert clock.offset_s == pytest.approx(100.1)
    clock.measure(1e6, 1e6 + 101, 1e6 + 2)
    assert clock.offset_s == pytest.approx(100.0), "an old measurement has become worse"


class FakeMonitor:
    """The monitor of a process with a timeline of its own, on a machine whose clock is ahead by ``ahead_s``."""

    def __init__(self, lane: str, ahead_s: float = 0.0) -> None:
        self.lane, self.machine = lane, f"machine of {lane}"
        self.lost = False
        self.cpu_s = 0.0
        """CPU seconds that it has reported."""
        self._clock = lambda: time.monotonic() + ahead_s
        self.timeline = Timeline(self._clock)
        self.spans = SimpleNamespace(call_one=self._answer)

    async def _answer(self, cut_s: float) -> SpanReport:
        if self.lost:
            raise RuntimeError("its process is lost")
        spans, dropped = self.timeline.take(cut_s)
        cpu_s = self.timeline.cpu_s()
        self.cpu_s += cpu_s
        return SpanReport(self.machine, self._clock(), spans, dropped, cpu_s)


def test_spans_of_all_processes_are_collected_until_the_end(tmp_path: Path) -> None:
    """Also of a process that is spawned later, by a machine whose clock differs; one that is lost does no harm."""
    monitors = [FakeMonitor("trainer rank 0"), FakeMonitor("generator 0"), FakeMonitor("generator 1", ahead_s=1e5)]

    async def test() -> None:
        cluster = SimpleNamespace(monitors=[("trainer", monitors[:1]), ("generator", monitors[1:2])])
        collector = SpanCollector(cast(Any, cluster), tmp_path)
        for monitor in monitors:
            with monitor.timeline.span("update", monitor.lane, 1):
                await asyncio.sleep(0)
        collector.add_new()
        monitors[1].lost = True
        cluster.monitors.append(("more", monitors[2:]))
        collector.add_new()
        await asyncio.sleep(0)
        monitors[0].timeline.begin(monitors[0].lane, "wait", "the batch of step 2", "buffer")  # it does not end
        with monitors[0].timeline.span("snapshot", monitors[0].lane, 1):
            await asyncio.sleep(2 * SHORTEST_S)
        await collector.close()
        assert collector.cpu_s() > sum(monitor.cpu_s for monitor in monitors) > 0.0
        assert collector.cpu_s() == 0.0

    began = time.time()
    asyncio.run(test())
    rows = [row for row in spans_in(tmp_path) if row["lane"] in {monitor.lane for monitor in monitors}]
    assert sorted((row["lane"], row["what"]) for row in rows) == [
        ("generator 1", "update"),
        ("trainer rank 0", "snapshot"),
        ("trainer rank 0", "the batch of step 2"),
        ("trainer rank 0", "update"),
    ]
    # A clock that is ahead by a day is subtracted, with an error of the answer's round trip.
    assert {row["lane"]: row["from"] for row in rows} == {
        lane: pytest.approx(began, abs=3600) for lane in ("trainer rank 0", "generator 1")
    }
