"""Does the main job learn, and how much do seeds differ? Runs it once for each seed and prints held-out accuracy.

Each seed has its own tiny model (random weights and supervised run), its own training and held-out questions, and its
own draws. The last line is JSON.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).parents[1]
RUN_DEADLINE_S = 1800.0
"""Seconds that one run may take."""


@dataclass(frozen=True)
class Settings:
    """Run the main job once for each seed (see the top of this file)."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to run, one after the other."""
    recipe: str = "recipes/grpo.py"
    """The recipe that is run."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the recipe, the same for all seeds."""


def run(*command: str) -> None:
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=RUN_DEADLINE_S)


def measure(seed: int, s: Settings, scratch: Path) -> dict[str, float]:
    """One run: accuracy before and after, and how far beyond chance the rise is."""
    model, runs = scratch / f"model{seed}", scratch / f"runs{seed}"
    run("tools/make_tiny_model.py", "--seed", str(seed), "--task.seed", str(seed), "--output", str(model))
    seeds = ["--task.seed", str(seed), "--generator.random-seed", str(1000 * seed)]
    run(s.recipe, "--model", str(model), "--output", str(runs), *seeds, *s.arguments)
    (folder,) = runs.iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    items = json.loads((folder / "settings.json").read_text())["held_out"]
    before, after = (row["held_out/accuracy"] for row in rows if "held_out/accuracy" in row)
    steps = [row for row in rows if "time/step_s" in row]
    pooled = min(max((before + after) / 2, 0.5 / items), 1 - 0.5 / items)
    return {
        "seed": seed,
        "before": before,
        "after": after,
        # The difference of two shares of `items` items in standard errors; chance exceeds 4 once in 30,000 times.
        "rise_in_standard_errors": (after - before) / math.sqrt(2 * pooled * (1 - pooled) / items),
        "sampled_reward_first_tenth": float(np.mean([row["reward/mean"] for row in steps[: len(steps) // 10]])),
        "sampled_reward_last_tenth": float(np.mean([row["reward/mean"] for row in steps[-(len(steps) // 10) :]])),
        "trainer_idle_share": float(np.mean([row["trainer/idle_share"] for row in steps])),
        "generator_idle_share": float(np.mean([row["generator/idle_share"] for row in steps])),
        "lag_max": max(row["lag/max"] for row in steps),
        "lag_mean": float(np.mean([row["lag/mean"] for row in steps])),
        "minutes": sum(row["time/step_s"] for row in steps) / 60,
    }


def main(settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        results = [measure(seed, settings, Path(scratch)) for seed in settings.seeds]
    for result in results:
        print({name: round(value, 3) for name, value in result.items()})
    rises = [result["after"] - result["before"] for result in results]
    summary = {
        "benchmark": "main_job",
        "recipe": settings.recipe,
        "seeds": results,
        "rise_mean": float(np.mean(rises)),
        "rise_standard_deviation": float(np.std(rises, ddof=1)) if len(rises) > 1 else 0.0,
        "after_mean": float(np.mean([result["after"] for result in results])),
        "after_standard_deviation": float(np.std([r["after"] for r in results], ddof=1)) if len(rises) > 1 else 0.0,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
