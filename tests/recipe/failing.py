"""recipes/grpo.py with the task of ``failing_reward.py``; with HELD_OUT=0 it does not evaluate before it trains."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import tyro

sys.path.append(str(Path(__file__).parents[2] / "recipes"))

import grpo  # noqa: E402
from failing_reward import FailingWorker  # type: ignore[import-not-found]  # noqa: E402

from monarch_rl.pipeline import run, start  # noqa: E402


async def train(begun: Any, settings: grpo.Settings) -> None:
    if os.environ.get("HELD_OUT") == "0":
        begun.evaluate = begun.counts
    await grpo.train(begun, settings)


if __name__ == "__main__":
    start.RolloutWorker = FailingWorker  # type: ignore[misc]
    run.launch(train, tyro.cli(grpo.Settings))
