"""Converts a run's timeline to Chrome's trace event format, which Perfetto (https://ui.perfetto.dev) opens, too.

An actor is a process of the trace, and each kind of its spans a thread: its work, work besides that, and its waits on
one party. These viewers show only spans of a thread that do not overlap.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monarch_rl.errors import SettingsError
from monarch_rl.observe.lines import read_rows
from monarch_rl.observe.pieces import pieces_of
from monarch_rl.runtime.timeline import FOLDER, STEM

logger = logging.getLogger("monarch_rl")

FAILURES = "failures.jsonl"
SPAN = {"lane": str, "kind": str, "what": str, "step": int | None, "on": str, "from": float | int, "to": float | int}
"""The fields of a span, with their types."""


def to_perfetto(run: Path, output: Path) -> int:
    """Write a run's timeline as ``{"traceEvents": [...]}``, compressed by gzip. Times are microseconds since the first
    event, whose unix seconds are in ``otherData``. Lost and replaced processes are instant events.

    Returns:
        The number of spans.

    Raises:
        SettingsError: the run has no timeline, or ``output`` cannot be written.
    """
    pieces = pieces_of(run / FOLDER, STEM)
    if not pieces:
        raise SettingsError(f"{run / FOLDER} has no spans: give the folder of a run that wrote a timeline")
    spans = [row for piece in pieces for row in _rows(piece) if _is_span(row)]
    failures = [row for row in _rows(run / FAILURES) if _is_failure(row)] if (run / FAILURES).exists() else []
    events, started = trace_events(spans, failures)
    try:
        with gzip.open(output, "wt", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {{"started": {started!r}}}, "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, events)))
            file.write("\n]}\n")
    except OSError as error:
        raise SettingsError(f"{output} cannot be written ({error.strerror or error})") from error
    return sum(event["ph"] == "X" for event in events)


def trace_events(spans: list[dict[str, Any]], failures: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """The events of a trace, in the order of their times within each thread, and the unix seconds of time 0.

    Args:
        spans: lines of the timeline.
        failures: lines of ``failures.jsonl``.
    """
    started = min([span["from"] for span in spans] + [failure["time"] for failure in failures], default=0.0)
    threads: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for span in spans:
        threads.setdefault((span["lane"], span["kind"], span["on"]), []).append(span)
    instants: dict[str, list[dict[str, Any]]] = {}
    for failure in failures:
        instants.setdefault(failure["who"], []).append(failure)
    actors = sorted({_actor(lane) for lane, *_ in threads} | instants.keys())
    pids = {actor: number for number, actor in enumerate(actors, 1)}
    events = [_name("process_name", pid, 0, actor) for actor, pid in pids.items()]
    tid = 0
    # Viewers show threads in the order of their ids: an actor's work first.
    for (lane, kind, on), of_thread in sorted(threads.items(), key=lambda item: (item[0][0], item[0][1] != "work")):
        tid, pid = tid + 1, pids[_actor(lane)]
        events.append(_name("thread_name", pid, tid, _title(lane, kind, on)))
        events += _complete_events(of_thread, started, pid, tid)
    for actor, of_actor in instants.items():
        tid, pid = tid + 1, pids[actor]
        events.append(_name("thread_name", pid, tid, "failures"))
        for failure in sorted(of_actor, key=lambda failure: failure["time"]):
            at = {"ts": _microseconds(failure["time"], started), "pid": pid, "tid": tid, "s": "p"}
            events.append({"name": _what_happened(failure), "cat": "failure", "ph": "i", **at, "args": failure})
    return events, started


def _complete_events(spans: list[dict[str, Any]], started: float, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    """The spans of one thread as complete events. Parts of a span are joined; where spans overlap, as after the clock
    was set back, the later one begins when the earlier one ends."""
    event: dict[str, Any] | None = None
    for span in sorted(spans, key=lambda span: span["from"]):
        begin, end = (_microseconds(span[key], started) for key in ("from", "to"))
        args = {"step": span["step"]} if span["step"] is not None else {}
        if event is not None:
            until = event["ts"] + event["dur"]
            if begin <= until and (event["name"], event["args"]) == (span["what"], args):
                event["dur"] = max(until, end) - event["ts"]
                continue
            begin = max(begin, until)
            if end <= begin:
                continue
            yield event
        at = {"ts": begin, "dur": max(0, end - begin), "pid": pid, "tid": tid}
        event = {"name": span["what"], "cat": span["kind"], "ph": "X", **at, "args": args}
    if event is not None:
        yield event


def _microseconds(at: float, started: float) -> int:
    return round((at - started) * 1e6)


def _actor(lane: str) -> str:
    return lane.split(", ")[0]


def _title(lane: str, kind: str, on: str) -> str:
    besides = lane.partition(", ")[2]
    if kind == "work":
        return besides or "work"
    return " ".join(filter(None, [besides, "waits", f"for {on}" if on else ""]))


def _name(event: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """A metadata event that names a process or a thread."""
    return {"name": event, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _what_happened(failure: dict[str, Any]) -> str:
    """As in ``pipeline/recovery.py``."""
    if "back_after_s" in failure:
        return "back"
    return "removed" if failure.get("removed") else "lost"


def _rows(path: Path) -> list[dict[str, Any]]:
    """The readable lines of a file. Raises SettingsError if it cannot be read."""
    try:
        rows, damage = read_rows(path)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({error.strerror or error})") from error
    for line in damage:
        logger.warning("%s: left out", line)
    return rows


def _is_span(row: dict[str, Any]) -> bool:
    complete = all(isinstance(row.get(name, ...), kind) for name, kind in SPAN.items())
    return complete and math.isfinite(row["from"]) and math.isfinite(row["to"])


def _is_failure(row: dict[str, Any]) -> bool:
    return isinstance(row.get("who"), str) and isinstance(row.get("time"), float) and math.isfinite(row["time"])
