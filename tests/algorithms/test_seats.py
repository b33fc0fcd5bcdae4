from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.advantages import SeatBaselines, dr_grpo
from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.seats import BySeat

SEATS = st.sampled_from(["white", "black", ""])


@given(st.lists(st.tuples(SEATS, st.integers(-3, 3)), min_size=1, max_size=12))
def test_each_seat_is_compared_with_its_own_kind(sequences: list[tuple[str, int]]) -> None:
    group = GroupView.of([float(reward) for _, reward in sequences], seats=[seat for seat, _ in sequences])
    advantages = BySeat(dr_grpo)(group).tolist()
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

    assert BySeat(checked)(group).tolist() == [0.0, 2.0, 6.0]


def test_what_the_advantage_of_a_seat_remembers_is_saved() -> None:
    group = GroupView.of([1.0, 3.0], seats=["white", "black"])
    before, after = BySeat(SeatBaselines()), BySeat(SeatBaselines())
    before(group)
    after.load_state_dict(before.state_dict())
    assert after(group).tolist() == before(group).tolist() != BySeat(SeatBaselines())(group).tolist()
    BySeat(dr_grpo).load_state_dict(BySeat(dr_grpo).state_dict())
