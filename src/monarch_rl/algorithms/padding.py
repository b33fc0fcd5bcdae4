"""Which sequences are padded to each other, so that one call attends to them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Padding(NamedTuple):
    """How much of a call may be computed in vain."""

    waste: float
    """Padded pairs of query and key for each real one."""
    free_pairs: int
    """Further pairs, which cost about as much as a call of its own."""

    def allows(self, padded: int, real: int) -> bool:
        """Whether a call may compute ``padded`` pairs, of which ``real`` count."""
        return padded <= (1 + self.waste) * real + self.free_pairs


def runs_of_similar_size(sizes: Sequence[tuple[int, int]], padding: Padding) -> list[range]:
    """Divide sequences among few calls in which little is padding.

    Args:
        sizes: ``(queries, keys)`` of each sequence, by falling keys.
        padding: what a call may compute in vain when all of its sequences have the most queries and keys among them.

    Returns:
        The calls: places in ``sizes`` that follow each other.
    """
    runs: list[range] = []
    most_queries = most_keys = real = 0
    for place, (queries, keys) in enumerate(sizes):
        pairs = queries * keys
        if runs and padding.allows((len(runs[-1]) + 1) * max(most_queries, queries) * most_keys, real + pairs):
            runs[-1] = range(runs[-1].start, place + 1)
            most_queries, real = max(most_queries, queries), real + pairs
        else:
            runs.append(range(place, place + 1))
            most_queries, most_keys, real = queries, keys, pairs
    return runs
