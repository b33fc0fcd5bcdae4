"""The order in which items are used, epoch after epoch."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence


class ShuffledOrder:
    """Visits all places once per epoch, each epoch in a different order.

    Args:
        places: the places to visit.
        name: seeds the orders: the same name and places give the same orders.
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


# -- seeds as items: disjoint sets for training and evaluation --------------------------------------------------------

HELD_OUT = 1 << 30
"""The first held-out seed; training uses the seeds below it. Environments take seeds of 31 bits."""


class Seeds:
    """Disjoint training and held-out seeds."""

    def training(self, cursor: int) -> int:
        """The seed of a cursor; seeds repeat after 2^30."""
        return cursor % HELD_OUT

    def held_out(self, count: int) -> Sequence[int]:
        """The first ``count`` held-out seeds."""
        return range(HELD_OUT, HELD_OUT + count)
