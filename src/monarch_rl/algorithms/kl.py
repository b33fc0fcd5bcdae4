"""Estimates of the KL divergence from a reference, KL(pi || reference), at each drawn token. Pure functions over tokens
[N].

All three are unbiased or nearly so in value, for tokens drawn from pi (Schulman, "Approximating KL divergence", 2020).
What differs is the gradient, where the estimate is a part of the loss (arXiv:2506.09477): that of ``k1`` is zero in
expectation, whatever the reference; that of ``k2`` is the gradient of KL(pi || reference); that of ``k3`` is the
gradient of KL(reference || pi). Where the estimate is taken from the advantage, that of ``k1`` alone is the gradient
of KL(pi || reference). So ``k1`` belongs in the reward, ``k2`` in the loss, and ``k3``, GRPO's, is always at least 0
and pulls towards all that the reference may say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch

from monarch_rl.algorithms.corrections import LOG_RATIO_BOUND

Estimate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(logprobs float[N] of pi, with gradient; reference log-probs float[N]) -> float[N]``."""


def k1(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``log pi - log reference``."""
    return logprobs - reference


def k2(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``(log pi - log reference)^2 / 2``."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``reference / pi - 1 - log(reference / pi)`` (GRPO, arXiv:2402.03300), its exponent within
    ``LOG_RATIO_BOUND``."""
    log_ratio = reference - logprobs
    return torch.expm1(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - log_ratio


ESTIMATES: dict[str, Estimate] = {"k1": k1, "k2": k2, "k3": k3}
"""By their names in the settings."""

if TYPE_CHECKING:
    EstimateName = str
else:
    EstimateName = Literal[tuple(ESTIMATES)]
"""For settings, whose command line and check read the choices."""
