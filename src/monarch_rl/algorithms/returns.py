"""Returns, values and advantages of single tokens: after a reward, under a critic, before a fork. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.losses import TokenLoss


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float = 1.0, lam: float = 1.0, last_value: float = 0.0
) -> torch.Tensor:
    """``A_t = sum over k of (gamma lam)^k delta_(t + k)`` with ``delta_t = r_t + gamma V_(t + 1) - V_t`` (GAE,
    arXiv:1506.02438), float[n].

    Summed by doubling: log2(n) steps over the whole sequence. ``A + V`` is what a critic learns.

    Args:
        rewards: float[n], of each drawn token: what followed it.
        values: float[n], the critic's, before each token.
        gamma, lam: 1 and 1 are verl's defaults: ``A_t`` is the return minus ``V_t``. A smaller lam trusts the critic
            more; TRL has 0.95.
        last_value: the critic's after the last token; 0 where the episode ended.
    """
    following = torch.cat([values[1:], values.new_full((min(len(values), 1),), last_value)])
    total = rewards + gamma * following - values
    decay, shift = gamma * lam, 1
    while shift < len(total):
        total = torch.cat([total[:-shift] + decay**shift * total[shift:], total[-shift:]])
        shift *= 2
    return total


def token_rewards(reward: float, turn_rewards: torch.Tensor, turn_lengths: torch.Tensor) -> torch.Tensor:
    """Each turn's own reward at its last drawn token, and the episode's at the very last one.

    Args:
        turn_rewards: float32[turns]; turn_lengths: int32[turns], tokens that each drew.

    Returns:
        float32[n], n the sum of ``turn_lengths``. A turn that drew nothing has its reward at the token before it.
    """
    ends = turn_lengths.long().cumsum(0)
    rewards = torch.zeros(int(ends[-1]) if len(ends) else 0)
    if len(rewards):
        rewards.index_add_(0, (ends - 1).clamp(min=0), turn_rewards)
        rewards[-1] += reward
    return rewards


def group_advantages(group: GroupView, gamma: float = 1.0, lam: float = 1.0) -> list[torch.Tensor]:
    """:func:`generalised_advantages` of all tokens that a group drew, with the values in its column ``value``. A
    sequence that was cut counts as ended.

    A token that several branches begin with has the mean of what each of them, followed to its own end, gives it.

    Returns:
        Of S sequences: float32[length].
    """
    values = torch.cat(list(group.columns["value"]))
    along = [
        generalised_advantages(token_rewards(reward, given, path.turn_lengths), values[path.tokens], gamma, lam)
        for path, reward, given in zip(paths(group), group.rewards.tolist(), group.turn_rewards, strict=True)
    ]
    return path_means(group, along)


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float = 0.2
) -> TokenLoss:
    """``max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2``: the critic's loss in PPO as OpenAI
    implemented it, and as TRL and verl have it. A value that has already moved by more than ``clip`` is pushed no
    further; one that has gone far past its return comes back.

    Args:
        values: float[N], with gradient.
        old_values: float[N], at the start of the batch.
        returns: float[N], what the values should have been.
        clip: 0 is off.
    """
    error = (values - returns).square()
    if not clip:
        return TokenLoss(0.5 * error, torch.zeros_like(error, dtype=torch.bool))
    clipped = values.clamp(old_values - clip, old_values + clip)
    bound = (clipped - returns).square()
    return TokenLoss(0.5 * torch.maximum(error, bound), (bound > error).detach())


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """``1 - var(R - V) / var(R)``: 1 where the values foresee every difference between returns, 0 where they foresee
    none, or returns do not differ; below 0 they are worse than a constant.

    Args:
        values, returns: float[N].
    """
    spread = returns.double().var(correction=0)
    left = (returns.double() - values.double()).var(correction=0)
    return float(1 - left / spread) if spread > 0 else 0.0


# -- advantages of tokens before a fork: the mean over the branches that begin with them ------------------------------

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
