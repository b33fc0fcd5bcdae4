"""Returns, values and advantages per token: GAE, the critic's loss, and tokens that branches share. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.losses import TokenLoss


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float = 1.0, lam: float = 1.0, last_value: float = 0.0
) -> torch.Tensor:
    """float[n]: ``A_t = sum over k of (gamma lam)^k delta_(t + k)`` with ``delta_t = r_t + gamma V_(t + 1) - V_t``
    (GAE, arXiv:1506.02438). ``A + V`` is the critic's target.

    Args:
        rewards: float[n], the reward after each sampled token.
        values: float[n], the critic's value before each token.
        gamma, lam: 1 and 1 are verl's defaults, with which ``A_t`` is the return minus ``V_t``. A smaller lam trusts
            the critic more; TRL has 0.95.
        last_value: the critic's value after the last token; 0 if the episode ended.
    """
    # Summed by doubling: log2(n) operations on the whole sequence.
    following = torch.cat([values[1:], values.new_full((min(len(values), 1),), last_value)])
    total = rewards + gamma * following - values
    decay, shift = gamma * lam, 1
    while shift < len(total):
        total = torch.cat([total[:-shift] + decay**shift * total[shift:], total[-shift:]])
        shift *= 2
    return total


def token_rewards(reward: float, turn_rewards: torch.Tensor, turn_lengths: torch.Tensor) -> torch.Tensor:
    """Places each turn's reward at its last sampled token, and the episode's at the last token of all.

    Args:
        reward: reward of the episode.
        turn_rewards: float32[turns].
        turn_lengths: int32[turns], sampled tokens of each turn.

    Returns:
        float32[n], n the sum of ``turn_lengths``. The reward of a turn without sampled tokens is placed at the token
        before it.
    """
    ends = turn_lengths.long().cumsum(0)
    rewards = torch.zeros(int(ends[-1]) if len(ends) else 0)
    if len(rewards):
        rewards.index_add_(0, (ends - 1).clamp(min=0), turn_rewards)
        rewards[-1] += reward
    return rewards


def group_advantages(group: GroupView, gamma: float = 1.0, lam: float = 1.0) -> list[torch.Tensor]:
    """:func:`generalised_advantages` of all sampled tokens of a group, with the values in its column ``value``.
    Truncated sequences count as ended.

    A token that several branches share gets the mean of its advantages along each branch.

    Returns:
        float32[length] for each of S sequences.
    """
    values = torch.cat(list(group.columns["value"]))
    along = [
        generalised_advantages(token_rewards(reward, turn_rewards, path.turn_lengths), values[path.tokens], gamma, lam)
        for path, reward, turn_rewards in zip(paths(group), group.rewards.tolist(), group.turn_rewards, strict=True)
    ]
    return path_means(group, along)


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float = 0.2
) -> TokenLoss:
    """``max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2``: the critic's loss in OpenAI's implementation
    of PPO, in TRL and in verl. A value that has moved by more than ``clip`` towards its return gets no gradient; one
    that has overshot it far enough is pulled back.

    Args:
        values: float[N], with gradient.
        old_values: float[N], values at the start of the batch.
        returns: float[N], targets of the values.
        clip: largest change of a value; 0 is off.
    """
    error = (values - returns).square()
    if not clip:
        return TokenLoss(0.5 * error, torch.zeros_like(error, dtype=torch.bool))
    clipped = values.clamp(old_values - clip, old_values + clip)
    bound = (clipped - returns).square()
    return TokenLoss(0.5 * torch.maximum(error, bound), (bound > error).detach())


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """``1 - var(R - V) / var(R)``: 1 if the values predict all differences between returns, 0 if they predict none or
    the returns are equal, negative if they are worse than a constant.

    Args:
        values, returns: float[N].
    """
    total = returns.double().var(correction=0)
    residual = (returns.double() - values.double()).var(correction=0)
    return float(1 - residual / total) if total > 0 else 0.0


# -- advantages of tokens before a fork: the mean over the branches that share them -----------------------------------

Forks = Sequence[tuple[int, int] | None]
"""For each sequence of a rollout: ``(index of an earlier sequence, n)`` if it shares that one's first n turns, else
None.
"""


def branch_means(values: torch.Tensor, forks: Forks, turns: Sequence[int]) -> list[torch.Tensor]:
    """The value of each turn of a rollout's sequences, given one value per sequence.

    A token that m sequences share was sampled once, and is trained once, with the mean of their m values: this gives
    1 / m of the gradient that the m sequences together would give it.

    Args:
        values: float[S], value of each sequence.
        forks: forks of the sequences.
        turns: number of turns of each sequence.

    Returns:
        float[turns] for each sequence: the mean of the values of all sequences that have the turn. Meaningless for
        turns that the sequence shares with an earlier one, where they are trained.
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
    """All sampled tokens of one sequence, including those before its fork."""

    tokens: torch.Tensor
    """int64[n]: indices into the sampled tokens of the group, concatenated in the order of its sequences."""
    turn_lengths: torch.Tensor
    """int32[turns]: sampled tokens of each turn; their sum is n."""


def paths(group: GroupView) -> list[Path]:
    """The path of each sequence of a group: the tokens of the turns that it shares, then its own."""
    own = torch.arange(int(group.lengths.sum())).split(group.lengths.tolist())
    found: list[Path] = []
    for tokens, lengths, fork, rollout in zip(own, group.turn_lengths, group.forks, group.rollouts, strict=True):
        if fork is not None:
            origin = found[int((group.rollouts == rollout).nonzero()[fork[0]])]
            shared = origin.turn_lengths[: fork[1]]
            tokens = torch.cat([origin.tokens[: int(shared.sum())], tokens])
            lengths = torch.cat([shared, lengths[fork[1] :]])
        found.append(Path(tokens, lengths))
    return found


def path_means(group: GroupView, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Values of the sampled tokens of a group, from values along each path. A token that several branches share gets
    the mean of its values.

    Args:
        values: float[n] for each of :func:`paths`.

    Returns:
        float[length] for each of S sequences.
    """
    size = int(group.lengths.sum())
    # In float64, so that the mean of equal values is exactly that value.
    total, branches = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for path, of_path in zip(paths(group), values, strict=True):
        total.index_add_(0, path.tokens, of_path.double())
        branches[path.tokens] += 1
    return list((total / branches).to(values[0].dtype).split(group.lengths.tolist()))
