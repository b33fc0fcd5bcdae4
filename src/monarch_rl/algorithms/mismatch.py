"""The mismatch between engine and trainer log-probs of the same tokens: metrics, and histograms that ranks can add."""

from __future__ import annotations

import torch

from monarch_rl.algorithms.losses import finite_tokens, mismatch_k3

LOWEST, HIGHEST, PER_DECADE = -8, 2, 8
"""First and last decade of absolute differences with bins, and bins per decade: quantiles are exact up to a factor of
1.33."""
BINS = (HIGHEST - LOWEST) * PER_DECADE + 1
"""Number of bins. The first also counts all values below ``10 ** LOWEST``, including 0, and the last all above
``10 ** HIGHEST``."""


def histogram(differences: torch.Tensor) -> torch.Tensor:
    """float32[BINS]: counts of |differences| by size. Histograms of several ranks can be added.

    Args:
        differences: float[N]; non-finite values are ignored.
    """
    differences = differences[differences.isfinite()]
    bins = ((differences.abs().clamp(min=1e-30).log10() - LOWEST) * PER_DECADE).ceil().clamp(0, BINS - 1)
    return torch.bincount(bins.long(), minlength=BINS).float()


def quantile(counts: torch.Tensor, share: float) -> float:
    """The quantile ``share`` of the counted values, as the upper edge of its bin; 0.0 for the lowest bin.

    Args:
        counts: float[BINS], as returned by :func:`histogram`.
        share: in (0, 1]; 1 is the maximum.

    Raises:
        ValueError: nothing was counted.
    """
    total = float(counts.sum())
    if not total:
        raise ValueError("a quantile needs at least one value, and the histogram is empty")
    index = int(torch.searchsorted(counts.cumsum(0), torch.tensor(share * total)))
    return float(10 ** (LOWEST + index / PER_DECADE)) if index else 0.0


def figures(trainer: torch.Tensor, engine: torch.Tensor, low: float, high: float) -> dict[str, float]:
    """Differences between two log-probs of the same tokens, computed in float64.

    Args:
        trainer: float[N], the trainer's log-probs (natural logarithm).
        engine: float[N], log-probs under the distribution that the tokens were sampled from.
        low, high: bounds of the ratio trainer / engine, such as the bounds of an importance cap or a mask.

    Returns:
        ``tokens``: N. ``mean``, exact quantiles ``p50``, ``p90``, ``p99``, ``p99_9``, and ``max`` of
        |trainer - engine|. ``k3``: :func:`monarch_rl.algorithms.losses.mismatch_k3`. ``outside``: share of tokens whose
        ratio is outside the bounds. ``nonfinite``: share of tokens with a non-finite log-prob, which the other metrics
        leave out.

    Raises:
        ValueError: no token has finite log-probs.
    """
    finite = finite_tokens(trainer, engine)
    if not finite.any():
        raise ValueError(f"none of the {len(finite)} tokens has a finite log-prob from both trainer and engine")
    old, behaviour = trainer[finite].double(), engine[finite].double()
    sizes, ratio = (old - behaviour).abs(), torch.exp(old - behaviour)
    shares = torch.tensor([0.5, 0.9, 0.99, 0.999], dtype=torch.float64)
    quantiles = dict(zip(("p50", "p90", "p99", "p99_9"), sizes.cpu().quantile(shares).tolist(), strict=True))
    return {
        "tokens": float(len(finite)),
        "mean": float(sizes.mean()),
        **quantiles,
        "max": float(sizes.max()),
        "k3": float(mismatch_k3(old, behaviour).mean()),
        "outside": float(((ratio < low) | (ratio > high)).double().mean()),
        "nonfinite": float((~finite).double().mean()),
    }
