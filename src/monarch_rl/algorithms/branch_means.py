"""The advantage of tokens that were drawn before a fork: the mean over the branches that begin with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from monarch_rl.algorithms.group_view import GroupView

Forks = Sequence[tuple[int, int] | None]
"""Of each sequence of a play: ``(an earlier one, n)``, whose first n turns it begins with; None of none."""


def branch_means(values: torch.Tensor, forks: Forks, turns: Sequence[int]) -> list[torch.Tensor]:
    """What each turn of a play's sequences counts with, in the first sequence that has it.

    A token that m sequences begin with was drawn once. Trained once with the mean of their m values, it has the
    gradient that they would give it together, over m.

    Args:
        values: float[S], of each sequence.
        forks: of each sequence.
        turns: how many each sequence has.

    Returns:
        For each sequence, float[turns]: the mean of its value and those of all sequences that begin with the turn. For
        turns that an earlier sequence has, which are trained there, it has no meaning.
    """
    sums = [value.double().repeat(count) for value, count in zip(values, turns, strict=True)]
    counts = [torch.ones(count, dtype=torch.float64) for count in turns]
    for value, origin in zip(values, forks, strict=True):
        shared = max(turns)
        while origin is not None:
            sequence, shared = origin[0], min(shared, origin[1])
            sums[sequence][:shared] += value.double()
            counts[sequence][:shared] += 1
            origin = forks[sequence]
    return [(total / count).to(values.dtype) for total, count in zip(sums, counts, strict=True)]


class Path(NamedTuple):
    """All that one sequence drew, from its first token on."""

    tokens: torch.Tensor
    """int64[n]: places among the tokens that the group drew, those of one sequence behind those of the one before."""
    turn_lengths: torch.Tensor
    """int32[turns]: tokens of each turn; their sum is n."""


def paths(group: GroupView) -> list[Path]:
    """Of each sequence of a group: its own tokens, behind those of the turns that it begins with."""
    own = torch.arange(int(group.lengths.sum())).split(group.lengths.tolist())
    found: list[Path] = []
    for tokens, lengths, fork, play in zip(own, group.turn_lengths, group.forks, group.plays, strict=True):
        if fork is not None:
            origin = found[int((group.plays == play).nonzero()[fork[0]])]
            before = origin.turn_lengths[: fork[1]]
            tokens = torch.cat([origin.tokens[: int(before.sum())], tokens])
            lengths = torch.cat([before, lengths[fork[1] :]])
        found.append(Path(tokens, lengths))
    return found


def path_means(group: GroupView, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Values of all tokens along each path, as values of the tokens that a group drew: one that several branches begin
    with has the mean of what each of them gives it.

    Args:
        values: of each of :func:`paths`, float[n].

    Returns:
        Of S sequences: float[length].
    """
    size = int(group.lengths.sum())
    total, branches = torch.zeros(size, dtype=values[0].dtype), torch.zeros(size, dtype=values[0].dtype)
    for path, of_path in zip(paths(group), values, strict=True):
        total.index_add_(0, path.tokens, of_path)
        branches.index_add_(0, path.tokens, torch.ones_like(of_path))
    return list((total / branches).split(group.lengths.tolist()))
