"""Off-policy corrections: weights for tokens that another policy drew. Pure functions over tokens [N].

rho = pi_old (trainer) / pi_behaviour (engine), per token: it differs from 1 where the token was drawn under
older weights and, slightly, where engine and trainer compute differently.
"""

from __future__ import annotations

import torch


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


def finite_tokens(*logprobs: torch.Tensor) -> torch.Tensor:
    """bool[N]: tokens whose log-probs are all finite. The others must be masked, and counted."""
    finite = torch.ones_like(logprobs[0], dtype=torch.bool)
    for values in logprobs:
        finite &= torch.isfinite(values)
    return finite


def mismatch_k3(old_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(behaviour || old) at each token: ``rho - 1 - log rho`` (Schulman, 2020).

    Its mean over tokens drawn under the trainer's own version is the mismatch of engine and trainer.
    """
    log_ratio = old_logprobs.detach() - behaviour_logprobs
    return torch.expm1(log_ratio) - log_ratio


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
