from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.advantages import SeatBaselines, dr_grpo, reinforce_pp
from monarch_rl.algorithms.functions import needed_columns, needs
from monarch_rl.algorithms.group_view import GroupView, PerToken, PerTurn, Values
from monarch_rl.algorithms.seats import BySeat

SEATS = st.sampled_from(["white", "black", ""])


def listed(values: Values) -> list[float]:
    assert isinstance(values, torch.Tensor)
    return values.tolist()


@given(st.lists(st.tuples(SEATS, st.integers(-3, 3)), min_size=1, max_size=12))
def test_each_seat_is_compared_with_its_own_kind(sequences: list[tuple[str, int]]) -> None:
    group = GroupView.of([float(reward) for _, reward in sequences], seats=[seat for seat, _ in sequences])
    advantages = listed(BySeat(dr_grpo)(group))
    for (seat, reward), advantage in zip(sequences, advantages, strict=True):
        own = [other for of, other in sequences if of == seat]
        assert abs(advantage - (reward - sum(own) / len(own))) < 1e-5


def test_an_advantage_sees_all_that_is_known_of_its_seat() -> None:
    columns = {"value": [torch.full((n,), float(n)) for n in (1, 2, 3)]}
    group = GroupView.of([1, 2, 3], seats=["a", "b", "a"], lengths=[1, 2, 3], columns=columns)

    def checked(part: GroupView) -> torch.Tensor:
        assert len(set(part.seats)) == 1 and [len(values) for values in part.columns["value"]] == part.lengths.tolist()
        assert [int(of_turn.sum()) for of_turn in part.turn_lengths] == part.lengths.tolist()
        return part.rewards * part.plays

    assert listed(BySeat(checked)(group)) == [0.0, 2.0, 6.0]


def test_what_the_advantage_of_a_seat_remembers_is_saved() -> None:
    group = GroupView.of([1.0, 3.0], seats=["white", "black"])
    before, after = BySeat(SeatBaselines()), BySeat(SeatBaselines())
    before(group)
    after.load_state_dict(before.state_dict())
    assert listed(after(group)) == listed(before(group)) != listed(BySeat(SeatBaselines())(group))
    BySeat(dr_grpo).load_state_dict(BySeat(dr_grpo).state_dict())


def test_a_seats_advantage_may_need_columns_and_be_of_turns_or_tokens() -> None:
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


def test_what_cannot_be_of_a_seat_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"BySeat\(reinforce_pp .*takes all groups of a batch at once"):
        BySeat(reinforce_pp)  # type: ignore[arg-type]
    group = GroupView.of([1, 2, 3], seats=["a", "b", "a"])
    with pytest.raises(ValueError, match=r"<lambda> .*returned 1 values for the 2 sequences of seat 'a'"):
        BySeat(lambda part: part.rewards[:1])(group)
    with pytest.raises(ValueError, match="returned PerTurn and Tensor: return one kind for all seats"):
        BySeat(lambda part: part.rewards if len(part) == 1 else PerTurn([torch.ones(1)] * 2))(group)
