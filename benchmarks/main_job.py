"""Tests whether a recipe learns, and how much seeds differ: runs it for each seed and prints held-out accuracy.

    python benchmarks/main_job.py                                                        # recipes/grpo.py
    python benchmarks/main_job.py --recipe recipes/game.py --plot game.png --steps 100

The recipe's own flags follow, the same for all seeds.
Each seed has its own tiny model (random weights and supervised run) and its own samples; with the data sets of
reasoning-gym also its own training and held-out questions. The last line is JSON.
"""

from __future__ import annotations

import ast
import json
import math
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from curve import ACCURACY, draw, rows_of, spread, values

ROOT = Path(__file__).parents[1]
RUN_DEADLINE_S = 3600.0
"""Deadline of a run in seconds."""
MAKER = "tools/make_tiny_model.py"


@dataclass(frozen=True)
class Settings:
    """Run the main job once for each seed (see the top of this file)."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to run, one after the other."""
    recipe: str = "recipes/grpo.py"
    """Recipe to run."""
    plot: Path | None = None
    """PNG file to write, with a curve for each seed."""
    runs: Path | None = None
    """Folder for models and run folders, by seed; finished runs there are not repeated. None uses a temporary
    folder."""


def run(*command: str) -> None:
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=RUN_DEADLINE_S)


def arguments_of_maker(recipe: Path) -> list[str]:
    """Return the flags with which a recipe's docstring makes its tiny model, without the folder; empty if it does
    not."""
    docstring = (ast.get_docstring(ast.parse(recipe.read_text())) or "").replace("\\\n", " ")
    command = next((line for line in docstring.splitlines() if MAKER in line), MAKER)
    arguments = shlex.split(command.partition(MAKER)[2].partition("&&")[0])
    if "--output" in arguments:
        place = arguments.index("--output")
        del arguments[place : place + 2]
    return arguments


def run_recipe(seed: int, s: Settings, flags: Sequence[str], folder: Path) -> Path:
    """Run the recipe with the model of a seed, unless that run is finished; returns the run folder."""
    model, runs, name = folder / f"model{seed}", folder / f"runs{seed}", Path(s.recipe).stem
    if not any(json.loads(file.read_text())["state"] == "finished" for file in runs.glob("*/run.json")):
        shutil.rmtree(runs, ignore_errors=True)
        seeds = ["--seed", str(seed), "--task.seed", str(seed)]
        run(MAKER, *arguments_of_maker(ROOT / s.recipe), *seeds, "--output", str(model))
        seeds = ["--generator.random-seed", str(1000 * seed)]
        seeds += ["--task.seed", str(seed)] if name.startswith("grpo") else []
        run(s.recipe, "--model", str(model), "--output", str(runs), *seeds, *flags)
    (found,) = runs.iterdir()
    return found


def measure(seed: int, folder: Path) -> dict[str, float]:
    """Return a run's accuracy before and after training, and the significance of the difference."""
    rows = rows_of(folder)
    items = json.loads((folder / "settings.json").read_text())["held_out"]
    before, *_, after = values(rows, ACCURACY)
    steps = [row for row in rows if "time/step_s" in row]
    tenth = max(len(steps) // 10, 1)
    pooled = min(max((before + after) / 2, 0.5 / items), 1 - 0.5 / items)
    return {
        "seed": seed,
        "before": before,
        "after": after,
        # The difference of two shares of `items` items in standard errors; chance exceeds 4 once in 30,000 times.
        "rise_in_standard_errors": (after - before) / math.sqrt(2 * pooled * (1 - pooled) / items),
        "sampled_reward_first_tenth": float(np.mean(values(steps[:tenth], "reward/mean"))),
        "sampled_reward_last_tenth": float(np.mean(values(steps[-tenth:], "reward/mean"))),
        "trainer_idle_share": float(np.mean(values(steps, "trainer/idle_share"))),
        "generator_idle_share": float(np.mean(values(steps, "generator/idle_share"))),
        "lag_max": max(values(steps, "lag/max")),
        "lag_mean": float(np.mean(values(steps, "lag/mean"))),
        "minutes": sum(values(steps, "time/step_s")) / 60,
    }


def main(settings: Settings, flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = (settings.runs or Path(scratch)).resolve()
        folders = [run_recipe(seed, settings, flags, root) for seed in settings.seeds]
        results = [measure(seed, folder) for seed, folder in zip(settings.seeds, folders, strict=True)]
        if settings.plot is not None:
            seeds = ", ".join(map(str, settings.seeds))
            draw([rows_of(folder) for folder in folders], settings.plot, f"{settings.recipe}, seeds {seeds}")
    for result in results:
        print({name: round(value, 3) for name, value in result.items()})
    differ = spread([result["before"] for result in results], [result["after"] for result in results])
    print(json.dumps({"benchmark": "main_job", "recipe": settings.recipe, "seeds": results, **differ}))


if __name__ == "__main__":
    main(*tyro.cli(Settings, description=__doc__, return_unknown_args=True))
