from __future__ import annotations

import random
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.algorithms.advantages import BySeat, SeatBaselines, dr_grpo, part, reinforce_pp
from monarch_rl.algorithms.distillation import distillation
from monarch_rl.algorithms.functions import needed_columns, needs
from monarch_rl.algorithms.group_view import GroupView, PerToken, PerTurn, Values

SEATS = st.sampled_from(["white", "black", ""])


class Sequence(NamedTuple):
    """A sequence of a rollout: the gain of each sampled token, and the earlier sequence it was forked from."""

    rollout: int
    seat: str
    turns: list[int]
    gains: list[float]
    fork: tuple[int, int] | None


def view_of(sequences: list[Sequence]) -> GroupView:
    gains = [torch.tensor(sequence.gains) for sequence in sequences]
    return GroupView.of(
        [0.0] * len(sequences),
        lengths=[len(sequence.gains) for sequence in sequences],
        rollouts=torch.tensor([sequence.rollout for sequence in sequences], dtype=torch.int32),
        seats=[sequence.seat for sequence in sequences],
        forks=[sequence.fork for sequence in sequences],
        turn_lengths=[torch.tensor(sequence.turns, dtype=torch.int32) for sequence in sequences],
        turn_rewards=[torch.zeros(len(sequence.turns)) for sequence in sequences],
        columns={"teacher": gains, "behaviour": [torch.zeros_like(gain) for gain in gains]},
    )


def listed(values: Values) -> list[float]:
    assert isinstance(values, torch.Tensor)
    return values.tolist()


@given(st.lists(st.tuples(SEATS, st.integers(-3, 3)), min_size=1, max_size=12))
def test_each_seat_is_compared_with_the_same_seat(sequences: list[tuple[str, int]]) -> None:
    group = GroupView.of([float(reward) for _, reward in sequences], seats=[seat for seat, _ in sequences])
    advantages = listed(BySeat(dr_grpo)(group))
    for (seat, reward), advantage in zip(sequences, advantages, strict=True):
        own = [other for of, other in sequences if of == seat]
        assert abs(advantage - (reward - sum(own) / len(own))) < 1e-5


def test_an_advantage_gets_all_fields_of_its_seat() -> None:
    columns = {"value": [torch.full((n,), float(n)) for n in (1, 2, 3)]}
    group = GroupView.of([1, 2, 3], seats=["a", "b", "a"], lengths=[1, 2, 3], columns=columns)

    def checked(part: GroupView) -> torch.Tensor:
        assert len(set(part.seats)) == 1 and [len(values) for values in part.columns["value"]] == part.lengths.tolist()
        assert [int(of_turn.sum()) for of_turn in part.turn_lengths] == part.lengths.tolist()
        return part.rewards * part.rollouts

    assert listed(BySeat(checked)(group)) == [0.0, 2.0, 6.0]


def test_the_state_of_a_seat_advantage_is_saved() -> None:
    group = GroupView.of([1.0, 3.0], seats=["white", "black"])
    before, after = BySeat(SeatBaselines()), BySeat(SeatBaselines())
    before(group)
    after.load_state_dict(before.state_dict())
    assert listed(after(group)) == listed(before(group)) != listed(BySeat(SeatBaselines())(group))
    partly = BySeat(partial(after.advantage))
    assert partly.state_dict() == after.state_dict() != {}
    partly.load_state_dict(before.state_dict())
    BySeat(dr_grpo).load_state_dict(BySeat(dr_grpo).state_dict())


def test_a_seat_advantage_may_need_columns_and_be_per_turn_or_token() -> None:
    group = GroupView.of([1, 2, 3], seats=["a", "b", "a"], lengths=[1, 2, 3], columns={"value": [torch.zeros(1)] * 3})

    @needs("value")
    def of_tokens(part: GroupView) -> PerToken:
        return PerToken([torch.full((int(n),), float(len(part))) for n in part.lengths])

    def of_turns(part: GroupView) -> PerTurn:
        return PerTurn([reward.reshape(1) for reward in part.rewards])

    assert needed_columns(BySeat(of_tokens)) == ("value",)
    by_token, by_turn = BySeat(of_tokens)(group), BySeat(of_turns)(group)
    assert isinstance(by_token, PerToken) and [v.tolist() for v in by_token.values] == [[2.0], [1.0, 1.0], [2.0] * 3]
    assert isinstance(by_turn, PerTurn) and [v.tolist() for v in by_turn.values] == [[1.0], [2.0], [3.0]]


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(0, 2**16))
def test_branches_of_a_seat_are_independent_of_other_seats(seats: int, leaves: int, rollouts: int, seed: int) -> None:
    """The advantages of a seat depend only on later tokens of that seat, as if it had been alone."""
    rng = random.Random(seed)
    names = [f"seat {seat}" for seat in range(seats)]
    alone: dict[str, list[Sequence]] = {name: [] for name in names}
    together: list[Sequence] = []
    for rollout in range(rollouts):
        for leaf in range(leaves):
            origin, shared = (rng.randrange(leaf), 1) if leaf else (None, 0)
            for seat, name in enumerate(names):
                turns = [0 if turn < shared else rng.randint(1, 3) for turn in range(2)]
                gains = [float(rng.randint(-9, 9)) for _ in range(sum(turns))]
                fork = None if origin is None else (origin * seats + seat, shared)
                together.append(Sequence(rollout, name, turns, gains, fork))
                alone[name].append(Sequence(rollout, name, turns, gains, None if origin is None else (origin, shared)))
    found: Any = BySeat(partial(distillation, discount=1.0))(view_of(together))
    expected = {name: iter(distillation(view_of(own), 1.0).values) for name, own in alone.items()}
    for sequence, values in zip(together, found.values, strict=True):
        torch.testing.assert_close(values, next(expected[sequence.seat]))


def test_a_branch_without_its_origin_shares_no_tokens() -> None:
    sequences = [Sequence(0, "", [1, 1], [1.0, 2.0], None), Sequence(0, "", [0, 1], [4.0], (0, 1))]
    (values,) = distillation(part(view_of([*sequences, sequences[1]]), [1]), 1.0).values
    assert values.tolist() == [4.0]


def test_a_function_that_cannot_be_applied_per_seat_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"BySeat\(reinforce_pp "):
        BySeat(reinforce_pp)  # type: ignore[arg-type]
    group = GroupView.of([1, 2, 3], seats=["a", "b", "a"])
    with pytest.raises(ValueError, match=r"<lambda> .* 1 values .* 2 sequences of seat 'a'"):
        BySeat(lambda part: part.rewards[:1])(group)
    with pytest.raises(ValueError, match="PerTurn and Tensor"):
        BySeat(lambda part: part.rewards if len(part) == 1 else PerTurn([torch.ones(1)] * 2))(group)
