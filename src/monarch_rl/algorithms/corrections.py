"""Off-policy corrections: weights for tokens that another policy drew. Pure functions over tokens [N].

rho = pi_old (trainer) / pi_behaviour (engine), per token: it differs from 1 where the token was drawn under
older weights and, slightly, where engine and trainer compute differently.
"""

from __future__ import annotations

import torch

from monarch_rl.algorithms.sequences import sequence_means

LOG_RATIO_BOUND = 20.0
"""Beyond ``exp(20)``, either way, a ratio is that and has no gradient: in float32 it would become infinite at 88, and
infinity times an advantage of 0 is NaN."""


def truncated_importance_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float = 2.0
) -> torch.Tensor:
    """``min(rho, cap)``, without gradient (IMPALA, arXiv:1802.01561; "TIS", Yao et al., 2025).

    Args:
        old_logprobs: float[N], the trainer's, when the batch was formed.
        behaviour_logprobs: float[N], the engine's, when the token was drawn.
        cap: the largest weight; larger lowers the bias and raises the variance.
    """
    return torch.exp(old_logprobs.detach() - behaviour_logprobs).clamp(max=cap)


def icepop_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, low: float = 0.5, high: float = 2.0
) -> torch.Tensor:
    """rho where it is in [low, high], and 0 elsewhere, without gradient: tokens on which engine and trainer disagree
    too much, either way, are dropped, not capped (IcePop, arXiv:2510.18855, which takes 0.5 and 5).

    Args:
        old_logprobs, behaviour_logprobs: float[N], as in :func:`truncated_importance_weights`.
    """
    rho = torch.exp(old_logprobs.detach() - behaviour_logprobs)
    return torch.where((rho >= low) & (rho <= high), rho, 0.0)


def capped_behaviour_weights(
    old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float = 5.0
) -> torch.Tensor:
    """rho, and 0 where it is above ``cap``, without gradient: the behaviour weight of the decoupled objective (AReaL,
    arXiv:2505.24298).

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
    """1 for tokens of sequences whose rho, the geometric mean over its tokens, is in [low, high], else 0: float[N].

    One token that went wrong can spoil all that follow it, so the whole sequence goes (Liu et al., "When Speed Kills
    Stability", 2025). The mean makes the bounds independent of the length.

    Args:
        old_logprobs, behaviour_logprobs: float[N].
        sequences: int64[N], the sequence of each token.
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
    """0 for tokens of negative advantage in sequences that the policy has moved away from, else 1: float[N].

    A sequence's estimate is the mean of ``log(pi_behaviour / pi)`` over its tokens; above ``max_kl`` it is dropped. A
    model learns from its own mistakes, but from those of another it is only pushed away (DeepSeek-V3.2,
    arXiv:2512.02556; 1e-4 is slime's default).

    Args:
        logprobs: float[N], of the policy being updated.
        behaviour_logprobs, advantages: float[N].
        sequences: int64[N].
    """
    distance = sequence_means(behaviour_logprobs - logprobs.detach(), sequences)
    return ((advantages >= 0) | (distance <= max_kl)).to(logprobs.dtype)


def finite_tokens(*logprobs: torch.Tensor) -> torch.Tensor:
    """bool[N]: tokens whose log-probs are all finite. The others must be masked, and counted."""
    finite = torch.ones_like(logprobs[0], dtype=torch.bool)
    for values in logprobs:
        finite &= torch.isfinite(values)
    return finite


def mismatch_k3(old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(behaviour || old) at each token: ``rho - 1 - log rho`` (Schulman, 2020), its exponent
    within ``LOG_RATIO_BOUND``.

    Its mean over tokens drawn under the trainer's own version is the mismatch of engine and trainer.
    """
    log_ratio = old_logprobs.detach() - behaviour_logprobs
    return torch.expm1(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - log_ratio


def lag_discount(lags: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor ** lag``: stale tokens count less.

    A heuristic: asynchronous SGD gains from steps that shrink with staleness (arXiv:1511.05950 divides by it), but that
    work is not about single tokens, nor about language models. Unlike the importance weight it needs no log-prob, and
    it is biased: it shrinks the update by the lag of its tokens.

    Args:
        lags: int[N], the version being updated minus the one that drew each token.
        factor: 1 is off, 0 trains tokens of lag 0 only.

    Returns:
        float32[N].
    """
    return torch.pow(torch.tensor(factor, dtype=torch.float32, device=lags.device), lags)
