"""Predict step time, idle shares and policy lag of a run, and recommend a lag bound and a split of the devices.

    python tools/simulate.py --devices 16 --costs.length.mean 2000 --costs.length.sigma 1
    python tools/simulate.py --from-run runs/grpo-...            # with the costs of a real run, which flags override

The real buffer, publisher and workers run in virtual time; engines, trainer and scores are latency models
(docs/sizing.md). Prints one line per simulated run, writes a plot, and prints the metrics as a last line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from monarch_rl.simulate.costs import Costs
from monarch_rl.simulate.fit import Made, read_run
from monarch_rl.simulate.run import Plan, RunMetrics, predict
from monarch_rl.simulate.search import Case, gain, recommend, search


@dataclass(frozen=True)
class Settings:
    """Predict a run in virtual time (see the top of this file)."""

    devices: int = 0
    """Devices to split between trainer and generators; 0 keeps the plan's split."""
    max_lag: int = 4
    """Largest lag bound to try, from 0."""
    steps: int = 40
    """Optimizer steps per simulated run."""
    warm_up: int = 10
    """First steps that do not count."""
    grain: int = 0
    """Real tokens per simulated token; 0 chooses it by the mean length, 1 is exact and slow."""
    output: Path = Path("sizing.png")
    """PNG file to write."""
    from_run: Path | None = None
    """Run folder whose settings and measured costs are the defaults."""
    plan: Plan = field(default_factory=Plan)
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        if self.devices < 0 or self.max_lag < 0 or self.grain < 0:
            raise ValueError("devices, max-lag and grain must not be negative")
        if not 0 <= self.warm_up < self.steps:
            raise ValueError(f"warm-up must be at least 0 and less than steps ({self.steps}), got {self.warm_up}")


def line(plan: Plan, found: RunMetrics) -> str:
    return (
        f"lag <= {plan.buffer.max_policy_lag}, {plan.trainer_devices} trainer devices + {plan.replicas} replicas: "
        f"step {found.step_s:.3g} s, idle: trainer {found.trainer_idle_share:.0%}, generators "
        f"{found.generator_idle_share:.0%} ({found.running:.1f} running while busy), "
        f"{found.tokens_per_s:,.0f} tokens/s, mean lag {found.lag_mean:.2f}"
    )


def as_json(found: RunMetrics) -> dict[str, Any]:
    return {
        "step_s": found.step_s,
        "trainer_idle_share": found.trainer_idle_share,
        "generator_idle_share": found.generator_idle_share,
        "running": found.running,
        "tokens_per_s": found.tokens_per_s,
        "lag_share": list(found.lag),
        "lag_mean": found.lag_mean,
        "order_wait_share": found.order_wait_share,
        "wasted_share": found.wasted_share,
    }


def draw(cases: list[Case], best: Case, path: Path) -> None:
    """Plot step time by split and lag, idle shares by split, the lag of trained tokens, and the speed-up by lag."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lags = sorted({case.max_policy_lag for case in cases})
    counts = sorted({case.plan.trainer_devices for case in cases})
    figure, ((steps, idle), (shares, gains)) = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for lag in lags:
        row = sorted((c for c in cases if c.max_policy_lag == lag), key=lambda c: c.plan.trainer_devices)
        x = [c.plan.trainer_devices for c in row]
        steps.plot(x, [c.found.step_s for c in row], marker="o", label=f"lag <= {lag}")
        if lag == best.max_policy_lag:
            idle.plot(x, [c.found.trainer_idle_share for c in row], marker="o", label="trainer")
            idle.plot(x, [c.found.generator_idle_share for c in row], marker="o", label="generators")
    steps.plot(best.plan.trainer_devices, best.found.step_s, "k*", markersize=14, label="recommended")
    steps.set(ylabel="seconds per step", ylim=(0, 1.3 * max(case.found.step_s for case in cases)))
    idle.set(ylabel=f"idle share at lag <= {best.max_policy_lag}", ylim=(0, 1))
    for axis in (steps, idle):
        axis.set(xlabel="trainer devices", xticks=counts)
    shares.bar(range(len(best.found.lag)), best.found.lag)
    shares.set(xlabel="lag of trained tokens, as recommended", ylabel="share", xticks=range(len(best.found.lag)))
    gains.bar(lags, [max(gain(cases, c) for c in cases if c.max_policy_lag == lag) for lag in lags])
    gains.set(xlabel="max-policy-lag, at its best split", ylabel="speed relative to lag 0", xticks=lags)
    for axis in (steps, idle):
        axis.legend(loc="upper center", ncols=3, fontsize="small")
    for axis in (steps, idle, shares, gains):
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main(settings: Settings, measured: Made | None) -> None:
    gc.freeze()  # exempts the many objects of libraries from garbage collection
    started, simulated = time.perf_counter(), 0

    def predicted(plan: Plan, costs: Costs = settings.costs) -> RunMetrics:
        nonlocal simulated
        found = predict(plan, costs, settings.steps, settings.warm_up, settings.grain)
        simulated += found.steps
        print(line(plan, found), flush=True)
        return found

    summary: dict[str, Any] = {}
    if measured is not None:
        found = predicted(measured.plan, measured.costs)
        print(
            f"That run took {measured.step_s:.3g} s per step; predicted: {found.step_s / measured.step_s:.0%} of that."
        )
        summary["run"] = {"step_s": measured.step_s, "predicted_over_observed": found.step_s / measured.step_s}
    cases = search(settings.plan, settings.devices, settings.max_lag, predicted)
    best = recommend(cases)
    draw(cases, best, settings.output)
    seconds = time.perf_counter() - started
    print(f"Recommended: {line(best.plan, best.found)}; {gain(cases, best):.2f} x lag 0. Plot: {settings.output}.")
    summary |= {
        "max_policy_lag": best.max_policy_lag,
        "trainer_devices": best.plan.trainer_devices,
        "replicas": best.plan.replicas,
        **as_json(best.found),
        "gain_over_depth_0": gain(cases, best),
        "simulated_runs": len(cases) + (measured is not None),
        "virtual_steps_per_s": simulated / seconds,
        "cases": [
            {"max_policy_lag": c.max_policy_lag, "trainer_devices": c.plan.trainer_devices, "replicas": c.plan.replicas}
            | {"step_s": c.found.step_s}
            for c in cases
        ],
    }
    print(json.dumps({name: rounded(value) for name, value in summary.items()}))


def rounded(value: Any) -> Any:
    """Round floats to 4 significant digits, including those in lists and dictionaries; None if not finite."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return {name: rounded(one) for name, one in value.items()} if isinstance(value, dict) else value


def parse() -> tuple[Settings, Made | None]:
    """Parse the command line, with the settings of ``--from-run`` as defaults, so that flags override them."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--from-run", type=Path)
    folder = first.parse_known_args()[0].from_run
    measured = read_run(folder) if folder is not None else None
    default = Settings(plan=measured.plan, costs=measured.costs) if measured is not None else Settings()
    return tyro.cli(Settings, default=default, description=__doc__), measured


if __name__ == "__main__":
    try:
        main(*parse())
    except ValueError as error:
        sys.exit(f"error: {error}")
