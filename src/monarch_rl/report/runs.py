"""The runs of a folder as a list: what each is, and what came of it, without reading it whole."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch_rl.pipeline.provenance import results
from monarch_rl.report.read import flat_settings, is_run, read_object, state_of


@dataclass(slots=True)
class RunSummary:
    """A line of the list."""

    name: str
    """Name of its folder."""
    folder: Path
    state: str
    """As :func:`~monarch_rl.report.read.state_of` gives it; empty if unknown."""
    started: float
    """Unix time in seconds."""
    steps: int | None
    held_out: str
    """Metric, and its first and last values with their versions; empty without an evaluation."""
    differs: dict[str, Any] = field(default_factory=dict)
    """The settings, by flag, that other runs of the list have with another value."""


def list_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder, newest first; of a run's own folder, this run. Symbolic links and folders whose names begin
    with a dot (incomplete, or about to be removed) are left out.

    Raises OSError.
    """
    if is_run(folder):
        found = [folder.resolve()]
    else:
        found = [
            path
            for path in folder.iterdir()
            if not path.name.startswith(".") and not path.is_symlink() and is_run(path)
        ]
    runs = sorted(map(_summary, found), key=lambda run: (run.started, run.name), reverse=True)
    settings = [flat_settings(read_object(run.folder / "settings.json", [])) for run in runs]
    values: dict[str, set[str]] = {}
    for row in settings:
        row.pop("crc32", None)
        for name, value in row.items():
            values.setdefault(name, set()).add(json.dumps(value, sort_keys=True))
    for run, row in zip(runs, settings, strict=True):
        run.differs = {name: value for name, value in row.items() if len(values[name]) > 1}
    return runs


def _summary(folder: Path) -> RunSummary:
    state = state_of(folder, [])
    steps, held_out, started = state.get("steps"), state.get("held_out"), state.get("started")
    if state.get("state") in (None, "running", "killed") or "steps" not in state:  # no result, or an earlier version
        metrics = folder / "metrics.jsonl"
        try:
            stat = metrics.stat()
            steps, held_out = _results(metrics, stat.st_size, stat.st_mtime_ns)
        except (OSError, RecursionError):  # no step yet, or damaged: the run's own page says so
            pass
    if not isinstance(started, int | float) or not 0 <= started < 1e11:  # of an earlier version, or damaged
        started = folder.stat().st_mtime
    return RunSummary(
        folder.name,
        folder,
        str(state.get("state") or ""),
        started,
        steps if isinstance(steps, int) else None,
        _held_out(held_out),
    )


@functools.lru_cache(maxsize=1024)
def _results(metrics: Path, size: int, changed: int) -> tuple[Any, Any]:
    """Last step and held-out values, for a file of this size and time of change."""
    found = results(metrics)
    return found["steps"], found["held_out"]


def _held_out(value: Any) -> str:
    match value:
        case {"metric": metric, "first": [first, before], "last": [last, after]}:
            name = str(metric).removeprefix("held_out/")
            return f"{name} {_brief(before)} @{first}" + f" → {_brief(after)} @{last}" * (first != last)
    return ""


def _brief(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
