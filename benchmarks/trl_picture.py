"""Plots the results of trl.py: seconds and CPU-seconds of a step by part, and reward by samples.

python benchmarks/trl_picture.py benchmarks/results/trl_main_cpu.json     # writes trl_main_cpu.png next to it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def draw(summary: dict[str, Any], path: Path) -> None:
    """Plot stacked bars of CPU-seconds, marks of seconds, and curves of reward; means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides: dict[str, list[dict[str, Any]]] = summary["sides"]
    figure, (cost, learning) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    parts = dict.fromkeys(part for runs in sides.values() for run in runs for part in run["step_cpu_s_by_part"])
    bottom = np.zeros(len(sides))
    for part in parts:
        heights = [np.mean([run["step_cpu_s_by_part"].get(part, 0.0) for run in runs]) for runs in sides.values()]
        if max(heights) < 1e-3:
            continue
        cost.barh(list(sides), heights, left=bottom, label=part, color="darkgray" if part == "TRL" else None)
        bottom += heights
    cost.plot([np.mean([run["step_s"] for run in runs]) for runs in sides.values()], list(sides), "k|", markersize=24)
    cost.set(xlabel="CPU-seconds of a step, by part (black: seconds)")
    cost.invert_yaxis()
    figure.legend(*cost.get_legend_handles_labels(), loc="outside lower left", ncols=5, fontsize="small")
    for name, runs in sides.items():
        curves = [list(run["reward_by_samples"].values()) for run in runs]
        samples = [int(end) for end in runs[0]["reward_by_samples"]]
        learning.plot(samples, np.mean(curves, axis=0), marker="o", label=name)
    learning.set(xlabel="episodes trained", ylabel="mean reward since the point before")
    learning.legend(fontsize="small")
    learning.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    saved = Path(sys.argv[1])
    draw(json.loads(saved.read_text()), saved.with_suffix(".png"))
