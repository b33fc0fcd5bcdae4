"""The CPU time of recording rollouts and their tokens, as a share of the steps of the main job (goal: at most 1 %).

    python benchmarks/recorder.py
    python benchmarks/recorder.py --steps 100 --rollout.logged-groups 8

By thread clocks, `record/cpu_s` and `trainer/record_cpu_s`, against the CPU time of all processes of the run in the
same steps. It includes the timeline, but no event's own microsecond in the process that records it, and no requests for
rows and spans; and no evaluations, whose episodes are all recorded. CPU time needs no quiet machine.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from processes import ProcessTree

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import grpo  # noqa: E402
from cpu_by_process import cpu_seconds  # noqa: E402

from monarch_rl.pipeline.run import Run, launch  # noqa: E402
from monarch_rl.settings.cli import cli  # noqa: E402


@dataclass(frozen=True)
class Settings(grpo.Settings):
    """CPU time of the recorder (see the top of this file)."""

    steps: int = 60
    """Measured steps."""
    warm_up: int = 10
    """Steps before them, which are not measured."""


async def train(run: Run, s: Settings) -> None:
    """Run the recipe's loop, and add up what the recorder and all processes use in the measured steps."""
    await run.start(advantage=s.trainer.loss.advantage, objective=s.objective)
    tree, recorder, before = ProcessTree(os.getpid()), 0.0, 0.0
    async for step in run.steps(s.warm_up + s.steps):
        metrics = await run.step()
        if step == s.warm_up:
            before = sum(cpu_seconds(tree).values())
        elif step > s.warm_up:
            recorder += metrics["record/cpu_s"] + int(s.trainer.ranks) * metrics["trainer/record_cpu_s"]
    whole = sum(cpu_seconds(tree).values()) - before
    print(f"{1e3 * recorder / s.steps:.3g} of {1e3 * whole / s.steps:.3g} CPU-ms per step: {recorder / whole:.2%}")
    values = {"recorder_s": recorder, "all_s": whole, "share": recorder / whole}
    print(json.dumps({"benchmark": "recorder", "steps": s.steps, "logged_groups": s.rollout.logged_groups, **values}))


if __name__ == "__main__":
    launch(train, cli(Settings, description=__doc__), grpo.task)
