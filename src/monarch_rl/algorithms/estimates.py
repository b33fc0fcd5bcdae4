"""Estimates from evaluation episodes: pass@k and confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959964
"""95 % of a normal distribution is within this many standard deviations of its mean."""
RESAMPLES = 1000
"""Resamples of a bootstrap."""


def pass_at_k(correct: np.ndarray, samples: int | np.ndarray, k: int) -> np.ndarray:
    """Unbiased estimate, for each item, of the probability that at least one of k episodes is right:
    ``1 - C(n - c, k) / C(n, k)`` for n >= k episodes, c of which are right (Chen et al., arXiv:2107.03374).

    Args:
        correct: int[items], the number c of right episodes of each item.
        samples: the number n of episodes of each item, or int[items].

    Returns:
        float64[items].

    Raises:
        ValueError: k is not in 1 to n, or an item has more than n right episodes.
    """
    if k < 1 or np.any(k > np.asarray(samples)):
        raise ValueError(f"pass@{k} cannot be estimated from {samples} episodes per item: run at least {k} per item")
    if np.any(correct < 0) or np.any(correct > samples):
        raise ValueError(f"items have between {correct.min()} and {correct.max()} right episodes, out of {samples}")
    # The quotient of the binomial coefficients is a product of k factors, each at most 1.
    wrong = samples - correct.astype(np.float64)
    factors = [np.clip((wrong - i) / (samples - i), 0.0, 1.0) for i in range(k)]
    return np.asarray(1.0 - np.prod(factors, axis=0), np.float64)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95 % confidence interval of a probability, given the observed ``share`` of ``count`` independent trials (Wilson,
    1927)."""
    if count < 1:
        return 0.0, 1.0
    centre = share + Z * Z / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def bootstrap_interval(values: np.ndarray, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % confidence interval of the mean of ``values``, float[items]: percentiles over resamples of items with
    replacement (Efron, 1979)."""
    # Items are resampled, not episodes, because episodes of an item are not independent.
    if not len(values):
        return math.nan, math.nan
    resampled = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(values[resampled].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def share_interval(values: np.ndarray) -> tuple[float, float]:
    """95 % confidence interval of the mean of float[items] in [0, 1]: Wilson's if all are 0 or 1, else a bootstrap."""
    if np.isin(values, (0.0, 1.0)).all():
        return wilson_interval(float(values.mean()) if len(values) else 0.0, len(values))
    return bootstrap_interval(values)


def default_ks(samples: int, asked: Sequence[int] = ()) -> tuple[int, ...]:
    """The values of k above 1 to estimate pass@k for: those in ``asked``, by default the number of episodes per
    item."""
    return tuple(sorted({k for k in (asked or (samples,)) if k > 1}))
