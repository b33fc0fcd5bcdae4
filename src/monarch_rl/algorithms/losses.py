"""Policy losses: pure functions of per-token tensors, each of shape [N] over the trainable tokens.

Every loss returns the loss of each token, to be minimised, unreduced; :mod:`monarch_rl.algorithms.aggregation`
gives each token its weight.
"""

from __future__ import annotations

import torch


def policy_gradient(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """``-A log pi`` (Williams, 1992).

    Args:
        logprobs: float[N], with gradient.
        advantages: float[N].
    """
    return -advantages * logprobs


def clipped_ratio(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> torch.Tensor:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprobs - old_logprobs)``.

    PPO (arXiv:1707.06347) with DAPO's wider upper bound, "clip higher" (arXiv:2503.14476), whose defaults
    these are.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs: float[N], of the policy that the ratio is taken against.
        advantages: float[N].
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clip_fraction(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, clip_low: float = 0.2, clip_high: float = 0.28
) -> torch.Tensor:
    """Which tokens have a ratio outside the clip range: bool[N], for metrics."""
    ratio = torch.exp(logprobs.detach() - old_logprobs)
    return (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)
