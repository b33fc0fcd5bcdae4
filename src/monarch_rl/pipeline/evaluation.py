"""Playing held-out items by all rollout workers together."""

from __future__ import annotations

from collections.abc import Awaitable

from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.start import SET_UP_DEADLINE_S
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import within

HELD_OUT_ITEM_S = 30.0
"""Seconds that a held-out item may take on average, played beside others."""


async def evaluate(workers: ActorPool[RolloutWorker], items: int) -> Evaluation:
    """Play the first ``items`` held-out items once each, greedily, shared by all workers.

    If a worker is lost meanwhile, the others play its items, or the one that takes its place does.
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
            return worker.evaluate.call_one(shares[index])

        played = await workers.ask(deadline, "to play the held-out items", play, players)
        parts += played.values()
        lost |= {id(worker): worker for index, worker in players.items() if index not in played}
        unplayed = sorted(item for index in players.keys() - played.keys() for item in shares[index])
    return Evaluation.joined(parts)
