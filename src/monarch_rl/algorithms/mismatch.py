"""How far apart engine and trainer are on the same tokens: a histogram that ranks can add up. Pure functions."""

from __future__ import annotations

import torch

LOWEST, HIGHEST, PER_DECADE = -8, 2, 8
"""Decades of absolute differences that have bins, and bins of each: a quantile is right within a factor of 1.33."""
BINS = (HIGHEST - LOWEST) * PER_DECADE + 1
"""The first has everything below ``10 ** LOWEST``, 0 included, the last what is above ``10 ** HIGHEST``, too."""


def histogram(differences: torch.Tensor) -> torch.Tensor:
    """Counts of |differences| by size, float32[BINS]: those of several ranks are added up.

    Args:
        differences: float[N], finite.
    """
    places = ((differences.abs().clamp(min=1e-30).log10() - LOWEST) * PER_DECADE).ceil().clamp(0, BINS - 1)
    return torch.bincount(places.long(), minlength=BINS).float()


def quantile(counts: torch.Tensor, share: float) -> float:
    """The upper edge of the bin up to which ``share`` of what was counted lies; 0.0 for the lowest bin.

    Args:
        counts: float[BINS], of :func:`histogram`.
        share: above 0; 1 is the largest.

    Raises ValueError if nothing was counted.
    """
    total = float(counts.sum())
    if not total:
        raise ValueError("there is no quantile of nothing")
    place = int(torch.searchsorted(counts.cumsum(0), torch.tensor(share * total)))
    return float(10 ** (LOWEST + place / PER_DECADE)) if place else 0.0
