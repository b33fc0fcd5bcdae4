"""Rows of prompt and answer on their way to the trainer ranks, and the updates of them alone."""

from __future__ import annotations

from collections.abc import Sequence

from monarch_rl.buffer.actor import Buffer
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.pipeline.start import SET_UP_DEADLINE_S
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.tasks.rows import Row
from monarch_rl.trainer.actor import Trainer
from monarch_rl.trainer.supervised import SupervisedPlan, check_rows


def plan_rows(
    rows: Sequence[Row], s: RunSettings, rows_per_step: int, share: float = 1.0, lr_factor: float = 1.0
) -> SupervisedPlan:
    """What trainer ranks train on. Raises ValueError for rows and numbers that cannot be."""
    check_rows(rows)
    if rows_per_step < 1 or not 0 < lr_factor < float("inf"):
        raise ValueError(f"rows_per_step {rows_per_step} and lr_factor {lr_factor:g} must be positive")
    by_value = ByValue(rows, "supervised rows")
    return SupervisedPlan(by_value, rows_per_step, share, lr_factor, s.rollout.template_options)


def plan_mixed_rows(rows: Sequence[Row], s: RunSettings, share: float) -> SupervisedPlan:
    """The same for rows that are ``share`` of the sequences, and of the loss, of each batch. Raises ValueError."""
    if not 0 < share < 1:
        raise ValueError(f"share {share:g} of supervised rows must be above 0 and below 1: leave run.mix out for 0")
    rows_per_step = max(1, round(share / (1 - share) * s.groups_per_step * s.rollout.group_size))
    if rows_per_step < s.trainer.minibatches:
        raise ValueError(
            f"share {share:g} of supervised rows makes {rows_per_step} rows a batch, fewer than trainer.minibatches "
            f"{s.trainer.minibatches}: give a larger share, or fewer mini-batches"
        )
    return plan_rows(rows, s, rows_per_step, share)


async def use_rows(trainer: Trainer, plan: SupervisedPlan) -> None:
    """Have all trainer ranks read the rows. Raises ValueError if they do not find the same ones."""
    call = trainer.use_rows.call(plan)
    answers = await within(SET_UP_DEADLINE_S, call, "trainer ranks to read the supervised rows", on="trainer ranks")
    found = sorted(set(answers.values()))
    if len(found) > 1:
        raise ValueError(f"trainer ranks find {found[0]} and {found[-1]} supervised rows: each machine needs the same")


async def supervised_update(trainer: Trainer, buffer: Buffer, version: int, limit_s: float) -> list[dict[str, float]]:
    """Make one optimiser step on rows alone on every trainer rank; metrics by rank."""
    call, what = trainer.supervised.call(version), f"trainer ranks to make supervised step {version + 1}"
    answers = await within(limit_s, call, what, on="trainer ranks", flag="update-deadline-s")
    await within(CALL_DEADLINE_S, buffer.begin_at.call_one(version + 1), "the buffer to note the step", on="buffer")
    wait_registry.progress("step trained")
    return list(answers.values())
