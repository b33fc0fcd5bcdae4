"""A task whose reward has mistakes: the first answer crashes it, the second one prints much, and all raise."""

from __future__ import annotations

import ctypes

from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.tasks.task import Environment, Item, SingleTurn

PRINTED_BYTES = 10**7


def crash(text: str) -> float:
    return float(ctypes.string_at(0)[0])


def print_much(text: str) -> float:
    for _ in range(PRINTED_BYTES // 100):
        print("." * 99)
    return typo(text)


def typo(text: str) -> float:
    return float({"reward": 1.0}["rewrad"])


class FailingWorker(RolloutWorker):
    """Its first environments are scored by these functions."""

    def make_environment(self, item: Item, scorer: Scorer) -> Environment:
        self._made = getattr(self, "_made", 0) + 1
        function = {1: crash, 2: print_much}.get(self._made, typo)
        return SingleTurn(item.prompt, lambda text: scorer.score(function, text))
