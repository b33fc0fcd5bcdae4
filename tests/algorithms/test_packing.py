from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.packing import plan_microbatches


@given(
    lengths=st.lists(st.integers(1, 100), max_size=60),
    token_budget=st.integers(100, 400),
    dp_size=st.integers(1, 5),
)
def test_every_episode_once_within_the_budget_and_equally_many_microbatches(
    lengths: list[int], token_budget: int, dp_size: int
) -> None:
    plan = plan_microbatches(lengths, token_budget, dp_size)
    assert len(plan) == dp_size
    assert len({len(rank) for rank in plan}) == 1
    placed = [i for rank in plan for microbatch in rank for i in microbatch]
    assert sorted(placed) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in microbatch) <= token_budget for rank in plan for microbatch in rank)


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    token_budget=st.integers(100, 400),
    dp_size=st.integers(1, 5),
)
def test_ranks_are_balanced_to_within_the_longest_episode(lengths: list[int], token_budget: int, dp_size: int) -> None:
    """In their sums, and in what each waits for the largest at every micro-batch."""
    plan = plan_microbatches(lengths, token_budget, dp_size)
    tokens = [[sum(lengths[i] for i in microbatch) for microbatch in rank] for rank in plan]
    assert max(map(sum, tokens)) - min(map(sum, tokens)) <= max(lengths)
    largest = [max(at_once) for at_once in zip(*tokens, strict=True)]
    for rank in tokens:
        assert sum(most - own for most, own in zip(largest, rank, strict=True)) <= max(lengths)


def test_an_episode_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="101 tokens does not fit the token budget of 100"):
        plan_microbatches([5, 101], 100, 2)
