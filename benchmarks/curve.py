"""Plot the curves of runs by step: reward, held-out accuracy, lag, and idle shares of both sides.

    python benchmarks/curve.py runs/grpo-20260101-120000
    python benchmarks/curve.py runs/a runs/b runs/c --output seeds.png    # of one recipe, with several seeds

Each run has its colour; for several runs the spread of their results is printed. The last line is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from reporting import short

Rows = Sequence[dict[str, Any]]
"""Rows of the metrics of a run."""
ACCURACY = "held_out/accuracy"
PANELS = (
    ("reward", ("reward/mean",)),
    ("held-out accuracy", (ACCURACY,)),
    ("lag", ("lag/mean", "lag/max")),
    ("idle share", ("trainer/idle_share", "generator/idle_share")),
)
STYLES = ("-", ":")
"""Line styles of the metrics of a panel."""


@dataclass(frozen=True)
class Settings:
    """Plot the curves of runs (see the top of this file)."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or their metrics.jsonl."""
    output: Path = Path("curve.png")
    """PNG file to write."""
    title: str = ""
    """Heading."""


def rows_of(run: Path) -> Rows:
    """Return the metrics of a run folder, or of its metrics.jsonl."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    return [json.loads(line) for line in path.read_text().splitlines()]


def values(rows: Rows, name: str) -> list[float]:
    """Return a metric, from the rows that have it."""
    return [row[name] for row in rows if row.get(name) is not None]


def summarise(rows: Rows) -> dict[str, Any]:
    """Return the metrics of a run at its beginning and its end."""
    rewards, held_out = values(rows, "reward/mean"), values(rows, ACCURACY)
    part = max(1, len(rewards) // 5)
    return {
        "steps": len(rewards),
        "held_out_accuracy": held_out,
        "reward_first_fifth": float(np.mean(rewards[:part])),
        "reward_last_fifth": float(np.mean(rewards[-part:])),
    }


def spread(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Return the mean over runs, and the sample standard deviation if there are several, of two numbers per run and of
    their difference."""
    found = {}
    for name, values_of_runs in (("before", before), ("after", after), ("rise", np.subtract(after, before))):
        found[f"{name}_mean"] = float(np.mean(values_of_runs))
        if len(before) > 1:
            found[f"{name}_standard_deviation"] = float(np.std(values_of_runs, ddof=1))
    return found


def draw(runs: Sequence[Rows], output: Path, title: str = "") -> None:
    """Plot all panels; each run has its colour, each metric of a panel its style."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(PANELS), 1, sharex=True, figsize=(8, 10), layout="constrained")
    for axis, (label, names) in zip(axes, PANELS, strict=True):
        for name, style in zip(names, STYLES, strict=False):
            for number, rows in enumerate(runs):
                points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
                marker = "o" if name == ACCURACY else None
                axis.plot(*zip(*points, strict=True), style, marker=marker, color=f"C{number}", linewidth=1)
            axis.plot([], [], style, color="black", label=name)
        axis.set_ylabel(label)
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("optimiser step")
    figure.suptitle(title)
    figure.savefig(output, dpi=100)


def main(settings: Settings) -> None:
    runs = [rows_of(run) for run in settings.runs]
    draw(runs, settings.output, settings.title)
    found = [summarise(rows) for rows in runs]
    for run, summary in zip(settings.runs, found, strict=True):
        print(run.name, short(summary))
    held_out = [summary["held_out_accuracy"] for summary in found if summary["held_out_accuracy"]]
    differ = spread([summary[0] for summary in held_out], [summary[-1] for summary in held_out]) if held_out else {}
    print(json.dumps(short({"runs": found, **differ})))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
