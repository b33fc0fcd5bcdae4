"""The input and output types of advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from monarch_rl.algorithms.functions import Columns


@dataclass(frozen=True, slots=True)
class GroupView:
    """The S sequences of one group: all rollouts of one item. A rollout has one sequence, or one per seat and
    branch."""

    rewards: torch.Tensor
    """float32[S]."""
    lengths: torch.Tensor
    """int32[S]: sampled tokens of each sequence."""
    cut: torch.Tensor
    """bool[S]: whether the sequence was cut off at a limit on tokens or turns."""
    rollouts: torch.Tensor
    """int32[S]: index of the rollout that the sequence belongs to."""
    seats: Sequence[str]
    """S names of seats; "" without seats."""
    forks: Sequence[tuple[int, int] | None]
    """For each of S sequences: ``(index of an earlier sequence of the rollout, n)`` if it shares that one's first n
    turns; None if it is no branch. The shared turns are trained in the earlier sequence, and have length 0 in this one.
    If an advantage returns one value per sequence, a turn that several sequences share gets the mean of theirs
    (:func:`~monarch_rl.algorithms.returns.branch_means`)."""
    parts: Sequence[dict[str, float]]
    """For each of S sequences: the named components of the reward."""
    turn_lengths: Sequence[torch.Tensor]
    """For each of S sequences, int32[turns]: sampled tokens of each turn. Their sum is the sequence's length."""
    turn_rewards: Sequence[torch.Tensor]
    """For each of S sequences, float32[turns]: the reward of each turn; 0 if it has none."""
    columns: Mapping[str, Sequence[torch.Tensor]]
    """The columns that the advantage needs (:func:`monarch_rl.algorithms.functions.needs`), by name; for each of S
    sequences float32[length], a value per sampled token."""
    task: str = ""
    """Name of the task."""
    item: int = 0
    """Cursor of the item: ``task.items(item)`` makes it."""

    @classmethod
    def of(cls, rewards: torch.Tensor | Sequence[float], **fields: Any) -> GroupView:
        """A group from its rewards, float[S], with defaults for all fields not in ``fields``: one token and one turn
        per sequence."""
        rewards = torch.as_tensor(rewards, dtype=torch.float32)
        size = len(rewards)
        lengths = torch.as_tensor(fields.pop("lengths", [1] * size), dtype=torch.int32)
        defaults: dict[str, Any] = {
            "cut": torch.zeros(size, dtype=torch.bool),
            "rollouts": torch.arange(size, dtype=torch.int32),
            "seats": [""] * size,
            "forks": [None] * size,
            "parts": [{} for _ in range(size)],
            "turn_lengths": [length.reshape(1) for length in lengths],
            "turn_rewards": [torch.zeros(1) for _ in range(size)],
        }
        columns = Columns(fields.pop("columns", {}))
        return cls(rewards=rewards, lengths=lengths, columns=columns, **(defaults | fields))

    def __len__(self) -> int:
        """S."""
        return len(self.rewards)


class PerTurn(NamedTuple):
    """Advantages of turns."""

    values: Sequence[torch.Tensor]
    """float[turns] for each of S sequences."""


class PerToken(NamedTuple):
    """Advantages of tokens."""

    values: Sequence[torch.Tensor]
    """float[length] for each of S sequences: a value per sampled token."""


Values = torch.Tensor | PerTurn | PerToken
"""Advantages of a group: float[S], one per sequence, or one per turn or token."""
Advantage = Callable[[GroupView], Values] | Callable[[Sequence[GroupView]], Sequence[Values]]
"""A function from a group to its advantages. If decorated with :func:`monarch_rl.algorithms.functions.of_batch`, it
takes a list of all groups of a batch, and returns a list."""


@runtime_checkable
class Remembers(Protocol):
    """An advantage or an objective with state that it keeps from batch to batch, such as a running baseline.

    Every trainer rank has its own object. The state of an advantage must depend only on the groups that it was called
    with, so that it is the same on all ranks. The state of an objective belongs to its rank.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain values and tensors. It is part of the checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the state."""
        ...


def remembering(function: object) -> Remembers | None:
    """The function, or the function of a ``functools.partial``, if it has state; else None."""
    while isinstance(function, partial):
        function = function.func
    return function if isinstance(function, Remembers) else None
