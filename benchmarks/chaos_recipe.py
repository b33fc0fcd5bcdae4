"""recipes/grpo.py with rollout workers that fail on demand, for chaos.py: ``chaos_recipe.py FOLDER ARGUMENTS...``

Worker 1 raises once FOLDER/exception-1 is there, and ends its process once FOLDER/os._exit-1 is. While FOLDER/slow is
there, updates are delayed, so that the steps of a run outlast its faults on a slow machine, too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import grpo  # noqa: E402

from monarch_rl.episode.ticket import Ticket  # noqa: E402
from monarch_rl.pipeline import run, start  # noqa: E402
from monarch_rl.rollout.worker import RolloutWorker  # noqa: E402
from monarch_rl.runtime.lifetime import die_with_parent  # noqa: E402

FOLDER = Path(sys.argv[1])
SLOW_S = 4.0
update = run.update


class FailingWorker(RolloutWorker):
    """Fails when it begins a group."""

    async def _play_group(self, ticket: Ticket) -> None:
        index = self._name.split()[-1]
        for fault in FOLDER.glob(f"*-{index}"):
            fault.unlink()
            if fault.name.startswith("os._exit"):
                os._exit(3)
            raise RuntimeError("what a user has written may fail")
        await super()._play_group(ticket)


async def slow_update(*arguments: Any) -> Any:
    """An update, delayed while FOLDER/slow is there."""
    if (FOLDER / "slow").exists():
        await asyncio.sleep(SLOW_S)
    return await update(*arguments)


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)  # however the driver ends, no run stays behind
    start.RolloutWorker = FailingWorker  # type: ignore[misc]
    run.update = slow_update  # type: ignore[assignment]
    run.launch(grpo.train, tyro.cli(grpo.Settings, args=sys.argv[2:]))
