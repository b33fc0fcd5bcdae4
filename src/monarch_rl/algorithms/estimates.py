"""What a sample of episodes says about a policy: pass@k, and how far an estimate may be off."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959964
"""Standard deviations to either side of a normal distribution's mean that hold 95 %."""
RESAMPLES = 1000
"""Of a bootstrap."""


def pass_at_k(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
    """For each item the probability that at least one of k episodes is right: unbiased, from n >= k episodes of which
    c are right, ``1 - C(n - c, k) / C(n, k)`` (Chen et al., arXiv:2107.03374).

    Args:
        correct: int[items], right episodes c of each item.
        samples: episodes n of each item.

    Returns:
        float64[items].

    Raises:
        ValueError: k is not 1 to n, or an item has more right episodes than n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {samples} episodes of an item: play at least {k}")
    if len(correct) and not 0 <= int(correct.min()) <= int(correct.max()) <= samples:
        raise ValueError(f"an item has between {correct.min()} and {correct.max()} right episodes of {samples}")
    # The quotient of the binomials as a product of k factors, each at most 1.
    wrong = samples - correct.astype(np.float64)
    factors = [np.clip((wrong - i) / (samples - i), 0.0, 1.0) for i in range(k)]
    return np.asarray(1.0 - np.prod(factors, axis=0), np.float64)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a probability of which ``share`` was seen in ``count`` independent trials (Wilson, 1927)."""
    if count < 1:
        return 0.0, 1.0
    centre = share + Z * Z / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def bootstrap_interval(values: np.ndarray, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % interval of the mean of ``values``, float[items]: percentiles over samples of items with replacement (Efron,
    1979). Episodes of one item are not independent, so items are drawn, not episodes."""
    if not len(values):
        return math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def share_interval(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of shares, float[items] in [0, 1]: Wilson's where each is 0 or 1, else a bootstrap."""
    if np.isin(values, (0.0, 1.0)).all():
        return wilson_interval(float(values.mean()) if len(values) else 0.0, len(values))
    return bootstrap_interval(values)


def default_ks(samples: int, asked: Sequence[int] = ()) -> tuple[int, ...]:
    """The k of which pass@k is estimated beside 1: those asked for, or else the number of episodes of an item."""
    return tuple(sorted({k for k in (asked or (samples,)) if k > 1}))
