"""recipes/grpo.py with processes that fail on demand, for chaos.py and soak.py.

    chaos_recipe.py FOLDER STUCK_S ARGUMENTS...

A rollout worker raises once a file such as `FOLDER/exception rollout worker 1` is there, and ends its process once
`FOLDER/os._exit rollout worker 1` is; so do generators, trainer ranks and the buffer (`os._exit buffer`). While
FOLDER/slow exists, updates are delayed, because a fast machine would make many steps until a stopped process is
detected. The loop ends after the step in which FOLDER/end appears. Blocked scoring processes are replaced STUCK_S
seconds after a score's deadline; empty means the project's default.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import grpo  # noqa: E402

from monarch_rl.buffer.actor import Buffer  # noqa: E402
from monarch_rl.episode.episode import (
    Group,  # noqa: E402
    Ticket,  # noqa: E402
)
from monarch_rl.episode.sampling import Completion, Sampling  # noqa: E402
from monarch_rl.episode.serialization import SerializedGroup  # noqa: E402
from monarch_rl.generator.actor import Generator  # noqa: E402
from monarch_rl.generator.parts import OnPart  # noqa: E402
from monarch_rl.pipeline import run, start  # noqa: E402
from monarch_rl.rollout import scoring  # noqa: E402
from monarch_rl.rollout.worker import RolloutWorker  # noqa: E402
from monarch_rl.runtime.process import die_with_parent  # noqa: E402
from monarch_rl.settings.cli import cli  # noqa: E402
from monarch_rl.trainer.actor import Trainer  # noqa: E402

FOLDER, STUCK_S = Path(sys.argv[1]), float(sys.argv[2] or scoring.STUCK_S)
SLOW_S = 4.0
update = run.update


def end_on_demand(name: str) -> None:
    """End this process immediately if its file in FOLDER exists."""
    fault = FOLDER / f"os._exit {name}"
    if fault.exists():
        fault.unlink()
        os._exit(3)


class FailingWorker(RolloutWorker):
    """A rollout worker that can fail when it starts a group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scoring.STUCK_S = STUCK_S

    async def _run_group(self, ticket: Ticket) -> tuple[Any, Group | None]:
        end_on_demand(self._name)
        fault = FOLDER / f"exception {self._name}"
        if fault.exists():
            fault.unlink()
            raise RuntimeError("a user's code may fail")
        return await super()._run_group(ticket)


class FailingTrainer(Trainer):
    """A trainer rank that can fail when it copies its weights."""

    def _copy(self, version: int, index: int, views: list[torch.Tensor]) -> None:
        end_on_demand(f"trainer rank {self.policy.rank}")
        super()._copy(version, index, views)


class FailingGenerator(Generator):
    """A generator that can fail when it gets a request."""

    async def _generate(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        end_on_demand(self._name)
        return await super()._generate(prompt_ids, sampling, on_part)


class FailingBuffer(Buffer):
    """A buffer that can fail when groups are submitted."""

    def _submit(self, groups: list[SerializedGroup]) -> None:
        end_on_demand("buffer")
        super()._submit(groups)


async def slow_update(*arguments: Any) -> Any:
    """Make an update, delayed while FOLDER/slow exists."""
    if (FOLDER / "slow").exists():
        await asyncio.sleep(SLOW_S)
    return await update(*arguments)


async def train(going: run.Run, s: grpo.Settings) -> None:
    """Run the recipe's loop until FOLDER/end exists."""
    await going.start(advantage=s.trainer.loss.advantage, objective=s.objective)
    async for step in going.steps(s.steps):
        await going.step()
        await going.evaluate_after(step)
        if (FOLDER / "end").exists():
            break


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)  # no run outlives the driver
    start.RolloutWorker = FailingWorker  # type: ignore[misc]
    start.Trainer = FailingTrainer  # type: ignore[misc]
    start.Generator = FailingGenerator  # type: ignore[misc]
    start.Buffer = FailingBuffer  # type: ignore[misc]
    run.update = slow_update  # type: ignore[assignment]
    run.launch(train, cli(grpo.Settings, args=sys.argv[3:]), grpo.task)
