"""Playing held-out items by all rollout workers together."""

from __future__ import annotations

from collections.abc import Awaitable

from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.start import SET_UP_DEADLINE_S
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import within
from monarch_rl.tasks.task import Task

HELD_OUT_ITEM_S = 30.0
"""Seconds that a held-out item may take on average, played beside others."""


async def evaluate(workers: ActorPool[RolloutWorker], items: int, held_out: str = "") -> Evaluation:
    """Play the first ``items`` items of a held-out set once each, greedily, shared by all workers.

    ``held_out`` is its name; empty is the first set. If a worker is lost meanwhile, the others play its
    items, or the one that takes its place does.
    """
    unplayed, parts, lost = list(range(items)), list[Evaluation](), dict[int, RolloutWorker]()
    while unplayed:
        workers.changed.clear()
        players = {index: worker for index, worker in workers.handles.items() if id(worker) not in lost}
        if not players:
            what = "a rollout worker to play the held-out items"
            await within(SET_UP_DEADLINE_S, workers.changed.wait(), what, on="controller")
            continue
        shares = dict(zip(players, (unplayed[rank :: len(players)] for rank in range(len(players))), strict=True))
        deadline = SET_UP_DEADLINE_S + HELD_OUT_ITEM_S * items / len(players)

        def play(index: int, worker: RolloutWorker, shares: dict[int, list[int]] = shares) -> Awaitable[Evaluation]:
            return worker.evaluate.call_one(shares[index], held_out)

        played = await workers.ask(deadline, "to play the held-out items", play, players)
        parts += played.values()
        lost |= {id(worker): worker for index, worker in players.items() if index not in played}
        unplayed = sorted(item for index in players.keys() - played.keys() for item in shares[index])
    return Evaluation.joined(parts)


def items_to_play(task: Task | None, held_out: str, most: int) -> int:
    """How many items of a held-out set to play: all of a named one, of the first one (the name is empty) ``most``.

    Raises ValueError if the task has no such set.
    """
    if task is None:
        return most
    size = len(task.held_out_items(held_out))
    return size if held_out else min(most, size)
