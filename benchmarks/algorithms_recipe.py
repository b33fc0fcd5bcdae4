"""recipes/grpo.py with batches that are exactly as old as the bound allows: ``algorithms_recipe.py ARGUMENTS...``

For algorithms.py. How far generators run ahead, and so the lag of trained tokens, usually depends on the load of the
machine. Here an update waits until every slot of the buffer holds a complete group. So all tokens of the batch that
updates version v were sampled by version v - buffer.max-policy-lag (or version 0 if that is negative), on any machine.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from monarch_rl import Run, cli, launch
from monarch_rl.runtime.deadlines import within

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import grpo  # noqa: E402
import ppo  # noqa: E402

POLL_S = 0.1


async def every_slot_filled(run: Run) -> None:
    """Wait until as many groups are complete as the buffer has slots, as in a run that is limited by its trainer."""
    while (counts := await run.counts()).complete != counts.slots:
        await asyncio.sleep(POLL_S)


async def train(run: Run, s: grpo.Settings) -> None:
    await run.start(advantage=s.trainer.loss.advantage, objective=s.objective)
    if run.resumed is None:
        await run.evaluate()
    async for step in run.steps(s.steps):
        filled = within(s.update_limit_s, every_slot_filled(run), "a group in every slot of the buffer", on="buffer")
        await run.publisher.unless_publishing_fails(filled)
        metrics = await run.update()
        await run.publish()
        await run.log(metrics)
        await run.evaluate_after(step)
    await run.evaluate()


if __name__ == "__main__":
    critic = any(argument.startswith("--trainer.critic.") for argument in sys.argv)  # only recipes/ppo.py has one
    launch(train, cli(ppo.Settings if critic else grpo.Settings, description=__doc__), grpo.task)
