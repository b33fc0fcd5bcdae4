"""Effect of route replay: recipes/grpo_moe.py with and without it, for each seed.

    python benchmarks/moe_replay.py --plot moe_replay.png

Each seed has its own tiny mixture of experts and its own questions, the same with and without replay, and seeds the
engines; samples differ after the first steps. Without replay the engine's routes are sent too, to be compared. The
engine serves bfloat16 and the trainer computes in float32: in one precision both choose the same experts in a model
this small. The plot shows the mismatch of engine and trainer (k3 estimate of the KL) and the reward over steps. The
last line is JSON.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from main_job import run
from reporting import run_benchmark, short

MODES = {"replay": "replay", "own_routes": "compare"}
"""Values of trainer.router-replay, by their names in the output."""
CURVES = {
    "trainer/mismatch_k3_all": "mismatch of engine and trainer, k3 (KL)",
    "reward/mean": "reward of the batch",
}
SMOOTHED = 8
"""Steps that are averaged per point of the plot."""


@dataclass(frozen=True)
class Settings:
    """Effect of route replay (see the top of this file)."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to run, one after the other."""
    steps: int = 120
    plot: Path | None = None
    """PNG file to write."""
    arguments: tuple[str, ...] = ("--generator.dtype", "bfloat16")
    """Further arguments of the recipe, the same for all runs."""


def run_recipe(seed: int, mode: str, s: Settings, scratch: Path) -> list[dict[str, float]]:
    """Run the recipe once; returns the rows of its metrics."""
    model, runs = scratch / f"model{seed}", scratch / f"{mode}{seed}"
    if not model.exists():
        kind = ["--kind", "moe", "--seed", str(seed), "--task.seed", str(seed)]
        run("tools/make_tiny_model.py", *kind, "--output", str(model))
    seeds = ["--task.seed", str(seed), "--generator.random-seed", str(1000 * seed)]
    routing = ["--trainer.router-replay", MODES[mode], "--steps", str(s.steps)]
    run("recipes/grpo_moe.py", "--model", str(model), "--output", str(runs), *routing, *seeds, *s.arguments)
    (folder,) = runs.iterdir()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summarise(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the means of one run."""
    before, after = (row["held_out/accuracy"] for row in rows if "held_out/accuracy" in row)
    steps = [row for row in rows if "time/step_s" in row]

    def mean(name: str) -> float:
        found = [row[name] for row in steps if name in row and math.isfinite(row[name])]
        return float(np.mean(found)) if found else float("nan")

    on_policy = np.asarray([row["trainer/on_policy_share"] * row["trainer/tokens"] for row in steps])
    mismatch = np.asarray([row.get("trainer/mismatch_k3_on_policy", 0.0) for row in steps])
    last = steps[-max(len(steps) // 10, 1) :]
    return {
        "before": before,
        "after": after,
        "reward_last_tenth": float(np.mean([row["reward/mean"] for row in last])),
        "mismatch_k3_all": mean("trainer/mismatch_k3_all"),
        "mismatch_k3_on_policy": float((mismatch * on_policy).sum() / max(on_policy.sum(), 1)),
        "routes_differ": mean("trainer/routes_differ"),
        "entropy_last": last[-1]["trainer/entropy"],
        "grad_norm": mean("trainer/grad_norm"),
        "lag_mean": mean("lag/mean"),
        "step_s": mean("time/step_s"),
    }


def draw(runs: dict[tuple[str, int], list[dict[str, float]]], path: Path) -> None:
    """Plot both curves, a line for each run; thick lines are means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(11, 4))
    for axis, (name, title) in zip(axes, CURVES.items(), strict=True):
        for mode, colour in zip(MODES, ("tab:blue", "tab:orange"), strict=True):
            lines = []
            for (run_mode, _), rows in runs.items():
                values = [row[name] for row in rows if name in row]
                if run_mode == mode:
                    lines.append(np.convolve(values, np.ones(SMOOTHED) / SMOOTHED, "valid"))
                    axis.plot(np.arange(len(lines[-1])) + SMOOTHED, lines[-1], color=colour, alpha=0.3, linewidth=0.8)
            mean = np.mean(lines, axis=0)
            label = f"{mode.replace('_', ' ')}, mean of {len(lines)} seeds"
            axis.plot(np.arange(len(mean)) + SMOOTHED, mean, color=colour, label=label)
        axis.set(xlabel="step", title=title)
        axis.legend()
    axes[0].set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(s: Settings) -> None:
    runs = {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in s.seeds:
            for mode in MODES:
                runs[mode, seed] = run_recipe(seed, mode, s, Path(scratch))
    found: dict[str, Any] = {f"{mode}_{seed}": summarise(rows) for (mode, seed), rows in runs.items()}
    for name, values in found.items():
        print(name, short(values))
    if s.plot is not None:
        draw(runs, s.plot)
    means = {
        mode: {
            name: float(np.mean([found[f"{mode}_{seed}"][name] for seed in s.seeds]))
            for name in ("before", "after", "mismatch_k3_all", "mismatch_k3_on_policy", "routes_differ")
        }
        for mode in MODES
    }
    print(json.dumps(short({"benchmark": "moe_replay", "steps": s.steps, "runs": found, "means": means})))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
