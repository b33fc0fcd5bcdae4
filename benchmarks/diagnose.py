"""Records runs by which the rules of `monarch-rl diagnose` are judged: sick ones, each in one way, and healthy ones.

    python benchmarks/diagnose.py --runs .cache/diagnose             # records what is missing there; may be interrupted
    python benchmarks/diagnose.py --runs .cache/diagnose --only few,entropy
    python benchmarks/diagnose.py                                    # only applies the rules to the recorded runs

Writes a line per run to benchmarks/results/diagnose.jsonl: the metrics and settings that the rules read, and step,
reward and end of the sampled episodes; tests/report/test_rules.py applies the rules to them. Prints what they find.
Thresholds were chosen on the sick runs and on healthy ones of seeds below 20; others were recorded afterwards.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from monarch_rl.report.diagnose import evidence_of
from monarch_rl.report.read import read_run
from monarch_rl.report.rules import Evidence, SampledEpisode, findings

ROOT = Path(__file__).parents[1]
RUN_DEADLINE_S = 1800.0
"""Deadline of a run in seconds."""
STEPS = 60
RESULTS = ROOT / "benchmarks" / "results" / "diagnose.jsonl"
SICK: dict[str, tuple[str, list[str]]] = {
    "wrong": ("no_signal", []),
    "cut": ("cut_answers", ["--rollout.max-new-tokens", "2"]),
    "format": ("part_never_earned", []),
    "gaming": ("gaming", []),
    "entropy": ("low_entropy", ["--trainer.lr", "0.01"]),
    "mismatch": ("mismatch", []),
    "small": ("small_updates", ["--trainer.lr", "1e-9", "--generator.dtype", "bfloat16"]),
    "few": ("few_rows", []),
    "clipped": (
        "clipped_away",
        ["--trainer.epochs", "4", "--objective.clip-low", "1e-4", "--objective.clip-high", "1e-4"],
    ),
    "failing": ("failing_episodes", []),
    "noisy": ("noisy_evaluation", ["--held-out", "6", "--trainer.lr", "3e-5"]),
    "waiting": ("waiting_side", []),
}
"""By sickness of benchmarks/diagnose_recipe.py: the rule that has to come first, and flags of the run."""
READ = (
    "trainer/",
    "held_out/accuracy",
    "held_out/reward",
    "length/",
    "reward/",
    "dropped/",
    "generator/idle_share",
    "data/",
)
"""Beginnings of the names of recorded metrics."""
UNREAD = ("trainer/tokens", "trainer/step_s", "trainer/wait_s", "trainer/optimizer_steps")
HEALTHY: dict[str, tuple[str, int, list[str]]] = {
    "grpo": ("recipes/grpo.py", 20, []),
    "synchronous": ("recipes/grpo.py", 10, ["--buffer.max-policy-lag", "0", "--objective", "gspo"]),
    "own_data": ("recipes/own_data.py", 10, []),
}
"""By name: the recipe, the number of runs, and their flags."""
HELD_BACK = 20
"""Seeds from here on, a quarter more of each kind, were recorded when the thresholds had been chosen."""


@dataclass(frozen=True)
class Settings:
    """Record sick and healthy runs (see the top of this file)."""

    runs: Path | None = None
    """Folder of models and runs; finished runs there are not repeated. None: record none."""
    only: str = ""
    """Names of runs to record, separated by commas; empty: all."""


def commands() -> dict[str, list[str]]:
    """Name and arguments of each run; sick ones first."""
    every = ["--steps", str(STEPS), "--evaluate-every", "20"]
    sick = {
        name: ["benchmarks/diagnose_recipe.py", "--sick", name, *every, *flags] for name, (_, flags) in SICK.items()
    }
    healthy = {}
    for kind, (recipe, count, flags) in HEALTHY.items():
        for seed in [*range(count), *range(HELD_BACK, HELD_BACK + count // 4)]:
            seeds = ["--generator.random-seed", str(1000 * seed)]
            seeds += ["--task.seed", str(seed)] if recipe.endswith("grpo.py") else []
            healthy[f"{kind}-{seed}"] = [recipe, *every, *flags, *seeds]
    return sick | healthy


def model_of(name: str, folder: Path) -> Path:
    """The tiny model of a run, made if it does not exist: one for each seed."""
    seed = int(name.rsplit("-", 1)[1]) if "-" in name else 0
    model = folder / f"model-{seed}"
    if not (model / "config.json").exists():
        run("tools/make_tiny_model.py", "--seed", str(seed), "--task.seed", str(seed), "--output", str(model))
    return model


def run(*command: str) -> None:
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=RUN_DEADLINE_S)


def finished(folder: Path) -> Path | None:
    """The folder of a run that has ended as it should."""
    for state in folder.glob("*/run.json"):
        if json.loads(state.read_text())["state"] == "finished":
            return state.parent
    return None


def record(name: str, arguments: list[str], folder: Path) -> Path:
    """Run the recipe, unless that is done; returns the run's folder."""
    if (done := finished(folder / name)) is not None:
        return done
    shutil.rmtree(folder / name, ignore_errors=True)
    run(*arguments, "--model", str(model_of(name, folder)), "--output", str(folder / name))
    done = finished(folder / name)
    assert done is not None, f"{name} has not finished"
    return done


def reduced(name: str, run: Path) -> dict[str, Any]:
    """The evidence of a run as JSON, without metrics that no rule reads, to four digits."""
    e = evidence_of(read_run(run))
    metrics = {
        metric: [steps.tolist(), [float(f"{value:.4g}") for value in values]]
        for metric, (steps, values) in e.metrics.items()
        if metric.startswith(READ) and metric not in UNREAD
    }
    return {
        "name": name,
        "expected": SICK[name][0] if name in SICK else None,
        "metrics": metrics,
        "settings": {
            flag: value for flag, value in e.settings.items() if not isinstance(value, str) or "/" not in value
        },
        "episodes": [[one.step, float(f"{one.reward:.4g}"), int(one.cut)] for one in e.episodes],
        "failures": e.failures,
        "on_gpu": bool(e.on_gpu),
    }


def recorded(line: str) -> tuple[str, str | None, Evidence]:
    """Name, expected first rule (None: no problem) and evidence of a recorded run."""
    row = json.loads(line)
    metrics = {name: (np.asarray(steps), np.asarray(values)) for name, (steps, values) in row["metrics"].items()}
    episodes = [SampledEpisode(step, reward, bool(cut)) for step, reward, cut in row["episodes"]]
    evidence = Evidence(metrics, row["settings"], episodes, Counter(row["failures"]), row["on_gpu"])
    return row["name"], row["expected"], evidence


def lines() -> list[str]:
    """The recorded runs, a JSON object each."""
    return RESULTS.read_text().splitlines() if RESULTS.exists() else []


def main(s: Settings) -> None:
    chosen = set(filter(None, s.only.split(",")))
    known = {json.loads(line)["name"]: line for line in lines()}
    for name, arguments in commands().items():
        if s.runs is not None and (not chosen or name in chosen):
            s.runs.mkdir(parents=True, exist_ok=True)
            known[name] = json.dumps(reduced(name, record(name, arguments, s.runs.resolve())))
            RESULTS.write_text("".join(f"{line}\n" for line in known.values()))
    wrong = []
    for name, expected, evidence in map(recorded, known.values()):
        found = findings(evidence)
        right = found[0].rule == expected if expected and found else not any(one.level == "problem" for one in found)
        wrong += [] if right and bool(found) >= bool(expected) else [name]
        print(f"{name}: {', '.join(f'{one.rule} ({one.level})' for one in found) or 'nothing'}")
    print(json.dumps({"benchmark": "diagnose", "runs": len(known), "wrong": wrong}))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
