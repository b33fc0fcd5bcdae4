"""The loss of a batch: policy losses, off-policy corrections, KL estimators, and token weights.

All are pure functions of per-token tensors of shape [N], over the trainable tokens. A policy loss returns the unreduced
loss of each token, to be minimised; :func:`token_weights` gives the weight of each token. ``old`` are the log-probs in
the denominator of the ratio ``r = exp(logprobs - old)``. docs/algorithms.md lists all of them, and when to use which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch


class TokenLoss(NamedTuple):
    """The loss of each token, and which tokens are clipped or dropped."""

    loss: torch.Tensor
    """float[N], with gradient."""
    clipped: torch.Tensor
    """bool[N]: tokens whose ratio is outside the clip range, or that the loss drops, for the metric
    ``trainer/clipped``."""


def ratio_of(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """float[N]: ``exp(logprobs - old_logprobs)``, the exponent clamped to ``LOG_RATIO_BOUND``."""
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
    Without the dual clip (arXiv:1912.09729, where c = 3) the loss is unbounded where A < 0 and r is large.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs: float[N], log-probs of the policy in the ratio's denominator.
        advantages: float[N].
        dual_clip: c, above 1; 0 is off.
    """
    ratio = ratio_of(logprobs, old_logprobs)
    gain = _clipped_gain(ratio, advantages, clip_low, clip_high)
    if dual_clip:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return TokenLoss(-gain, _is_clipped(ratio, clip_low, clip_high))


def cispo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 1.0,
    clip_high: float = 3.0,
) -> TokenLoss:
    """``-stop_grad(clip(r, 1 - clip_low, 1 + clip_high)) A log pi``: the clip bounds the weight of a token, which
    always keeps a gradient (MiniMax-M1, arXiv:2506.13585).

    By default there is no floor, as in MiniMax-M1, and a ceiling of 4 (arXiv:2510.13786, which finds 4 to 8 equally
    good).

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
    """
    ratio = ratio_of(logprobs.detach(), old_logprobs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(-weight * advantages * logprobs, _is_clipped(ratio, clip_low, clip_high))


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """PPO's clip applied to the sequence's ratio ``s = exp(mean of log r over the sequence)``, the geometric mean of
    its tokens' ratios (arXiv:2507.18071, the source of the defaults: ratios of sequences are far closer to 1 than
    ratios of tokens).

    Each token's ratio has the value ``s``, and the gradient of its own log-prob ("GSPO-token" in the paper). With one
    advantage per sequence and equal token weights, the sum over tokens has GSPO's gradient.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
        sequences: int64[N], index of each token's sequence.
    """
    log_ratio = (logprobs.detach() - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = torch.exp(sequence_means(log_ratio, sequences))
    token_ratio = ratio * torch.exp(logprobs - logprobs.detach())
    gain = _clipped_gain(token_ratio, advantages, clip_low, clip_high)
    return TokenLoss(-gain, _is_clipped(ratio, clip_low, clip_high))


def sapo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLoss:
    """``-4 / tau sigmoid(tau (r - 1)) A``, with tau by the sign of A: a gate that closes gradually as r moves away from
    1, where it has the slope of r (arXiv:2511.20347, the source of the defaults).

    ``clipped`` marks tokens that keep less than half of the policy gradient.

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
    """``-r A``, and 0 for a token whose probability has already moved by more than ``max_change`` in the direction of
    its advantage: DPPO's mask by the total variation between the sampled token and all others (arXiv:2602.04879).

    A ratio says little about rare tokens, whose probability may double and stay negligible. This mask bounds a token's
    contribution to the distance between the policies.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs, advantages: float[N].
        max_change: largest change of the probability, in (0, 1].
    """
    ratio = ratio_of(logprobs, old_logprobs)
    moved = (torch.exp(logprobs) - torch.exp(old_logprobs)).detach() * torch.sign(advantages)
    dropped = moved > max_change
    return TokenLoss(torch.where(dropped, 0.0, -ratio * advantages), clipped=dropped)


def decoupled(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    behaviour_cap: float = 5.0,
) -> TokenLoss:
    """PPO's clip around the trainer's policy at the start of the batch, times the behaviour weight:
    ``pi_old / pi_behaviour x clip(pi / pi_old)`` (arXiv:2110.00641; for language models AReaL, arXiv:2505.24298, which
    drops tokens whose behaviour weight is above the cap).

    The trust region thus follows the newest policy, however stale the tokens are.

    Args:
        logprobs: float[N], with gradient.
        old_logprobs: float[N], the trainer's log-probs at the start of the batch.
        behaviour_logprobs: float[N], log-probs of the policy that sampled each token.
        advantages: float[N].
    """
    ppo = clipped_ratio(logprobs, old_logprobs, advantages, clip_low, clip_high)
    weight = capped_behaviour_weights(old_logprobs, behaviour_logprobs, behaviour_cap)
    return TokenLoss(ppo.loss * weight, ppo.clipped | (weight == 0.0))


def _clipped_gain(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """float[N], with gradient: ``min(r A, clip(r) A)``."""
    return torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)


def _is_clipped(ratio: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """bool[N]: whether the ratio is outside the clip range."""
    ratio = ratio.detach()
    return (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)


# -- token weights, with which the loss is a plain sum over tokens ----------------------------------------------------
# The normalisers are totals over all ranks and micro-batches, so that the gradient does not depend on how the batch is
# split.

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(
    episode_lengths: torch.Tensor,
    aggregation: Aggregation,
    *,
    batch_tokens: int,
    batch_episodes: int,
    normaliser_tokens: int,
) -> torch.Tensor:
    """The weight of every trainable token of an episode.

    - ``token_mean``: 1 / tokens of the batch (DAPO, arXiv:2503.14476).
    - ``sequence_mean``: 1 / (tokens of the episode x episodes of the batch) (GRPO, arXiv:2402.03300).
    - ``constant``: 1 / (normaliser_tokens x episodes of the batch), without the bias towards short right and long wrong
      answers (Dr.GRPO, arXiv:2503.20783).

    Args:
        episode_lengths: int[E], trainable tokens of each episode.
        batch_tokens: trainable tokens of the whole batch.
        batch_episodes: episodes of the whole batch.
        normaliser_tokens: tokens per episode in the normaliser of ``constant``, the same in all batches.

    Returns:
        float[E].

    Raises:
        ValueError: the aggregation is unknown.
    """
    lengths = episode_lengths.to(torch.float32)
    match aggregation:
        case "token_mean":
            return torch.full_like(lengths, 1.0 / max(batch_tokens, 1))
        case "sequence_mean":
            return 1.0 / (lengths.clamp(min=1) * max(batch_episodes, 1))
        case "constant":
            return torch.full_like(lengths, 1.0 / (normaliser_tokens * max(batch_episodes, 1)))
    raise ValueError(f"unknown aggregation {aggregation!r}: give token_mean, sequence_mean or constant")


# -- off-policy corrections: weights of tokens that another policy sampled --------------------------------------------
# rho = pi_old (trainer) / pi_behaviour (engine), per token: it differs from 1 for tokens sampled under older weights
# and, slightly, because engine and trainer compute differently.

LOG_RATIO_BOUND = 20.0
"""Bound of |log ratio|, beyond which a ratio is constant and has no gradient. In float32 exp overflows at 88, and
infinity times an advantage of 0 is NaN."""


def truncated_importance_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float = 2.0
) -> torch.Tensor:
    """``min(rho, cap)``, without gradient (IMPALA, arXiv:1802.01561; "TIS", Yao et al., 2025).

    Args:
        old_logprobs: float[N], the trainer's log-probs at the start of the batch.
        behaviour_logprobs: float[N], the engine's log-probs when it sampled the tokens.
        cap: the largest weight. A larger cap gives less bias and more variance.
    """
    return torch.exp(old_logprobs.detach() - behaviour_logprobs).clamp(max=cap)


def icepop_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, low: float = 0.5, high: float = 2.0
) -> torch.Tensor:
    """rho where it is in [low, high], else 0, without gradient: tokens on which engine and trainer disagree too much in
    either direction are dropped instead of capped (IcePop, arXiv:2510.18855, which uses 0.5 and 5).

    Args:
        old_logprobs, behaviour_logprobs: float[N], as in :func:`truncated_importance_weights`.
    """
    rho = torch.exp(old_logprobs.detach() - behaviour_logprobs)
    return torch.where((rho >= low) & (rho <= high), rho, 0.0)


def capped_behaviour_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float = 5.0
) -> torch.Tensor:
    """rho where it is at most ``cap``, else 0, without gradient: the behaviour weight of the decoupled objective
    (AReaL, arXiv:2505.24298).

    Args:
        old_logprobs, behaviour_logprobs: float[N], as in :func:`truncated_importance_weights`.
    """
    return icepop_weights(old_logprobs, behaviour_logprobs, 0.0, cap)


def sequence_mask(
    old_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    sequences: torch.Tensor,
    low: float = 0.99,
    high: float = 1.01,
) -> torch.Tensor:
    """float[N]: 1 for tokens of sequences whose geometric mean of rho over their tokens is in [low, high], else 0.

    One bad token can affect all that follow it, so the whole sequence is dropped (Liu et al., "When Speed Kills
    Stability", 2025). The mean makes the bounds independent of the length.

    Args:
        old_logprobs, behaviour_logprobs: float[N].
        sequences: int64[N], index of each token's sequence.
    """
    rho = torch.exp(sequence_means(old_logprobs.detach() - behaviour_logprobs, sequences))
    return ((rho >= low) & (rho <= high)).to(old_logprobs.dtype)


def off_policy_sequence_mask(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    max_kl: float = 1e-4,
) -> torch.Tensor:
    """float[N]: 0 for tokens of negative advantage in sequences that the policy has moved away from, else 1.

    The distance is the mean of ``log(pi_behaviour / pi)`` over the sequence's tokens, which are dropped if it is above
    ``max_kl``. A model learns from its own mistakes, but another policy's mistakes only push it away (DeepSeek-V3.2,
    arXiv:2512.02556; 1e-4 is slime's default).

    Args:
        logprobs: float[N], log-probs under the policy being updated.
        behaviour_logprobs, advantages: float[N].
        sequences: int64[N].
    """
    distance = sequence_means(behaviour_logprobs - logprobs.detach(), sequences)
    return ((advantages >= 0) | (distance <= max_kl)).to(logprobs.dtype)


def finite_tokens(*logprobs: torch.Tensor) -> torch.Tensor:
    """bool[N]: whether all values of a token are finite. Other tokens must be masked and counted."""
    finite = torch.ones_like(logprobs[0], dtype=torch.bool)
    for values in logprobs:
        finite &= torch.isfinite(values)
    return finite


def mismatch_k3(old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> torch.Tensor:
    """float[N]: the k3 estimate of KL(behaviour || old) at each token, ``rho - 1 - log rho`` (Schulman, 2020), the
    exponent clamped to ``LOG_RATIO_BOUND``.

    Its mean over tokens sampled from the trainer's current version measures the mismatch between engine and trainer.
    """
    log_ratio = old_logprobs.detach() - behaviour_logprobs
    return torch.expm1(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - log_ratio


def lag_discount(lags: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor ** lag``: stale tokens count less.

    A heuristic: asynchronous SGD gains from steps that shrink with staleness (arXiv:1511.05950 divides by it), but that
    work considers neither single tokens nor language models. Unlike an importance weight it needs no log-probs, and it
    is biased: the update shrinks with the lag of its tokens.

    Args:
        lags: int[N], the version being updated minus the version that sampled each token.
        factor: 1 is off; 0 trains only tokens of lag 0.

    Returns:
        float32[N].
    """
    return torch.pow(torch.tensor(factor, dtype=torch.float32, device=lags.device), lags)


# -- the inputs of policy losses and corrections, which ``objectives.py`` passes on -----------------------------------


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Log-probs of N tokens under the policies that a loss compares, and further inputs of the rules."""

    new: torch.Tensor
    """float32[N], with gradient: log-probs under the policy being updated."""
    old: torch.Tensor
    """float32[N]: under the trainer's policy at the start of the batch; equal to ``new`` with one update per batch."""
    behaviour: torch.Tensor
    """float32[N]: under the policy that sampled each token."""
    advantages: torch.Tensor
    """float32[N]."""
    sequences: torch.Tensor
    """int64[N]: index of each token's sequence."""


# -- estimators of the KL divergence from a reference, KL(pi || reference), at each sampled token ---------------------
# Pure functions over tokens [N].
#
# The values of all three are unbiased or nearly so, for tokens sampled from pi (Schulman, "Approximating KL
# divergence", 2020). Their gradients differ if the estimate is part of the loss (arXiv:2506.09477): for ``k1`` it is
# zero in expectation, whatever the reference; for ``k2`` it is the gradient of KL(pi || reference); for ``k3`` it is
# the gradient of KL(reference || pi). If the estimate is subtracted from the advantage, only ``k1`` gives the gradient
# of KL(pi || reference). So use ``k1`` in the reward and ``k2`` in the loss. ``k3``, GRPO's, is never negative, and is
# mode-covering: it pulls towards everything that the reference might generate.

Estimate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(logprobs float[N] of pi, with gradient; reference log-probs float[N]) -> float[N]``."""


def k1(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``log pi - log reference``."""
    return logprobs - reference


def k2(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``(log pi - log reference)^2 / 2``."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``reference / pi - 1 - log(reference / pi)`` (GRPO, arXiv:2402.03300), the exponent clamped to
    ``LOG_RATIO_BOUND``."""
    log_ratio = reference - logprobs
    return torch.expm1(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - log_ratio


ESTIMATES: dict[str, Estimate] = {"k1": k1, "k2": k2, "k3": k3}
"""KL estimators by their names in the settings."""

if TYPE_CHECKING:
    EstimateName = str
else:
    EstimateName = Literal[tuple(ESTIMATES)]
"""Types for settings, whose command line and checks read the choices."""


# -- sums and means over the tokens of each sequence ------------------------------------------------------------------


def sequence_means(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """For each token, the mean of ``values`` over its sequence.

    Args:
        values: float[N].
        sequences: int64[N], index of each token's sequence, from 0 on, in any order.

    Returns:
        float[N].
    """
    counts = torch.bincount(sequences)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, sequences, values)
    return (sums / counts.clamp(min=1))[sequences]


def whole_sequences(tokens: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """bool[N]: whether all tokens of a token's sequence are in ``tokens``, bool[N]."""
    return sequence_means((~tokens).float(), sequences) == 0
