"""Which prefixes the episodes of a group share.

All episodes of a group begin with the same prompt; some also share their first turns, or sampled tokens. A shared token
is computed once in training (``trainer/batch.py``), so packing and the buffer count it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from monarch_rl.episode.episode import Episode


class PrefixTree(NamedTuple):
    """The prefix tree of episodes, stored as an order of its leaves.

    An *input* is a token that the model reads: every token of an episode except its last. Two episodes share their
    first inputs as long as the ids are equal, and, if episodes have expert routes, as long as the routes are equal,
    because a token computed by different experts is a different computation.

    In ``order`` the episodes that share most are neighbours: any two episodes share the minimum of what the neighbours
    between them share.
    """

    order: list[int]
    """Positions of all episodes in the group, in the order of the tree's leaves."""
    shared: list[int]
    """Number of inputs that each episode, in this order, shares with the one before it; 0 for the first."""


def prefix_tree(episodes: Sequence[Episode]) -> PrefixTree:
    """The prefix tree of episodes, of which all or none have expert routes. Equal episodes keep their order."""
    rows = [_input_rows(episode) for episode in episodes]
    # All rows have the same width, so sorting by bytes makes episodes with long common prefixes neighbours.
    keys = [of_episode.tobytes() for of_episode in rows]
    order = sorted(range(len(episodes)), key=keys.__getitem__)
    shared = [_common(rows[left], rows[right]) for left, right in zip(order[:-1], order[1:], strict=True)]
    return PrefixTree(order, [0, *shared] if order else [])


def _input_rows(episode: Episode) -> np.ndarray:
    """What determines the computation of each input, given the inputs before it: the ids, or, with expert routes,
    uint8[inputs, bytes of id and routes]."""
    ids = episode.token_ids[:-1]
    inputs = len(ids)
    if episode.expert_routes is None or not inputs or len(episode.expert_routes) < inputs:
        return ids
    routes = np.ascontiguousarray(episode.expert_routes[:inputs]).reshape(inputs, -1)
    return np.concatenate([of_input.view(np.uint8) for of_input in (ids.reshape(inputs, 1), routes)], axis=1)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Number of leading rows that are equal."""
    inputs = min(len(left), len(right))
    if left.shape[1:] != right.shape[1:]:
        return 0
    differs = left[:inputs] != right[:inputs]
    if differs.ndim > 1:
        differs = differs.any(axis=1)
    differing = np.flatnonzero(differs)
    return int(differing[0]) if len(differing) else inputs
