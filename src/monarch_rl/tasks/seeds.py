"""Items that are seeds: those that are trained on, and others that are held out."""

from __future__ import annotations

from collections.abc import Sequence

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
