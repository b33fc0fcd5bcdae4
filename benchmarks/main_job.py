"""Does a recipe learn, and how much do seeds differ? Runs it once for each seed and prints held-out accuracy.

    python benchmarks/main_job.py                                                        # recipes/grpo.py
    python benchmarks/main_job.py --recipe recipes/game.py --plot game.png --steps 100

The recipe's own flags follow, the same for all seeds.
Each seed has its own tiny model (random weights and supervised run) and its own draws; with the data sets of
reasoning-gym its own training and held-out questions, too. The last line is JSON.
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
"""Seconds that one run may take."""
MAKER = "tools/make_tiny_model.py"


@dataclass(frozen=True)
class Settings:
    """Run the main job once for each seed (see the top of this file)."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to run, one after the other."""
    recipe: str = "recipes/grpo.py"
    """The recipe that is run."""
    plot: Path | None = None
    """PNG to draw, with a curve for each seed."""
    runs: Path | None = None
    """Folder to keep models and run folders in, by seed; what is finished there is not run again. None keeps none."""


def run(*command: str) -> None:
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=RUN_DEADLINE_S)


def arguments_of_maker(recipe: Path) -> list[str]:
    """How a recipe's docstring has its tiny model made, without the place; nothing where it does not say."""
    said = (ast.get_docstring(ast.parse(recipe.read_text())) or "").replace("\\\n", " ")
    command = next((line for line in said.splitlines() if MAKER in line), MAKER)
    arguments = shlex.split(command.partition(MAKER)[2].partition("&&")[0])
    if "--output" in arguments:
        place = arguments.index("--output")
        del arguments[place : place + 2]
    return arguments


def play(seed: int, s: Settings, flags: Sequence[str], folder: Path) -> Path:
    """Run the recipe with a model of its own, unless that is done. Returns the run's folder."""
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
    """Of a run: accuracy before and after, and how far beyond chance the rise is."""
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
        kept = (settings.runs or Path(scratch)).resolve()
        folders = [play(seed, settings, flags, kept) for seed in settings.seeds]
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
