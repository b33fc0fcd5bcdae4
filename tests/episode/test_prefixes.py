"""Shared prefixes of the episodes of a group."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.episode.episode import Episode, Group
from monarch_rl.episode.prefixes import prefix_tree
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from tests.episode.trees import distinct_inputs, inputs_of, tree_of, trees

GROUPS = st.booleans().flatmap(lambda routes: trees(routes=routes))


def common(left: Episode, right: Episode) -> int:
    pairs = zip(inputs_of(left), inputs_of(right), strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(left.num_tokens, right.num_tokens) - 1)


@given(GROUPS)
def test_two_episodes_share_the_minimum_of_the_neighbours_between_them(episodes: list[Episode]) -> None:
    order, shared = prefix_tree(episodes)
    assert sorted(order) == list(range(len(episodes))) and shared[0] == 0
    for left, right in combinations(range(len(order)), 2):
        assert min(shared[left + 1 : right + 1]) == common(episodes[order[left]], episodes[order[right]])


@given(GROUPS)
def test_the_header_of_a_group_has_its_prefix_tree(episodes: list[Episode]) -> None:
    group = SerializedGroup.read(serialize_group(Group(0, 0, episodes)))
    assert group.tree == prefix_tree(episodes)
    inputs = sum(episode.num_tokens - 1 for episode in episodes)
    assert inputs - sum(group.tree.shared) == distinct_inputs(episodes)


def test_tokens_that_other_experts_compute_are_not_shared() -> None:
    episodes = tree_of([9, 9], [(0, 0), (0, 6)], 0, routes=True)
    routes = episodes[1].expert_routes
    assert routes is not None
    assert prefix_tree(episodes).shared == [0, 6]
    routes[3] = np.roll(routes[3], 1, axis=-1)
    assert prefix_tree(episodes).shared == [0, 3]


def test_equal_episodes_share_all_inputs() -> None:
    episodes = tree_of([5, 5, 5], [(0, 0), (0, 5), (1, 5)], 1)
    assert prefix_tree(episodes) == ([0, 1, 2], [0, 4, 4])
