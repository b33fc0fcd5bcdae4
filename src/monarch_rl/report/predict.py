"""Predicts how fast a run would be at other splits of the devices and other lag bounds, for its page.

Imports the simulator, and so PyTorch and Monarch, which takes seconds: no other module of the room imports this one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from monarch_rl.checkpoint.folders import write_whole
from monarch_rl.errors import SettingsError
from monarch_rl.report.page import PREDICTION
from monarch_rl.report.read import is_run
from monarch_rl.simulate.fit import read_run
from monarch_rl.simulate.run import Plan, predict
from monarch_rl.simulate.search import with_lag

STEPS = 24
"""Steps of each simulated run."""
WARM_UP = 8
"""First steps of these that do not count."""


def write_prediction(folder: Path) -> None:
    """Simulate a run as it is and with one change at a time, and write ``prediction.json`` into its folder
    (docs/run_folder.md). Takes seconds of CPU time for each change, in proportion to the episodes of a step; how long
    the run was matters little.

    Raises:
        SettingsError: the folder holds no run, or the file cannot be written.
    """
    if not is_run(folder):
        raise SettingsError(f"{folder} holds no run: give a run's folder")
    found: dict[str, Any] = {"format": 1, "made": time.time()}
    try:
        measured = read_run(folder)
    except SettingsError as error:
        found["problem"] = str(error)
    else:
        found["step_s"] = measured.step_s
        found["cases"] = []
        for change, plan in changes(measured.plan):
            run = predict(plan, measured.costs, STEPS, WARM_UP)
            found["cases"].append(
                {
                    "change": change,
                    "trainer_ranks": plan.trainer_devices,
                    "replicas": plan.replicas,
                    "max_policy_lag": plan.buffer.max_policy_lag,
                    "step_s": run.step_s,
                    "trainer_idle_share": run.trainer_idle_share,
                    "generator_idle_share": run.generator_idle_share,
                    "lag_mean": run.lag_mean,
                }
            )
    path = folder / PREDICTION
    try:
        write_whole(path, json.dumps(found, indent=1))
    except OSError as error:
        raise SettingsError(f"{path} cannot be written ({error.strerror or error})") from error


def changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan as it is, and with one change at a time, which is named."""
    trainer, replicas, lag = plan.trainer_devices, plan.replicas, plan.buffer.max_policy_lag
    yield "none", plan
    yield "one replica more", replace(plan, replicas=replicas + 1)
    yield "one trainer rank more", replace(plan, trainer_devices=trainer + 1)
    if trainer > plan.tp:
        fewer = trainer - plan.tp
        yield "a replica in place of trainer ranks", replace(plan, replicas=replicas + 1, trainer_devices=fewer)
    if replicas > 1:
        more = trainer + plan.tp
        yield "trainer ranks in place of a replica", replace(plan, replicas=replicas - 1, trainer_devices=more)
    for other in () if lag is None else sorted({0, max(0, lag - 1), lag + 1, 2 * lag} - {lag}):
        try:
            changed = with_lag(plan, other)
        except SettingsError:
            continue  # a run refuses it, too: other settings of the buffer need a higher bound
        yield f"max-policy-lag {other}", changed
