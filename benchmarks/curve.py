"""Draw the curves of a run: reward, lag, and how idle each side was, step by step. The last line is JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro


@dataclass(frozen=True)
class Settings:
    """Draw the curves of a run."""

    run: tyro.conf.Positional[Path]
    """Run folder, or its metrics.jsonl."""
    output: Path = Path("curve.png")
    """PNG file to write."""
    title: str = ""
    """Heading."""


PANELS = (
    ("reward", ("reward/mean",)),
    ("lag", ("lag/mean", "lag/max")),
    ("idle share", ("trainer/idle_share", "generator/idle_share")),
)


def main(settings: Settings) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = settings.run / "metrics.jsonl" if settings.run.is_dir() else settings.run
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    figure, axes = pyplot.subplots(len(PANELS), 1, sharex=True, figsize=(8, 8), layout="constrained")
    for axis, (label, names) in zip(axes, PANELS, strict=True):
        for name in names:
            axis.plot([row["step"] for row in steps], [row[name] for row in steps], label=name)
        axis.set_ylabel(label)
        axis.legend()
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("optimiser step")
    held_out = [row["held_out/accuracy"] for row in rows if "held_out/accuracy" in row]
    figure.suptitle(settings.title)
    figure.savefig(settings.output, dpi=100)
    rewards = [row["reward/mean"] for row in steps]
    part = max(1, len(rewards) // 5)
    first, last = float(np.mean(rewards[:part])), float(np.mean(rewards[-part:]))
    summary = {
        "steps": len(steps),
        "held_out_accuracy": held_out,
        "reward_first_fifth": first,
        "reward_last_fifth": last,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
