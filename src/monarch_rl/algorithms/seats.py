"""Advantages of several seats: each is compared with its own kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from monarch_rl.algorithms.functions import Columns, is_of_batch, needed_columns, place_of
from monarch_rl.algorithms.group_view import GroupView, PerToken, PerTurn, Values, remembering


class BySeat:
    """An advantage that sees the sequences of each seat as a group of their own.

    What one seat wins another may lose, so the mean of all says nothing; and who moves first may win more often.

    Args:
        advantage: from a group to its advantages, such as ``dr_grpo``.

    Raises:
        ValueError: it takes all groups of a batch at once.
    """

    def __init__(self, advantage: Callable[[GroupView], Values]) -> None:
        if is_of_batch(advantage):
            raise ValueError(
                f"BySeat({place_of(advantage)}): it takes all groups of a batch at once, and a seat is a part of one "
                "group. Give an advantage of one group"
            )
        self.advantage = advantage
        self.needed_columns = needed_columns(advantage)

    def __call__(self, group: GroupView) -> Values:
        """What the advantage returns for each seat, in the order of the sequences.

        Raises:
            ValueError: it returned something else, or not the same kind for each seat.
        """
        found: list[Any] = [None] * len(group)
        kinds = set()
        for seat in dict.fromkeys(group.seats):
            places = [place for place, other in enumerate(group.seats) if other == seat]
            returned = self.advantage(part(group, places))
            kinds.add(type(returned))
            values = returned.values if isinstance(returned, PerTurn | PerToken) else returned
            if len(values) != len(places):
                raise ValueError(
                    f"the advantage {place_of(self.advantage)} returned {len(values)} values for the {len(places)} "
                    f"sequences of seat {seat!r}"
                )
            for place, value in zip(places, values, strict=True):
                found[place] = value
        if len(kinds) > 1:
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(
                f"the advantage {place_of(self.advantage)} returned {names}: return one kind for all seats"
            )
        (kind,) = kinds
        return kind(found) if issubclass(kind, PerTurn | PerToken) else torch.stack(found)

    def state_dict(self) -> dict[str, Any]:
        """What the advantage keeps from batch to batch; empty if it keeps nothing."""
        advantage = remembering(self.advantage)
        return {} if advantage is None else advantage.state_dict()

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from there."""
        advantage = remembering(self.advantage)
        if advantage is not None:
            advantage.load_state_dict(state)


def part(group: GroupView, places: list[int]) -> GroupView:
    """The group as if it had these sequences alone. One whose origin is not among them begins with nothing."""
    return replace(
        group,
        rewards=group.rewards[places],
        lengths=group.lengths[places],
        cut=group.cut[places],
        plays=group.plays[places],
        seats=[group.seats[place] for place in places],
        forks=_forks_among(group, places),
        parts=[group.parts[place] for place in places],
        turn_lengths=[group.turn_lengths[place] for place in places],
        turn_rewards=[group.turn_rewards[place] for place in places],
        columns=Columns({name: [values[place] for place in places] for name, values in group.columns.items()}),
    )


def _forks_among(group: GroupView, places: list[int]) -> list[tuple[int, int] | None]:
    """The forks of some sequences, whose origins are counted among those of the play that are in ``places``."""
    of_play: dict[int, list[int]] = {}
    for place, play in enumerate(group.plays.tolist()):
        of_play.setdefault(play, []).append(place)
    chosen, found = set(places), list[tuple[int, int] | None]()
    for place in places:
        fork, play = group.forks[place], of_play[int(group.plays[place])]
        if fork is None or play[fork[0]] not in chosen:
            found.append(None)
        else:
            found.append((sum(other in chosen for other in play[: fork[0]]), fork[1]))
    return found
