"""How far apart engine and trainer are on the same tokens: metrics of all tokens, and a histogram that ranks add up."""

from __future__ import annotations

import torch

from monarch_rl.algorithms.losses import finite_tokens, mismatch_k3

LOWEST, HIGHEST, PER_DECADE = -8, 2, 8
"""Decades of absolute differences that have bins, and bins of each decade: a quantile is right within a factor of
1.33."""
BINS = (HIGHEST - LOWEST) * PER_DECADE + 1
"""The first bin also counts all below ``10 ** LOWEST``, 0 included, and the last all above ``10 ** HIGHEST``."""


def histogram(differences: torch.Tensor) -> torch.Tensor:
    """Counts of |differences| by size, float32[BINS]: those of several ranks can be added up.

    Args:
        differences: float[N]; those that are not finite are left out.
    """
    differences = differences[differences.isfinite()]
    bins = ((differences.abs().clamp(min=1e-30).log10() - LOWEST) * PER_DECADE).ceil().clamp(0, BINS - 1)
    return torch.bincount(bins.long(), minlength=BINS).float()


def quantile(counts: torch.Tensor, share: float) -> float:
    """The upper edge of the bin up to which ``share`` of the counts lies; 0.0 for the lowest bin.

    Args:
        counts: float[BINS], of :func:`histogram`.
        share: above 0; 1 is the largest.

    Raises ValueError if nothing was counted.
    """
    total = float(counts.sum())
    if not total:
        raise ValueError("there is no quantile of nothing")
    index = int(torch.searchsorted(counts.cumsum(0), torch.tensor(share * total)))
    return float(10 ** (LOWEST + index / PER_DECADE)) if index else 0.0


def figures(trainer: torch.Tensor, engine: torch.Tensor, low: float, high: float) -> dict[str, float]:
    """How far apart two log-probs of the same tokens are, computed in float64.

    Args:
        trainer: float[N], natural log.
        engine: float[N], of the distribution that drew the tokens.
        low, high: bounds of the ratio trainer / engine, such as those of an importance cap or a mask.

    Returns:
        Of |trainer - engine|: ``mean``, exact quantiles ``p50``, ``p90``, ``p99``, ``p99_9``, and ``max``; ``k3``
        (:func:`monarch_rl.algorithms.losses.mismatch_k3`); ``outside``, the share of tokens whose ratio lies
        outside the bounds; and ``nonfinite``, the share of tokens that all other figures leave out because one of their
        log-probs is not finite. ``tokens`` is N.

    Raises:
        ValueError: no token has finite log-probs.
    """
    finite = finite_tokens(trainer, engine)
    if not finite.any():
        raise ValueError(f"none of {len(finite)} tokens has finite log-probs on both sides")
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
