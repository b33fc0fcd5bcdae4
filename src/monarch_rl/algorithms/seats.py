"""Advantages of several seats: each is compared with its own kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from monarch_rl.algorithms.functions import Columns
from monarch_rl.algorithms.group_view import GroupView, Remembers


class BySeat:
    """An advantage that sees the sequences of each seat as a group of their own.

    What one seat wins another may lose, so the mean of all says nothing; and who moves first may win more often.

    Args:
        advantage: from a group to float[S], such as ``dr_grpo``.
    """

    def __init__(self, advantage: Callable[[GroupView], torch.Tensor]) -> None:
        self.advantage = advantage

    def __call__(self, group: GroupView) -> torch.Tensor:
        """float32[S]."""
        values = torch.zeros(len(group))
        for seat in dict.fromkeys(group.seats):
            places = [place for place, other in enumerate(group.seats) if other == seat]
            values[places] = self.advantage(part(group, places))
        return values

    def state_dict(self) -> dict[str, Any]:
        """What the advantage keeps from batch to batch; empty if it keeps nothing."""
        advantage: object = self.advantage
        return advantage.state_dict() if isinstance(advantage, Remembers) else {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from there."""
        advantage: object = self.advantage
        if isinstance(advantage, Remembers):
            advantage.load_state_dict(state)


def part(group: GroupView, places: list[int]) -> GroupView:
    """The group as if it had these sequences alone; ``forks`` are still those among the sequences of a play."""
    return replace(
        group,
        rewards=group.rewards[places],
        lengths=group.lengths[places],
        cut=group.cut[places],
        plays=group.plays[places],
        seats=[group.seats[place] for place in places],
        forks=[group.forks[place] for place in places],
        parts=[group.parts[place] for place in places],
        turn_lengths=[group.turn_lengths[place] for place in places],
        turn_rewards=[group.turn_rewards[place] for place in places],
        columns=Columns({name: [values[place] for place in places] for name, values in group.columns.items()}),
    )
