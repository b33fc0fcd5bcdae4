"""What an advantage sees of a group, and what it may return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from monarch_rl.algorithms.functions import Columns


@dataclass(frozen=True, slots=True)
class GroupView:
    """The S sequences of one group: all plays of one item. A play is one sequence, or several: one for each seat, one
    for each branch."""

    rewards: torch.Tensor
    """float32[S]."""
    lengths: torch.Tensor
    """int32[S]: tokens that each sequence drew."""
    cut: torch.Tensor
    """bool[S]: whether it ended because it reached a limit of tokens."""
    plays: torch.Tensor
    """int32[S]: which play of the item it belongs to."""
    seats: Sequence[str]
    """S names; empty where there are no seats."""
    forks: Sequence[tuple[int, int] | None]
    """Of S sequences: ``(an earlier sequence of the play, n)``, whose first n turns they have in common; None of none.
    These turns are trained there; here they have length 0. An advantage of whole sequences becomes, for a turn that
    several begin with, the mean of theirs (:func:`~monarch_rl.algorithms.returns.branch_means`)."""
    parts: Sequence[dict[str, float]]
    """Of S sequences: the named parts of the reward."""
    turn_lengths: Sequence[torch.Tensor]
    """Of S sequences, int32[turns]: tokens that each turn drew. Their sum is the sequence's length."""
    turn_rewards: Sequence[torch.Tensor]
    """Of S sequences, float32[turns]: what each turn alone was given; 0 where it was given nothing."""
    columns: Mapping[str, Sequence[torch.Tensor]]
    """Of the columns that the advantage needs (:func:`monarch_rl.algorithms.functions.needs`), of S sequences:
    float32[length], a number for each token that was drawn."""
    task: str = ""
    """Name of the task."""
    item: int = 0
    """Cursor of the item: ``task.items(item)`` makes it."""

    @classmethod
    def of(cls, rewards: torch.Tensor | Sequence[float], **known: Any) -> GroupView:
        """A group of which little but the rewards, float[S], is known: one token and one turn a sequence."""
        rewards = torch.as_tensor(rewards, dtype=torch.float32)
        size = len(rewards)
        lengths = torch.as_tensor(known.pop("lengths", [1] * size), dtype=torch.int32)
        defaults: dict[str, Any] = {
            "cut": torch.zeros(size, dtype=torch.bool),
            "plays": torch.arange(size, dtype=torch.int32),
            "seats": [""] * size,
            "forks": [None] * size,
            "parts": [{} for _ in range(size)],
            "turn_lengths": [length.reshape(1) for length in lengths],
            "turn_rewards": [torch.zeros(1) for _ in range(size)],
        }
        columns = Columns(known.pop("columns", {}))
        return cls(rewards=rewards, lengths=lengths, columns=columns, **(defaults | known))

    def __len__(self) -> int:
        """S."""
        return len(self.rewards)


class PerTurn(NamedTuple):
    """Advantages of turns."""

    values: Sequence[torch.Tensor]
    """Of S sequences: float[turns]."""


class PerToken(NamedTuple):
    """Advantages of tokens."""

    values: Sequence[torch.Tensor]
    """Of S sequences: float[length], of the tokens that were drawn."""


Values = torch.Tensor | PerTurn | PerToken
"""Advantages of a group: float[S], one for each sequence, or of its turns or tokens."""
Advantage = Callable[[GroupView], Values] | Callable[[Sequence[GroupView]], Sequence[Values]]
"""From a group to its advantages. One that is marked with :func:`monarch_rl.algorithms.functions.of_batch` takes a list
of groups, all those of a batch, and returns a list."""


@runtime_checkable
class Remembers(Protocol):
    """An advantage that keeps something from batch to batch, such as a running baseline. It is an object, which every
    trainer rank has for itself: what it keeps must depend on nothing but the groups that it was called with. Or an
    objective: what it keeps is that of its rank."""

    def state_dict(self) -> dict[str, Any]:
        """What is kept, as plain values and tensors; a part of the checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from there."""
        ...


def remembering(function: object) -> Remembers | None:
    """The function, or what a ``functools.partial`` calls, if it keeps something from batch to batch."""
    while isinstance(function, partial):
        function = function.func
    return function if isinstance(function, Remembers) else None
