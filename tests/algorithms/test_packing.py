from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.packing import KEYS_PER_TOKEN, SLOWER, SharingGroup, plan_microbatches, separate
from monarch_rl.episode.episode import Episode
from monarch_rl.episode.prefixes import prefix_tree
from tests.episode.trees import distinct_inputs, trees

GROUPS = st.lists(trees(), max_size=8)
Plan = list[list[list[tuple[int, int]]]]


def planned(groups: list[list[Episode]], tokens_per_microbatch: int, dp_size: int) -> Plan:
    sharing = [SharingGroup([e.num_tokens for e in group], *prefix_tree(group)) for group in groups]
    return plan_microbatches(sharing, tokens_per_microbatch, dp_size)


def computed(groups: list[list[Episode]], microbatch: list[tuple[int, int]]) -> int:
    """Number of distinct inputs within each group."""
    members: dict[int, list[Episode]] = {}
    for group, episode in microbatch:
        members.setdefault(group, []).append(groups[group][episode])
    return sum(map(distinct_inputs, members.values()))


@given(groups=GROUPS, tokens_per_microbatch=st.integers(24, 100), dp_size=st.integers(1, 5))
def test_every_episode_is_planned_once_within_the_budgets_and_ranks_have_equally_many_microbatches(
    groups: list[list[Episode]], tokens_per_microbatch: int, dp_size: int
) -> None:
    plan = planned(groups, tokens_per_microbatch, dp_size)
    assert len(plan) == dp_size
    assert len({len(rank) for rank in plan}) == 1
    placed = [place for rank in plan for microbatch in rank for place in microbatch]
    assert sorted(placed) == [(g, e) for g, group in enumerate(groups) for e in range(len(group))]
    for microbatch in (microbatch for rank in plan for microbatch in rank):
        assert microbatch == sorted(microbatch)
        assert computed(groups, microbatch) <= tokens_per_microbatch
        keys = sum(groups[g][e].num_tokens - 1 for g, e in microbatch)
        assert keys <= KEYS_PER_TOKEN * tokens_per_microbatch


@given(groups=GROUPS.filter(bool), tokens_per_microbatch=st.integers(24, 100), dp_size=st.integers(1, 5))
def test_the_slowest_rank_has_at_most_its_share_of_separate_episodes_and_the_longest(
    groups: list[list[Episode]], tokens_per_microbatch: int, dp_size: int
) -> None:
    """Including its waits: the sum over micro-batches of the largest concurrent one. And a rank waits for at most one
    part of a group."""
    plan = planned(groups, tokens_per_microbatch, dp_size)
    tokens = [[computed(groups, microbatch) for microbatch in rank] for rank in plan]
    largest = [max(at_once) for at_once in zip(*tokens, strict=True)]
    inputs = [episode.num_tokens - 1 for group in groups for episode in group]
    assert sum(largest) <= (1 + SLOWER) * (sum(inputs) / dp_size + max(inputs))
    largest_group = max(map(distinct_inputs, groups))
    for rank in tokens:
        assert sum(most - own for most, own in zip(largest, rank, strict=True)) <= largest_group


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    tokens_per_microbatch=st.integers(100, 400),
    dp_size=st.integers(1, 5),
)
def test_ranks_are_balanced_to_within_the_longest_episode_where_nothing_is_shared(
    lengths: list[int], tokens_per_microbatch: int, dp_size: int
) -> None:
    """In their sums, and in the waits of each rank for the largest concurrent micro-batch."""
    plan = plan_microbatches(separate(lengths), tokens_per_microbatch, dp_size)
    tokens = [[sum(lengths[i] - 1 for i, _ in microbatch) for microbatch in rank] for rank in plan]
    assert max(map(sum, tokens)) - min(map(sum, tokens)) <= max(lengths)
    largest = [max(at_once) for at_once in zip(*tokens, strict=True)]
    for rank in tokens:
        assert sum(most - own for most, own in zip(largest, rank, strict=True)) <= max(lengths)


def prompt_and_answers(prompt: int, answers: int) -> SharingGroup:
    """A prompt with answers of 3 inputs each."""
    return SharingGroup([prompt + 4] * answers, range(answers), [0] + [prompt] * (answers - 1))


def test_groups_stay_together_unless_ranks_would_wait() -> None:
    together = plan_microbatches([prompt_and_answers(100, 8)] * 4, 1000, 2)
    assert [[sorted({g for g, _ in microbatch}) for microbatch in rank] for rank in together] == [[[0, 2]], [[1, 3]]]
    # One group for two ranks: both compute its prompt, because half of its answers cost more than the prompt.
    divided = plan_microbatches([prompt_and_answers(4, 8)], 1000, 2)
    assert sorted(len(rank[0]) for rank in divided) == [4, 4]
    # With a prompt of 900 both would compute nearly as much as one rank alone.
    undivided = plan_microbatches([prompt_and_answers(900, 8)], 2000, 2)
    assert sorted(len(rank[0]) for rank in undivided) == [0, 8]


def test_a_group_above_the_budget_is_divided_and_its_prefix_recomputed() -> None:
    plan = plan_microbatches([prompt_and_answers(50, 8)], 62, 1)
    assert [len(microbatch) for microbatch in plan[0]] == [4, 4]


def test_keys_are_bounded_where_many_answers_follow_a_long_prompt() -> None:
    """50 answers have only 250 inputs of their own, but each attends to the prompt."""
    (microbatches,) = plan_microbatches([prompt_and_answers(100, 50)], 1000, 1)
    assert max(len(microbatch) for microbatch in microbatches) == KEYS_PER_TOKEN * 1000 // 103
    assert len(microbatches) == 2


@pytest.mark.parametrize(
    ("groups", "answers", "prompt", "budget", "ranks"), [(89, 64, 7, 100_000, 8), (256, 16, 4000, 8192, 8)]
)
def test_many_short_episodes_keep_the_bound_and_are_planned_quickly(
    groups: int, answers: int, prompt: int, budget: int, ranks: int
) -> None:
    """The longest episode is negligible for the share of a rank, and single episodes would need many rounds."""
    sharing = [prompt_and_answers(prompt, answers)] * groups
    began = time.process_time()
    plan = plan_microbatches(sharing, budget, ranks)
    assert time.process_time() - began < 2, "0.1 s is normal"
    tokens = [
        [sum(sharing[0].computed(range(n)) for n in Counter(g for g, _ in of_rank).values()) for of_rank in rank]
        for rank in plan
    ]
    inputs = prompt + 3
    slowest = sum(max(at_once) for at_once in zip(*tokens, strict=True))
    assert slowest <= (1 + SLOWER) * (groups * answers * inputs / ranks + inputs)


def test_an_episode_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="101 tokens .* 100"):
        plan_microbatches(separate([5, 101]), 100, 2)
