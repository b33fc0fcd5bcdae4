"""recipes/grpo.py with batches that are exactly as old as the bound allows: ``algorithms_recipe.py ARGUMENTS...``

For algorithms.py. How far generators run ahead depends on what else a machine does, and with it the lag of what is
trained. Here an update waits until every slot of the buffer holds a complete group. So the batch that updates version v
was drawn by version v - buffer.max-policy-lag, all of it (by version 0, while v is less), on any machine.
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
    """Until as many groups are complete as the buffer has slots: with the lag of a run that is limited by its
    trainer."""
    while (counts := await run.counts()).complete != counts.slots:
        await asyncio.sleep(POLL_S)


async def train(run: Run, s: grpo.Settings) -> None:
    await run.start(grpo.task(s), advantage=s.trainer.loss.advantage, objective=s.objective)
    if run.resumed is None:
        await run.evaluate()
    async for step in run.steps(s.steps):
        filled = within(s.update_limit_s, every_slot_filled(run), "a group in every slot of the buffer", on="buffer")
        await run.publisher.unless_publishing_fails(filled)
        figures = await run.update()
        await run.publish()
        await run.log(figures)
        await run.evaluate_after(step)
    await run.evaluate()


if __name__ == "__main__":
    critic = any(argument.startswith("--trainer.critic.") for argument in sys.argv)  # only recipes/ppo.py has one
    launch(train, cli(ppo.Settings if critic else grpo.Settings, description=__doc__), grpo.task)
