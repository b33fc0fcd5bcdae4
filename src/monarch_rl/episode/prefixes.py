"""Which of their first tokens the episodes of a group share.

The episodes of a group begin with one prompt; some share their first turns, or what the policy drew, too. A shared
token is computed once in training (``trainer/batch.py``), so packing and the buffer count it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from monarch_rl.episode.episode import Episode


class PrefixTree(NamedTuple):
    """What episodes share, as a tree written down in one order of its leaves.

    An *input* is a token that is given to the model: all tokens of an episode but its last. Two episodes share their
    first inputs as far as the ids are equal, and the expert routes where episodes have them, because a token that other
    experts compute is another computation.

    In ``order`` the episodes that share most are neighbours: any two of them share the least that neighbours between
    them share.
    """

    order: list[int]
    """All episodes, by their places in the group."""
    shared: list[int]
    """Inputs that each episode, in this order, shares with the one before it; 0 for the first."""


def prefix_tree(episodes: Sequence[Episode]) -> PrefixTree:
    """The tree of episodes of which all or none have expert routes; equal ones stay in their order."""
    rows = [_input_rows(episode) for episode in episodes]
    # Bytes of rows of one width: in their order, those with long common beginnings are neighbours.
    keys = [of_episode.tobytes() for of_episode in rows]
    order = sorted(range(len(episodes)), key=keys.__getitem__)
    shared = [_common(rows[left], rows[right]) for left, right in zip(order[:-1], order[1:], strict=True)]
    return PrefixTree(order, [0, *shared] if order else [])


def _input_rows(episode: Episode) -> np.ndarray:
    """What decides how an input is computed, behind the same inputs before it: the ids, or with expert routes
    uint8[inputs, bytes]."""
    ids = episode.token_ids[:-1]
    inputs = len(ids)
    if episode.expert_routes is None or not inputs or len(episode.expert_routes) < inputs:
        return ids
    routes = np.ascontiguousarray(episode.expert_routes[:inputs]).reshape(inputs, -1)
    return np.concatenate([of_input.view(np.uint8) for of_input in (ids.reshape(inputs, 1), routes)], axis=1)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """How many of their first rows are equal."""
    inputs = min(len(left), len(right))
    if left.shape[1:] != right.shape[1:]:
        return 0
    differs = left[:inputs] != right[:inputs]
    if differs.ndim > 1:
        differs = differs.any(axis=1)
    differing = np.flatnonzero(differs)
    return int(differing[0]) if len(differing) else inputs
