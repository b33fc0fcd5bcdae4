"""This project and TRL's GRPOTrainer on the same job, one after the other.

    python benchmarks/trl.py                                  # the main job, 250 steps
    python benchmarks/trl.py --job syllogism                  # the README's example on SmolLM2-135M
    python benchmarks/trl.py --steps 30 --sides one trl2      # a short run
    python benchmarks/trl.py --gpu                            # on all GPUs of this machine

Model, items and their order, scores, group size, optimiser, learning rate and schedule, loss and sampling are the same.
TRL has its own environment with the same versions of torch and transformers (made by the first call). Prints seconds
and CPU-seconds per step by part, reward by samples, and held-out accuracy, which one program measures for the saved
models of both sides; the last line is JSON. benchmarks/README.md describes the keys. Absolute times hold only for a
quiet machine: compare the sides of one call.

TRL runs in one process with 1 and with 2 threads, ours with one thread per process. Options of TRL that only cost time
on a CPU are off (see trl_train.py): the comparison is with TRL at its best.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import trl_environment
from reporting import run_benchmark, short
from trl_picture import draw
from trl_processes import Measured, measure
from trl_sides import JOBS, ROOT, JobName, Side, describe, make_model, ours, recipe_arguments, sides, theirs, write

EVALUATION_DEADLINE_S = 3600.0
QUARTERS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the samples at which the mean reward since the previous share is printed."""


@dataclass(frozen=True)
class Settings:
    """This project and TRL on the same job (see the top of this file)."""

    job: JobName = "main"
    """`main`: recipes/grpo.py with its defaults. `syllogism`: the README's example."""
    steps: int = 0
    """Optimiser steps of each run; 0 is the job's own number (250 and 20)."""
    sides: tuple[str, ...] = ()
    """Sides to run, in this order: default, lag0, one (1 rank + 1 replica), trl1, trl2 (TRL with that many threads); on
    GPUs default, lag0, trl. None named: all."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; each runs all sides with other items, other samples and, in the main job, another model."""
    held_out: int = 0
    """Held-out items; 0 is the job's own number (200 and 40)."""
    trl_microbatch: int = 0
    """Episodes per forward and backward pass of TRL; 0 is all of a step. Fewer take less memory."""
    gpu: bool = False
    """Run on the GPUs of this machine, at least 2. This project gives half of them each to trainer and engines; TRL
    trains on all of them and generates there by vLLM (`vllm_mode` colocate)."""
    deadline_s: float = 7200.0
    """Deadline of a run in seconds."""
    save: str = ""
    """Also write table, JSON and a picture to benchmarks/results/ under this name, such as trl_main_cpu."""


@dataclass(frozen=True)
class Result:
    """The run of a side with one seed."""

    side: Side
    measured: Measured
    warm_up: int
    held_out: dict[str, float]

    def summarise(self, samples_per_step: int) -> dict[str, Any]:
        steps, cpu_s = self.measured.steps, self.measured.cpu_s
        count = len(steps) - self.warm_up
        before, after = cpu_s[self.warm_up], cpu_s[len(steps)]
        by_part = {part: (after[part] - before.get(part, 0.0)) / count for part in after}
        rewards = [row["reward/mean"] for row in steps]
        cuts = [0, *(round(share * len(steps)) for share in QUARTERS)]
        return {
            "step_s": sum(row["time/step_s"] for row in steps[self.warm_up :]) / count,
            "step_cpu_s": sum(by_part.values()),
            "step_cpu_s_by_part": dict(sorted(by_part.items(), key=lambda part: -part[1])),
            "first_step_s": self.measured.wall_s[1],
            "first_step_cpu_s": sum(cpu_s[1].values()),
            "total_s": self.measured.total_s,
            "total_cpu_s": self.measured.total_cpu_s,
            "others_cores": self.measured.others_cores,
            "reward_by_samples": {
                str(end * samples_per_step): float(np.mean(rewards[start:end]))
                for start, end in zip(cuts, cuts[1:], strict=False)
                if end > start
            },
            "held_out_accuracy": self.held_out["accuracy"],
            "held_out_reward": self.held_out["reward"],
        }


def run_side(side: Side, s: Settings, seed: int, model: Path, python: Path, scratch: Path) -> tuple[Measured, Path]:
    """Run one side; returns the measurements and the saved model."""
    job, devices = JOBS[s.job], _devices(s)
    steps = s.steps or job.steps
    folder = scratch / f"{side.name.replace(' ', '_')}-{seed}"
    folder.mkdir()
    arguments = recipe_arguments(job, model, seed, steps)
    described = describe(arguments, side, seed, s.held_out or job.held_out, folder)
    described |= {"gpu": s.gpu, "trl_microbatch": s.trl_microbatch}
    description = write(described, folder / "job.json")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}  # the model is a folder
    if not s.gpu:
        variables |= {name: str(side.threads or 1) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = theirs(python, description, devices) if side.threads else ours(side, arguments, folder)
    root = "TRL" if side.threads else "controller"
    print(f"{side.name}, seed {seed}: {steps} steps", flush=True)
    marks = sorted({1, _warm_up(s), steps})
    measured = measure(command, variables, folder, root, marks, s.deadline_s)
    seconds = np.mean([row["time/step_s"] for row in measured.steps[_warm_up(s) :]])
    print(f"{side.name}: {seconds:.3g} s a step, {measured.total_s:.0f} s in all", flush=True)
    (saved,) = (found.parent for found in folder.rglob("model/config.json"))
    return measured, saved


def evaluate(description: Path, models: list[Path]) -> list[dict[str, float]]:
    """Return held-out accuracy and reward of the models, measured by the same program."""
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "trl_evaluate.py"), str(description), *map(str, models)]
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": str(psutil.cpu_count() or 1)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=EVALUATION_DEADLINE_S, env=variables)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return list(json.loads(done.stdout.splitlines()[-1]))


def run_seed(s: Settings, seed: int, chosen: list[Side], python: Path, scratch: Path) -> tuple[float, list[Result]]:
    """Run all sides; returns the held-out accuracy before training, and the result of each side."""
    model = make_model(s.job, seed, scratch)
    runs = [(side, *run_side(side, s, seed, model, python, scratch)) for side in chosen]
    description = next(scratch.glob(f"*-{seed}/job.json"))
    before, *after = evaluate(description, [model, *(saved for _, _, saved in runs)])
    results = [
        Result(side, measured, _warm_up(s), held_out) for (side, measured, _), held_out in zip(runs, after, strict=True)
    ]
    return before["accuracy"], results


def table(by_side: dict[str, list[dict[str, Any]]], before: list[float]) -> str:
    """Return a table with a column per side: means over seeds, and the accuracy of each seed."""
    parts: dict[str, None] = {}
    for runs in by_side.values():
        parts |= dict.fromkeys(part for run in runs for part in run["step_cpu_s_by_part"])

    def mean(name: str, digits: int) -> list[str]:
        return [f"{np.mean([run[name] for run in runs]):.{digits}f}" for runs in by_side.values()]

    def cpu_s_of_part(part: str) -> list[str]:
        shares = [[run["step_cpu_s_by_part"].get(part, 0.0) for run in runs] for runs in by_side.values()]
        return [f"{np.mean(share):.3f}" if np.mean(share) >= 5e-4 else "" for share in shares]

    rows = [("seconds a step", mean("step_s", 3)), ("CPU-seconds a step", mean("step_cpu_s", 3))]
    rows += [(f"- {part}", cells) for part in parts if any(cells := cpu_s_of_part(part))]
    rows += [("seconds, launch to first step", mean("first_step_s", 1))]
    rows += [("CPU-seconds, launch to first step", mean("first_step_cpu_s", 1))]
    rows += [("seconds with start and end", mean("total_s", 1)), ("CPU-seconds with both", mean("total_cpu_s", 1))]
    rows += [("cores busy with something else", mean("others_cores", 2))]
    for samples in next(iter(by_side.values()))[0]["reward_by_samples"]:
        rewards = [[run["reward_by_samples"][samples] for run in runs] for runs in by_side.values()]
        rows.append((f"reward up to {samples} samples", [f"{np.mean(reward):.3f}" for reward in rewards]))
    accuracies = [", ".join(f"{run['held_out_accuracy']:.1%}" for run in runs) for runs in by_side.values()]
    rows.append((f"held out (before: {', '.join(f'{share:.1%}' for share in before)})", accuracies))
    lines = [["", *by_side], ["---"] * (len(by_side) + 1), *([name, *cells] for name, cells in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(s: Settings) -> None:
    known = sides(_devices(s))
    if unknown := set(s.sides) - set(known):
        raise ValueError(f"no such sides: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if (s.steps or JOBS[s.job].steps) <= _warm_up(s):
        raise ValueError(f"steps must be more than the {_warm_up(s)} that do not count for speed")
    chosen = [known[name] for name in s.sides or known]
    python = trl_environment.ensure(s.gpu)
    results: dict[str, list[Result]] = defaultdict(list)
    before = []
    samples = 0
    with tempfile.TemporaryDirectory() as scratch:
        for seed in s.seeds:
            started, results_of_seed = run_seed(s, seed, chosen, python, Path(scratch))
            before.append(started)
            for result in results_of_seed:
                results[result.side.name].append(result)
        described = json.loads(next(Path(scratch).glob("*/job.json")).read_text())
        samples = described["groups_per_step"] * described["group_size"]
    by_side = {name: [result.summarise(samples) for result in runs] for name, runs in results.items()}
    summary = {
        "benchmark": "trl",
        "job": s.job,
        "steps": s.steps or JOBS[s.job].steps,
        "steps_that_do_not_count": _warm_up(s),
        "samples_per_step": samples,
        "cores": psutil.cpu_count(),
        "versions": trl_environment.versions(python),
        "held_out_accuracy_before": before,
        "sides": by_side,
    }
    report(s, table(by_side, before), short(summary))


def report(s: Settings, shown: str, summary: dict[str, Any]) -> None:
    command = " ".join(["python", "benchmarks/trl.py", *sys.argv[1:]])
    head = f"# {command}\n# {time.strftime('%Y-%m-%d')}, {summary['cores']} cores\n"
    print(shown, json.dumps(summary), sep="\n")
    if s.save:
        path = ROOT / "benchmarks" / "results" / f"{s.save}.txt"
        path.write_text(f"{head}\n{shown}\n\n{json.dumps(summary)}\n")
        path.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
        draw(summary, path.with_suffix(".png"))


def _warm_up(s: Settings) -> int:
    job = JOBS[s.job]
    return min(job.warm_up, max(1, (s.steps or job.steps) // 3))


def _devices(s: Settings) -> int:
    """GPUs to use; 0 is a CPU. Raises ValueError if there are too few."""
    if not s.gpu:
        return 0
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        raise ValueError(f"--gpu needs at least 2 GPUs, one for either side of ours; this machine has {count}")
    return count


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
