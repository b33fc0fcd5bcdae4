"""Where the inputs of episodes lie in the row of a micro-batch, in which what they share lies once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.prefixes import prefix_tree
from monarch_rl.trainer.attention_layout import Segment


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The places of E episodes in a row."""

    order: list[int]
    """The episodes in the order in which each adds to the row what no one before it has."""
    shared: list[int]
    """For each episode, how many of its first inputs lie in the row before its own."""
    paths: list[np.ndarray]
    """For each episode, int64[inputs]: the place in the row of each of its inputs."""
    width: int
    """Inputs of the row."""

    def own_inputs(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of at least one value for each input of each episode, those of the row, in its order."""
        return [values[e][self.shared[e] : len(self.paths[e])] for e in self.order]

    def segments(self) -> list[Segment]:
        """What each episode adds to the row; nothing if all of it was there before."""
        found = []
        for episode in self.order:
            path, shared = self.paths[episode], self.shared[episode]
            if len(path) > shared:
                found.append(Segment(int(path[shared]), path, len(path) - shared))
        return found


def lay_out(episodes: Sequence[Episode], groups: Sequence[int]) -> RowLayout:
    """Lay out episodes group by group; what those of one group share (:func:`prefix_tree`) lies in the row once.

    Args:
        groups: the number of each episode's group.
    """
    members: dict[int, list[int]] = {}
    for episode, group in enumerate(groups):
        members.setdefault(group, []).append(episode)
    order: list[int] = []
    shared, paths, width = [0] * len(episodes), [np.zeros(0, np.int64)] * len(episodes), 0
    for of_group in members.values():
        tree = prefix_tree([episodes[episode] for episode in of_group]) if len(of_group) > 1 else ([0], [0])
        path = np.zeros(0, np.int64)
        for place, known in zip(*tree, strict=True):
            episode = of_group[place]
            own = max(episodes[episode].num_tokens - 1 - known, 0)
            path = np.concatenate([path[:known], np.arange(width, width + own)])
            width += own
            order.append(episode)
            shared[episode], paths[episode] = known, path
    return RowLayout(order, shared, paths, width)
