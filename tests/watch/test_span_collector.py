"""The spans of all processes on disk, by the clock of the controller's machine."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.observe.lines import read_rows
from monarch_rl.observe.pieces import pieces_of
from monarch_rl.runtime.timeline import FOLDER, STEM, Span
from monarch_rl.watch.span_collector import TimelineLog, _Clock

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
