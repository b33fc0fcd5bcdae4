"""Does this tree cost more than another one? Alternates the benchmarks of both and prints ratios of CPU time.

    git worktree add ../base v0.1.0 && python benchmarks/against.py --base ../base
    python benchmarks/against.py --base ../base --parts main_job --rounds 9

Each tree runs its own copy of a benchmark with its own sources and its own environment, or this one's if it has none.
The order changes with every round. A ratio is this tree's cost / the base's in the same round. The interval from the
smallest to the largest of n ratios holds the true median with probability 1 - 2^(1 - n), whatever the distribution. The
last line is JSON.

All ratios are of costs. main_job: CPU-seconds of a step of recipes/grpo.py, all processes. trainer, reference,
generator: CPU time of the parts, relative to the bare library in the same run. swap: the pause of an engine, relative
to a copy of the weights in the same run. start: CPU-seconds, and seconds, up to the first step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reporting import run_benchmark, short

HERE = Path(__file__).parents[1]
DEADLINE_S = 900.0
"""Seconds that one benchmark may take."""

Part = Literal["main_job", "speed", "start"]


@dataclass(frozen=True)
class Settings:
    """Compare this tree with another one (see the top of this file)."""

    base: Path
    """Folder of the other tree."""
    parts: tuple[Part, ...] = ("main_job", "speed", "start")
    """What to compare."""
    rounds: int = 5
    """Runs of each benchmark in each tree."""


@dataclass(frozen=True)
class Comparison:
    """A benchmark of both trees."""

    script: str
    arguments: tuple[str, ...]
    costs: Mapping[str, Callable[[dict[str, Any]], float]]
    """How each cost is read from the benchmark's JSON."""


COMPARISONS: dict[Part, Comparison] = {
    "main_job": Comparison(
        "cpu_by_process.py", ("--idle-s", "1"), {"CPU-seconds per step": lambda found: found["cpu_s_per_step"]}
    ),
    "speed": Comparison(
        "speed.py",
        ("--parts", "trainer", "reference", "generator", "swap"),
        {  # the ratios of speed.py are the library's CPU time / ours
            "trainer": lambda found: 1 / found["trainer_cpu_ratio"],
            "reference": lambda found: 1 / found["reference_cpu_ratio"],
            "generator": lambda found: 1 / found["generator_cpu_ratio"],
            "swap": lambda found: found["swap_over_local_copy"],
        },
    ),
    "start": Comparison(
        "startup.py",
        (),
        {
            "CPU-seconds": lambda found: found["cpu_s_total"],
            "seconds": lambda found: found["wall_s"]["first step"],
        },
    ),
}


def run(tree: Path, script: str, *arguments: str) -> str:
    """Run a program of a tree with the tree's sources and return its output."""
    python = tree / ".venv/bin/python"
    done = subprocess.run(
        [str(python) if python.exists() else sys.executable, script, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{script} in {tree} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def measure(tree: Path, comparison: Comparison) -> dict[str, float]:
    """Run the benchmark of a tree once and return its costs."""
    output = run(tree, f"benchmarks/{comparison.script}", *comparison.arguments)
    found = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    return {name: float(cost(found)) for name, cost in comparison.costs.items()}


def main(s: Settings) -> None:
    trees = {"base": s.base.resolve(), "here": HERE}
    for tree in trees.values():
        if not (tree / ".cache/tiny-qwen3").exists():
            run(tree, "tools/make_tiny_model.py")
    results: dict[str, Any] = {"benchmark": "against", "rounds": s.rounds}
    for part in s.parts:
        ratios: defaultdict[str, list[float]] = defaultdict(list)
        for round_number in range(s.rounds):
            order = ("base", "here") if round_number % 2 == 0 else ("here", "base")
            costs = {name: measure(trees[name], COMPARISONS[part]) for name in order}
            for name in COMPARISONS[part].costs:
                ratios[name].append(costs["here"][name] / costs["base"][name])
            print(f"{part}, round {round_number + 1}:", short(costs), flush=True)
        for name, values in ratios.items():
            spread = [statistics.median(values), min(values), max(values)]
            print(f"{part}, {name}: median ratio {spread[0]:.3f}, from {spread[1]:.3f} to {spread[2]:.3f}", flush=True)
            results[f"{part}, {name}"] = short(spread)
    print(json.dumps(results))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
