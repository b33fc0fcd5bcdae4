"""recipes/grpo.py with the task of ``failing_reward.py``; with HELD_OUT=0 it does not evaluate before it trains."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "recipes"))

import grpo  # noqa: E402
from failing_reward import episode  # type: ignore[import-not-found]  # noqa: E402

from monarch_rl.pipeline.run import launch  # noqa: E402
from monarch_rl.settings.cli import cli  # noqa: E402
from monarch_rl.tasks.task import Task  # noqa: E402


def failing(settings: grpo.Settings) -> Task:
    return grpo.task(settings).with_episode(episode, success_reward=1.0)


async def train(run: Any, settings: grpo.Settings) -> None:
    if os.environ.get("HELD_OUT") == "0":
        run.evaluate = run.counts
    await grpo.train(run, settings)


if __name__ == "__main__":
    launch(train, cli(grpo.Settings), failing)
