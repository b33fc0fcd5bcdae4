"""Playing held-out items by all rollout workers together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.start import SET_UP_DEADLINE_S
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.runtime.deadlines import within

HELD_OUT_ITEM_S = 30.0
"""Seconds that a held-out item may take on average, played beside others."""


async def evaluate(workers: ActorPool, items: int) -> Evaluation:
    """Play the first ``items`` held-out items once each, greedily, shared by all workers.

    If a worker is lost meanwhile, other workers or its replacement play its items.
    """
    left, parts, lost = list(range(items)), list[Evaluation](), dict[int, Any]()
    while left:
        workers.changed.clear()
        players = {index: worker for index, worker in workers.handles.items() if id(worker) not in lost}
        if not players:
            what = "a rollout worker to play the held-out items"
            await within(SET_UP_DEADLINE_S, workers.changed.wait(), what, on="controller")
            continue
        shares = dict(zip(players, (left[rank :: len(players)] for rank in range(len(players))), strict=True))
        deadline = SET_UP_DEADLINE_S + HELD_OUT_ITEM_S * items / len(players)

        def play(index: int, worker: Any, shares: dict[int, list[int]] = shares) -> Any:
            return worker.evaluate.call_one(shares[index])

        played = await workers.ask(deadline, "to play the held-out items", play, players)
        parts += played.values()
        lost |= {id(worker): worker for index, worker in players.items() if index not in played}
        left = sorted(item for index in players.keys() - played.keys() for item in shares[index])
    failed: Counter[str] = Counter()
    for part in parts:
        failed.update(part.failed)
    return Evaluation(np.concatenate([part.rewards for part in parts]), dict(failed))
