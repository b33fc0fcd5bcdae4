"""Returns and values of tokens: what was given after them, and what a critic thought that it would be. Pure
functions."""

from __future__ import annotations

import torch

from monarch_rl.algorithms.branch_means import path_means, paths
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
