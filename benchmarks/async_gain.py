"""Gain by asynchrony if generation and training have separate devices: steps at lag 0, 1, 2 and 4.

    python benchmarks/async_gain.py

Runs recipes/grpo.py on the tiny model with injected latencies (async_gain_recipe.py): answers take as long as on
generators that need `token_s` seconds per token, with lengths from a lognormal distribution, and updates take
`update_s` seconds. So both sides seem to have separate devices, although they share the cores of this machine. Prompts,
seeds and lengths are the same at every lag.

The bound: in every step the trainer makes an update, and the generators need `tokens x token_s / places` seconds to
sample with all places in use. However the two overlap, a step cannot take less than the longer of these demands (the
utilisation law: throughput <= 1 / largest demand; Denning and Buzen, ACM Computing Surveys 10(3), 1978). At lag 0 a
step takes longer, and the rest is idle time of the busier side: its idle share. So no gain over lag 0 exceeds
1 / (1 - idle share).

Each lag's step time is printed with the bound and with the prediction of the simulator (docs/sizing.md), which gets the
latencies, and the measured cost of publishing and calls. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from async_gain_recipe import Latencies, tokens_of
from reporting import run_benchmark, short
from trl_processes import measure

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.rollout.policy import episode_seed
from monarch_rl.simulate.costs import Costs, DecodeCosts, Distribution, TrainerCosts
from monarch_rl.simulate.fit import CALLS
from monarch_rl.simulate.run import Plan, predict

ROOT = Path(__file__).resolve().parents[1]
GROUP_SIZE = 8
SEED = 7
PLACES_OF_WORKER = 64
"""Concurrent groups of the worker: more than the buffer has slots at any of the lags."""


@dataclass(frozen=True)
class Settings:
    """Gain by asynchrony (see the top of this file)."""

    lags: tuple[int, ...] = (0, 1, 2, 4)
    """Values of buffer.max-policy-lag; the others are compared with the first one."""
    steps: int = 14
    """Optimiser steps of each run."""
    warm_up: int = 4
    """Steps at the beginning that do not count, because the buffer fills."""
    groups_per_step: int = 8
    """Prompts per step, with 8 episodes each."""
    replicas: int = 2
    """Generator replicas."""
    length: Distribution = field(default_factory=lambda: Distribution(36, 1.0, 120))
    """Tokens of an answer; at 0.05 s per token 1.8 s on average, before truncation at 6 s."""
    token_s: float = 0.05
    """Seconds per token, however many sequences are generated."""
    places: int = 32
    """Concurrent sequences of a replica."""
    update_s: float = 2.5
    """Seconds of an update."""
    deadline_s: float = 900.0
    """Deadline of a run in seconds."""
    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder of the model."""
    save: str = ""
    """Also write table, JSON and a picture to benchmarks/results/ under this name, such as async_gain_cpu."""

    @property
    def latencies(self) -> Latencies:
        return Latencies(self.length, self.token_s, self.places, self.update_s)

    @property
    def plan(self) -> Plan:
        """The plan of the run, for the simulator."""
        return Plan(self.groups_per_step, GROUP_SIZE, 1, self.replicas, concurrent_groups=PLACES_OF_WORKER, seed=SEED)


@dataclass(frozen=True)
class Steps:
    """Means over the counted steps of a run."""

    step_s: float
    trainer_s: float
    """Seconds of a step in which the trainer computes or copies a snapshot."""
    generator_s: float
    """Seconds per step in which the generators would sample its tokens with all places always in use."""
    lag_mean: float
    lag_max: float

    @property
    def demand_s(self) -> float:
        """Demand of the busier side, below which no step can be."""
        return max(self.trainer_s, self.generator_s)

    @property
    def idle_share(self) -> float:
        """Idle share of the busier side."""
        return 1.0 - self.demand_s / self.step_s

    @property
    def bound(self) -> float:
        """The largest gain over these steps that any schedule can have."""
        return 1.0 / (1.0 - self.idle_share)


def generator_demand(s: Settings) -> float:
    """Return the mean seconds per step in which the generators sample; batches are formed in order."""
    groups = range(s.warm_up * s.groups_per_step, s.steps * s.groups_per_step)
    seeds = (episode_seed(SEED, group, episode) for group in groups for episode in range(GROUP_SIZE))
    tokens = sum(tokens_of(s.length, seed) for seed in seeds if seed is not None)
    return tokens * s.token_s / (s.places * s.replicas) / (s.steps - s.warm_up)


def summed(rows: list[dict[str, Any]], s: Settings) -> Steps:
    """Return the means over the counted rows of ``metrics.jsonl``."""

    def mean(name: str) -> float:
        return float(np.mean([row.get(name) or 0.0 for row in rows]))

    trainer_s = mean("trainer/step_s") + mean("weights/snapshot_ms") / 1e3
    lag_max = max(row["lag/max"] for row in rows)
    return Steps(mean("time/step_s"), trainer_s, generator_demand(s), mean("lag/mean"), lag_max)


def measured_costs(rows: list[dict[str, Any]], s: Settings) -> Costs:
    """Return the injected latencies, with the cost of publishing and calls in the run."""

    def median(name: str) -> float:
        return float(np.median([row[name] for row in rows if row.get(name) is not None]))

    snapshot_s = median("weights/snapshot_ms") / 1e3
    between = [row["time/step_s"] - row["trainer/wait_s"] - row["trainer/step_s"] for row in rows]
    return Costs(
        s.length,
        prompt_tokens=1,
        decode=DecodeCosts(s.token_s, 0.0, max_running=s.places),
        trainer=TrainerCosts(s.update_s, 0.0),
        snapshot_s=snapshot_s,
        transfer_s=median("weights/transfer_ms") / 1e3,
        commit_s=median("weights/swap_ms") / 1e3,
        call_s=max(0.0, float(np.mean(between)) - snapshot_s) / CALLS,
    )


def observe(s: Settings, lag: int, scratch: Path) -> list[dict[str, Any]]:
    """Run the recipe at a lag; returns the counted rows of its ``metrics.jsonl``."""
    folder = scratch / f"lag{lag}"
    folder.mkdir()
    latencies = folder / "latencies.json"
    latencies.write_text(json.dumps(asdict(s.latencies)))
    command = [sys.executable, str(ROOT / "benchmarks" / "async_gain_recipe.py"), str(latencies)]
    command += ["--model", s.model, "--steps", str(s.steps), "--groups-per-step", str(s.groups_per_step)]
    command += ["--held-out", "1", "--output", str(folder), "--trainer.ranks", "1"]
    command += ["--generator.replicas", str(s.replicas), "--buffer.max-policy-lag", str(lag)]
    command += ["--rollout.group-size", str(GROUP_SIZE), "--rollout.concurrent-groups", str(PLACES_OF_WORKER)]
    command += ["--rollout.seed", str(SEED)]
    variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return measure(command, variables, folder, "controller", [s.steps], s.deadline_s).steps[s.warm_up :]


def compare(s: Settings, lag: int, rows: list[dict[str, Any]], first: Steps | None) -> tuple[Steps, dict[str, Any]]:
    """Compare a run at one lag with the bound and the prediction."""
    steps = summed(rows, s)
    first = first or steps
    plan = replace(s.plan, buffer=BufferSettings(lag))
    foretold = predict(plan, measured_costs(rows, s), s.steps, s.warm_up, grain=1)
    gain = first.step_s / steps.step_s
    row = {
        "max_policy_lag": lag,
        "step_s": steps.step_s,
        "trainer_idle_share": 1.0 - steps.trainer_s / steps.step_s,
        "generator_idle_share": 1.0 - steps.generator_s / steps.step_s,
        "gain": gain,
        "bound": first.bound,
        "share_of_bound": gain / first.bound,
        "predicted_step_s": foretold.step_s,
        "predicted_over_observed": foretold.step_s / steps.step_s,
        "lag_mean": steps.lag_mean,
        "lag_max": steps.lag_max,
    }
    return steps, row


COLUMNS = {
    "max_policy_lag": "lag <=",
    "step_s": "seconds a step",
    "trainer_idle_share": "trainer idle",
    "generator_idle_share": "places idle",
    "gain": "gain",
    "bound": "bound",
    "share_of_bound": "share of bound",
    "predicted_step_s": "predicted step",
    "predicted_over_observed": "predicted / observed",
    "lag_mean": "mean lag",
    "lag_max": "largest lag",
}


def table(rows: list[dict[str, Any]]) -> str:
    cells = [[f"{short(float(row[name])):g}" for name in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [[*COLUMNS.values()], ["---"] * len(COLUMNS), *cells])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot seconds per step by lag, observed and predicted, and the bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lags = [str(row["max_policy_lag"]) for row in rows]
    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axis.bar(lags, [row["step_s"] for row in rows], color="tab:blue", alpha=0.7, label="observed")
    axis.plot(lags, [row["predicted_step_s"] for row in rows], "ko", label="simulated")
    axis.axhline(rows[0]["step_s"] / rows[0]["bound"], color="tab:red", label="bound: the busier side's work")
    axis.set(xlabel="max-policy-lag", ylabel="seconds a step")
    axis.legend()
    figure.savefig(path, dpi=90)


def main(s: Settings) -> None:
    if not 0 < s.warm_up < s.steps:
        raise ValueError(f"warm-up {s.warm_up} must be above 0 and below steps, {s.steps}")
    first: Steps | None = None
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for lag in s.lags:
            steps, row = compare(s, lag, observe(s, lag, Path(scratch)), first)
            first = first or steps
            results.append(row)
            print(f"lag <= {lag}: {short(row)}", flush=True)
    summary = {"benchmark": "async_gain", "cores": os.cpu_count(), "settings": asdict(s), "lags": results}
    shown = f"{table(results)}\n{json.dumps(short(summary))}"
    print(shown)
    if s.save:
        command = " ".join(["python", "benchmarks/async_gain.py", *sys.argv[1:]])
        path = ROOT / "benchmarks" / "results" / f"{s.save}.txt"
        path.write_text(f"# {command}\n# {os.cpu_count()} cores\n{shown}\n")
        draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
