"""Compares learning: every objective, correction and advantage on the main job, at an exact lag.

    python benchmarks/algorithms.py                        # all missing runs, the most valuable first
    python benchmarks/algorithms.py --minutes 60           # start none after an hour
    python benchmarks/algorithms.py --only gspo cispo --seeds 0 1 --steps 50
    python benchmarks/algorithms.py --show                 # table and plot of finished runs

Four objectives (dapo, gspo, cispo, decoupled) run at lag 0 and 8 with five seeds. The policy gradient runs with each
correction at lag 8; the two objectives that lose most by the lag run with the correction opsm and three seeds;
everything else that has a name runs once at lag 2. All have the main job's model, task, batches and optimiser, and half
of its steps, on 1 trainer rank and 1 replica (algorithms_recipe.py makes the lag exact). Each seed has its own model,
items and samples. Each finished run is a line of the results file; a call runs only the missing ones.

The last line is JSON. benchmarks/README.md describes the columns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from algorithms_cases import FLAGS, NEEDS_MORE, Case, plan
from algorithms_table import draw, table
from reporting import run_benchmark, short

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHARED = "--trainer.ranks 1 --generator.replicas 1 --buffer.window 0"
"""Flags of all runs, in addition to the recipe's defaults. Without a window all tokens of a batch have one lag."""
EVALUATIONS = 5
"""Number of evaluations during and after training, at equal distances."""
RUN_DEADLINE_S = 3600.0
"""Deadline of a run in seconds."""


@dataclass(frozen=True)
class Settings:
    """Compare learning (see the top of this file)."""

    only: tuple[str, ...] = ()
    """Names of cases to run, such as gspo; none is all."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of the four objectives; two with a correction run with the first three, everything else with the first."""
    steps: int = 125
    """Optimiser steps of each run: a multiple of 5."""
    minutes: float = 0.0
    """No run begins after this many minutes; 0 is no limit."""
    results: Path = RESULTS / "algorithms_cpu.jsonl"
    """File with a line for each finished run."""
    show: bool = False
    """Run nothing: show the runs in the file."""
    save: str = ""
    """Also write table and plot to benchmarks/results/ under this name, such as algorithms_cpu."""

    def __post_init__(self) -> None:
        if unknown := set(self.only) - set(FLAGS):
            raise ValueError(f"no such cases: {', '.join(sorted(unknown))}; there are {', '.join(FLAGS)}")
        if self.steps < EVALUATIONS or self.steps % EVALUATIONS:
            raise ValueError(f"steps must be a multiple of {EVALUATIONS}, got {self.steps}")


def model_of(seed: int) -> Path:
    """Make the tiny model of a seed, with its own random weights and supervised run; seed 0 has the main job's
    model."""
    folder = ROOT / ".cache" / ("tiny-qwen3" + (f"-seed{seed}" if seed else ""))
    command = ["tools/make_tiny_model.py", "--seed", str(seed), "--task.seed", str(seed), "--output", str(folder)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=RUN_DEADLINE_S, stdout=subprocess.DEVNULL)
    return folder


def arguments_of(case: Case, steps: int) -> list[str]:
    """Return the arguments of the recipe, without folders."""
    seeds = ["--task.seed", str(case.seed), "--generator.random-seed", str(1000 * case.seed)]
    lengths = ["--steps", str(steps), "--evaluate-every", str(steps // EVALUATIONS)]
    lag = ["--buffer.max-policy-lag", str(case.lag)]
    return [*SHARED.split(), *lengths, *lag, *seeds, *case.flags]


def run(case: Case, steps: int) -> dict[str, Any]:
    """Run a case and return its result. Raises RuntimeError with the end of its output if it fails."""
    arguments, model = arguments_of(case, steps), model_of(case.seed)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = str(ROOT / "benchmarks" / "algorithms_recipe.py")
        command = [sys.executable, recipe, "--model", str(model), "--output", scratch, *arguments]
        variables = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_DEADLINE_S, env=variables)
        if done.returncode:
            raise RuntimeError(f"{case.name} at lag {case.lag} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        lines = next(Path(scratch).glob("*/metrics.jsonl")).read_text().splitlines()
    described = {"name": case.name, "lag": case.lag, "seed": case.seed, "steps": steps, "arguments": arguments}
    return described | short(summarise([json.loads(line) for line in lines]))


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run's ``metrics.jsonl`` for the results file."""
    steps = [row for row in rows if "reward/mean" in row]
    part, half = max(1, len(steps) // 10), steps[len(steps) // 2 :]

    def mean(name: str, some: list[dict[str, Any]]) -> float:
        return float(np.mean([row.get(name) or 0.0 for row in some]))

    accuracy = [(row["step"], row["held_out/accuracy"]) for row in rows if "held_out/accuracy" in row]
    trained, wasted = sum(row["trainer/tokens"] for row in steps), steps[-1].get("wasted/tokens") or 0.0
    return {
        "accuracy": accuracy,
        "reward_first_tenth": mean("reward/mean", steps[:part]),
        "reward_last_tenth": mean("reward/mean", steps[-part:]),
        "entropy_first_tenth": mean("trainer/entropy", steps[:part]),
        "entropy_last_tenth": mean("trainer/entropy", steps[-part:]),
        "kl": mean("trainer/mismatch_k3_all", half),
        "kl_max": max(row["trainer/mismatch_k3_all"] for row in steps),
        "clipped": mean("trainer/clipped", half),
        "weight": mean("trainer/importance_weight", half),
        "wasted": wasted / (wasted + trained),
        "equal_groups": mean("reward/equal_groups_share", half),
        "lag_mean": mean("lag/mean", half),
        "grad_norm_max": max(row["trainer/grad_norm"] for row in steps),
    }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run_missing(s: Settings) -> list[str]:
    """Run the cases that the file lacks; returns a sentence about each failure."""
    started, failed = time.monotonic(), []
    for case in plan(s.seeds):
        finished = any(row["arguments"] == arguments_of(case, s.steps) for row in read(s.results))
        if finished or s.only and case.name not in s.only:
            continue
        if s.minutes and time.monotonic() - started > 60 * s.minutes:
            break
        case_started = time.monotonic()
        try:
            result = run(case, s.steps)
        except (RuntimeError, subprocess.SubprocessError) as error:  # the other cases can still run
            failed.append(str(error))
            print(error, flush=True)
            continue
        with s.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        (_, before), (_, after) = result["accuracy"][0], result["accuracy"][-1]
        took = time.monotonic() - case_started
        print(f"{case.name}, lag {case.lag}, seed {case.seed}: {before} -> {after} ({took:.0f} s)", flush=True)
    return failed


def left_out(s: Settings, rows: list[dict[str, Any]]) -> list[str]:
    """Return sentences about runs that are not in the file."""
    there = [row["arguments"] for row in rows]
    missing = [case for case in plan(s.seeds) if arguments_of(case, s.steps) not in there]
    runs = "; ".join(f"{case.name} (lag {case.lag}, seed {case.seed})" for case in missing)
    sentences = [f"Not run: {runs}."] if missing else []
    return sentences + [f"Not run: {name}: it needs {what}." for name, what in NEEDS_MORE.items()]


def main(s: Settings) -> None:
    failed = [] if s.show else run_missing(s)
    rows = [row for row in read(s.results) if row["steps"] == s.steps]
    if not rows:
        raise ValueError(f"{s.results} has no run of {s.steps} steps: leave out --show")
    sentences = left_out(s, rows)
    shown = "\n\n".join([table(rows), "\n".join(sentences)])
    summary = {"benchmark": "algorithms", "runs": len(rows), "steps": s.steps, "shared": SHARED, "failed": len(failed)}
    print(shown, json.dumps(summary), sep="\n\n")
    if s.save:
        path = RESULTS / f"{s.save}.txt"
        path.write_text(f"# python benchmarks/algorithms.py\n\n{shown}\n\n{json.dumps(summary)}\n")
        draw(rows, path.with_suffix(".png"))
    if failed:
        sys.exit(f"{len(failed)} runs failed; see above")


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
