"""The diagnosis of a run: what its files say of why it learns little (``report/rules.py``)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

from monarch_rl.report.read import Metrics, RunRecord, flat_settings, read_run
from monarch_rl.report.rules import Evidence, Finding, SampledEpisode, findings

CUT = ("length", "context")
"""Finish reasons of answers that a limit of tokens ended."""


def diagnose(run: Path) -> list[Finding]:
    """The findings of a run, most important first. Raises SettingsError if it is not a run's folder."""
    return findings(evidence_of(read_run(run)))


def evidence_of(record: RunRecord) -> Evidence:
    """What the rules read of a run."""
    device = record.state.get("device")
    trained = [
        SampledEpisode(episode["step"], float(episode["reward"]), episode.get("finish_reason") in CUT)
        for episode in record.episodes
        if episode["kind"] == "train" and episode["reward"] is not None and isinstance(episode.get("step"), int)
    ]
    failures = [episode["failure"] for episode in record.episodes if isinstance(episode.get("failure"), dict)]
    return Evidence(
        columns_of(record.metrics),
        flat_settings(record.settings),
        trained,
        Counter(f"{failure.get('place', '')} {failure.get('reason', '')}".strip() for failure in failures),
        on_gpu=None if device not in ("cpu", "cuda") else device == "cuda",
    )


def columns_of(metrics: Metrics) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Metrics by name: int64[n] steps and float64[n] values, without nan and infinities."""
    steps, found = np.asarray(metrics.steps, np.int64), {}
    for name, column in metrics.columns.items():
        values = np.asarray(column.values, np.float64)
        finite = np.isfinite(values)
        if finite.any():
            found[name] = steps[np.asarray(column.rows, np.int64)][finite], values[finite]
    return found


def as_text(found: list[Finding]) -> str:
    """The findings for a reader, most important first."""
    if not found:
        return "nothing found: no rule applies"
    lines = []
    for one in found:
        mark = "!" if one.level == "problem" else "-"
        lines.append(f"{mark} {one.sentence} (since step {one.since}, {one.confidence}; {one.metric})")
        lines.append(f"    change: {one.change}")
    return "\n".join(lines)


def as_json(found: list[Finding]) -> str:
    """The findings as a JSON list, most important first."""
    return json.dumps([asdict(one) for one in found], indent=2)
