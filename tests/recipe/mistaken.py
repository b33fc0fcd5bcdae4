"""recipes/grpo.py, whose loop makes a mistake in the second step after a resume: ``mistaken.py ARGUMENTS...``"""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).parents[2] / "recipes"))

import grpo  # noqa: E402

from monarch_rl.pipeline.run import Run, launch  # noqa: E402
from monarch_rl.trainer.objective import reinforcement  # noqa: E402


async def train(run: Run, s: grpo.Settings) -> None:
    loss = s.trainer.loss
    await run.start(grpo.task(s), advantage=loss.advantage, objective=reinforcement(loss))
    async for step in run.steps(s.steps):
        await run.step()
        if run.resumed is not None and step == run.resumed.version + 2:
            raise ValueError("a mistake")


if __name__ == "__main__":
    launch(train, tyro.cli(grpo.Settings), grpo.task)
