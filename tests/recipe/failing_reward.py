"""A task with a broken reward: it crashes on the first answer, prints much on the second, and always raises."""

from __future__ import annotations

import ctypes

from monarch_rl.tasks.reasoning_gym import Item
from monarch_rl.tasks.task import Outcome, Policy

PRINTED_BYTES = 10**7


def crash(text: str) -> float:
    return float(ctypes.string_at(0)[0])


def print_much(text: str) -> float:
    for _ in range(PRINTED_BYTES // 100):
        print("." * 99)
    return typo(text)


def typo(text: str) -> float:
    return float({"reward": 1.0}["rewrad"])


async def episode(item: Item, policy: Policy) -> Outcome:
    """The first two episodes of a worker are scored by other functions than the rest."""
    items.append(item.index)
    function = {1: crash, 2: print_much}.get(len(items), typo)
    reply = await policy.reply(item.prompt)
    return await policy.in_scorer(function, reply.text)


items: list[int] = []
