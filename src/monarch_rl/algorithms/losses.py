"""Policy losses: pure functions of per-token tensors, each of shape [N] over the trainable tokens.

Every loss returns the loss of each token, to be minimised, unreduced; :mod:`monarch_rl.algorithms.aggregation`
gives each token its weight. ``old`` are the log-probs that a ratio ``r = exp(logprobs - old)`` is taken against. The
table of all of them, with what to use when, is docs/algorithms.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from monarch_rl.algorithms.corrections import LOG_RATIO_BOUND, capped_behaviour_weights
from monarch_rl.algorithms.sequences import sequence_means


class TokenLoss(NamedTuple):
    """The loss of each token, and where the rule has taken hold."""

    loss: torch.Tensor
    """float[N], with gradient."""
    limited: torch.Tensor
    """bool[N]: tokens whose ratio is outside the rule's range, and those that it drops, for metrics."""


def ratio_of(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """``exp(logprobs - old_logprobs)``, within ``LOG_RATIO_BOUND``: float[N]."""
    return torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


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
    dual_clip: float = 0.0,
) -> TokenLoss:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; with ``dual_clip`` c, ``-max(that min, c A)`` where A < 0.

    PPO (arXiv:1707.06347) with DAPO's wider upper bound, "clip higher" (arXiv:2503.14476), whose defaults these are.
    Without the dual clip (arXiv:1912.09729, which takes c = 3) nothing bounds the loss where A < 0 and r is large.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs: float[N], of the policy that the ratio is taken against.
        advantages: float[N].
        dual_clip: above 1; 0 is off.
    """
    ratio = ratio_of(logprobs, old_logprobs)
    gain = _clipped_gain(ratio, advantages, clip_low, clip_high)
    if dual_clip:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return TokenLoss(-gain, outside(ratio, 1.0 - clip_low, 1.0 + clip_high))


def cispo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 1.0,
    clip_high: float = 3.0,
) -> TokenLoss:
    """``-stop_grad(clip(r, 1 - clip_low, 1 + clip_high)) A log pi``: the clip bounds a token's weight, and every token
    keeps a gradient (MiniMax-M1, arXiv:2506.13585).

    The defaults are no floor, as there, and a ceiling of 4 (arXiv:2510.13786, which finds 4 to 8 alike).

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
    """
    ratio = ratio_of(logprobs.detach(), old_logprobs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(-weight * advantages * logprobs, outside(ratio, 1.0 - clip_low, 1.0 + clip_high))


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """PPO's clip of the sequence's ratio, the geometric mean of its tokens' (arXiv:2507.18071, whose defaults these
    are: ratios of whole sequences are far nearer to 1 than those of tokens).

    ``s = exp(mean of log r over the sequence)``. Each token's ratio is ``s`` in value, and has the gradient of its own
    log-prob ("GSPO-token" there): with one advantage for a sequence, and equal weights of its tokens, their sum has
    GSPO's gradient.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
        sequences: int64[N], the sequence of each token.
    """
    log_ratio = (logprobs.detach() - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = torch.exp(sequence_means(log_ratio, sequences))
    of_token = ratio * torch.exp(logprobs - logprobs.detach())
    gain = _clipped_gain(of_token, advantages, clip_low, clip_high)
    return TokenLoss(-gain, outside(ratio, 1.0 - clip_low, 1.0 + clip_high))


def sapo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLoss:
    """``-4 / tau sigmoid(tau (r - 1)) A``, tau by the sign of A: a gate that closes gradually as r leaves 1, where its
    slope is that of r (arXiv:2511.20347, whose defaults these are).

    ``limited`` counts tokens of which less than half of the policy gradient is left.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
    """
    ratio = ratio_of(logprobs, old_logprobs)
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_positive), ratio.new_tensor(tau_negative))
    gate = torch.sigmoid(tau * (ratio - 1.0))
    left = (4.0 * gate * (1.0 - gate)).detach()
    return TokenLoss(-4.0 / tau * gate * advantages, left < 0.5)


def dppo_tv(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, max_change: float = 0.2
) -> TokenLoss:
    """``-r A``, but nothing for a token whose probability has already moved by more than ``max_change`` in the
    direction in which A pushes it: DPPO's mask by total variation of the drawn token against the rest
    (arXiv:2602.04879).

    A ratio says little about rare tokens, whose probability may double and stay next to nothing; this bounds what a
    token adds to the distance between the policies.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
        max_change: of the probability, in (0, 1].
    """
    ratio = ratio_of(logprobs, old_logprobs)
    moved = (torch.exp(logprobs) - torch.exp(old_logprobs)).detach() * torch.sign(advantages)
    limited = moved > max_change
    return TokenLoss(torch.where(limited, 0.0, -ratio * advantages), limited)


def decoupled(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    behaviour_cap: float = 5.0,
) -> TokenLoss:
    """PPO's clip around the trainer's policy at the start of the batch, times the weight of the policy that drew:
    ``pi_old / pi_behaviour x clip(pi / pi_old)`` (arXiv:2110.00641; for language models AReaL, arXiv:2505.24298, which
    drops tokens whose behaviour weight is above the cap).

    So the trust region follows the newest policy, however old the tokens are.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs: float[N], the trainer's when the batch was formed.
        behaviour_logprobs: float[N], of the policy that drew each token.
        advantages: float[N].
    """
    clipped = clipped_ratio(logprobs, old_logprobs, advantages, clip_low, clip_high)
    weight = capped_behaviour_weights(old_logprobs, behaviour_logprobs, behaviour_cap)
    return TokenLoss(clipped.loss * weight, clipped.limited | (weight == 0.0))


def _clipped_gain(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """``min(r A, clip(r) A)``: float[N], with gradient."""
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)


def outside(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """bool[N]: ratios outside a range, without gradient."""
    ratio = ratio.detach()
    return (ratio < low) | (ratio > high)
