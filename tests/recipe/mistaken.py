"""recipes/grpo.py, whose loop raises an error in the second step after a resume: ``mistaken.py ARGUMENTS...``"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "recipes"))

import grpo  # noqa: E402

from monarch_rl.pipeline.run import Run, launch  # noqa: E402
from monarch_rl.settings.cli import cli  # noqa: E402


async def train(run: Run, s: grpo.Settings) -> None:
    await run.start(advantage=s.trainer.loss.advantage, objective=s.objective)
    async for step in run.steps(s.steps):
        await run.step()
        if run.resumed is not None and step == run.resumed.version + 2:
            raise ValueError("a mistake")


if __name__ == "__main__":
    launch(train, cli(grpo.Settings), grpo.task)
