"""In which order items are taken, again and again."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence


class ShuffledOrder:
    """Takes each of some places once, then each again in another order, and so on.

    Args:
        places: that are taken.
        name: of the orders: the same name and places give the same ones.
    """

    def __init__(self, places: Sequence[int], name: str) -> None:
        self._places, self._name = places, name
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def place(self, cursor: int) -> int:
        """The place of a cursor, 0, 1, 2, ..."""
        epoch, number = divmod(cursor, len(self._places))
        return self._order(epoch)[number]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(self._places)
        random.Random(f"{self._name}{epoch}").shuffle(order)
        return order


# -- items that are seeds: those that are trained on, and others that are held out ------------------------------------

HELD_OUT = 1 << 30
"""The first held-out seed; training has those below. Environments take seeds of 31 bits."""


class Seeds:
    """Seeds of two sets, which have none in common."""

    def training(self, cursor: int) -> int:
        """The seed of a cursor. After 2^30 of them they come again."""
        return cursor % HELD_OUT

    def held_out(self, count: int) -> Sequence[int]:
        """That many held-out seeds."""
        return range(HELD_OUT, HELD_OUT + count)
