"""A run's timeline in Chrome's trace event format.

The format is described at https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.report.perfetto import to_perfetto, trace_events
from tests.report.test_convert import monarch_rl

ID = {"type": "integer", "minimum": 0}
TRACE = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "ph", "ts", "pid", "tid"],
                "properties": {
                    "name": {"type": "string"},
                    "cat": {"type": "string"},
                    "ts": {"type": "number", "minimum": 0},
                    "pid": ID,
                    "tid": ID,
                    "args": {"type": "object"},
                },
                "oneOf": [
                    {
                        "properties": {"ph": {"const": "X"}, "dur": {"type": "number", "minimum": 0}},
                        "required": ["dur"],
                    },
                    {"properties": {"ph": {"const": "i"}, "s": {"enum": ["g", "p", "t"]}}, "required": ["s"]},
                    {
                        "properties": {
                            "ph": {"const": "M"},
                            "name": {"enum": ["process_name", "thread_name"]},
                            "args": {
                                "type": "object",
                                "required": ["name"],
                                "properties": {"name": {"type": "string"}},
                            },
                        },
                        "required": ["args"],
                    },
                ],
            },
        },
    },
}
"""The part of the format that is written: complete and instant events, and names of processes and threads."""
START = 1.79e9


def span(lane: str, what: str, begin: float, end: float, on: str | None = None, step: int | None = None) -> Any:
    kind = "work" if on is None else "wait"
    times = {"from": START + begin, "to": START + end}
    return {"lane": lane, "kind": kind, "what": what, "step": step, "on": on or "", **times}


def check(trace: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Check a trace against the format; returns its other events by the names of their process and thread."""
    jsonschema.Draft202012Validator(TRACE).validate(trace)
    processes, threads = dict[int, str](), dict[tuple[int, int], str]()
    events: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        thread = event["pid"], event["tid"]
        if event["name"] == "process_name" and event["ph"] == "M":
            assert processes.setdefault(event["pid"], event["args"]["name"]) == event["args"]["name"]
        elif event["ph"] == "M":
            assert thread not in threads, "a thread has one name"
            threads[thread] = event["args"]["name"]
        else:
            events[thread].append(event)
    assert len(set(processes.values())) == len(processes) and events.keys() == threads.keys()
    assert len({tid for _, tid in threads}) == len(threads)
    for of_thread in events.values():
        assert all(first["ts"] + first.get("dur", 0) <= second["ts"] for first, second in pairwise(of_thread))
    return {(processes[pid], threads[pid, tid]): found for (pid, tid), found in events.items()}


LANES = [("trainer rank 0", "work"), ("trainer rank 0, transfers", "transfers"), ("controller", "work")]
"""Lanes, and the names of their threads for work."""
FAILURES: list[dict[str, Any]] = [{"cause": "killed"}, {"back_after_s": 3.5}, {"removed": True}]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(LANES),
            st.sampled_from(["update", 'of "b"']),
            st.integers(0, 100),
            st.integers(0, 20),
            st.sampled_from([None, "", "process_name"]),
            st.sampled_from([None, 3]),
        ),
        max_size=12,
    ),
    st.lists(
        st.tuples(st.integers(0, 100), st.sampled_from(["controller", "b"]), st.sampled_from(FAILURES)), max_size=3
    ),
)
def test_any_spans_make_a_trace_in_which_nothing_overlaps(
    things: list[tuple[tuple[str, str], str, int, int, str | None, int | None]],
    failures: list[tuple[int, str, dict[str, Any]]],
) -> None:
    """``things``: lane and its thread, what, begin and duration in milliseconds, awaited party, step."""
    spans, milliseconds = [], defaultdict[tuple[str, str], set[int]](set)
    for (lane, thread), what, begin, duration, on, step in things:
        spans.append(span(lane, what, begin * 1e-3, (begin + duration) * 1e-3, on, step))
        if on is not None:
            thread = ("transfers " if thread == "transfers" else "") + ("waits" + f" for {on}" * bool(on))
        milliseconds[lane.partition(",")[0], thread] |= set(range(begin, begin + duration))
    events, _ = trace_events(spans, [{"time": START + at * 1e-3, "who": who} | more for at, who, more in failures])
    found = check({"traceEvents": events})
    instants = [event for (_, thread), of_thread in found.items() if thread == "failures" for event in of_thread]
    assert len(instants) == len(failures)
    covered = {
        thread: sum(event["dur"] for event in of_thread) * 1e-3
        for thread, of_thread in found.items()
        if thread[1] != "failures"
    }
    assert covered == {thread: pytest.approx(len(times), abs=0.1) for thread, times in milliseconds.items()}


def test_a_timeline_is_converted(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    folder.mkdir()
    rows = [
        span("trainer rank 0", "update", 1.0, 2.0, step=1),
        span("trainer rank 0", "the batch of step 2", 2.0, 62.0, "buffer"),
        span("trainer rank 0", "the batch of step 2", 62.0, 63.5, "buffer"),  # the second part
        span("trainer rank 0, transfers", "transfer", 2.25, 2.5, step=1),
    ]
    lines = [json.dumps(row) for row in rows]
    (folder / "spans-000001.jsonl").write_text(f"{lines[0]}\nno JSON\n" + '{"lane": "a"}\n')
    (folder / "spans-000002.jsonl").write_text("\n".join([*lines[1:], '{"lane": "trai']))  # the run was killed
    (tmp_path / "failures.jsonl").write_text(f'{{"time": {START + 0.5}, "who": "generator 1", "cause": "killed"}}\n')
    done = monarch_rl("convert", tmp_path, "--to", "perfetto")
    assert done.returncode == 0, done.stderr
    assert "3 spans" in done.stdout and "spans-000001.jsonl: line 2" in done.stderr
    with gzip.open(tmp_path / "timeline.json.gz", "rt") as file:
        trace = json.load(file)
    assert trace["otherData"] == {"started": START + 0.5}
    seen = {
        thread: [(event["name"], event["ts"], event.get("dur"), event["args"].get("step")) for event in events]
        for thread, events in check(trace).items()
    }
    assert seen == {
        ("trainer rank 0", "work"): [("update", 500_000, 1_000_000, 1)],
        ("trainer rank 0", "waits for buffer"): [("the batch of step 2", 1_500_000, 61_500_000, None)],
        ("trainer rank 0", "transfers"): [("transfer", 1_750_000, 250_000, 1)],
        ("generator 1", "failures"): [("lost", 0, None, None)],
    }


def test_a_run_without_a_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timeline has no spans"):
        to_perfetto(tmp_path, tmp_path / "out.json.gz")
