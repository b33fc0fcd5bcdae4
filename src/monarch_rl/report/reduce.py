"""Reduces a series to a number of points that a screen can show, without losing what sticks out."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

POINTS = 2_000
"""Maximum number of points of a series."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A series in buckets of equally many values.

    Values are NaN for a bucket that has none but NaN. ``low`` and ``high`` are ``mean`` itself if each bucket has one
    value.
    """

    at: np.ndarray
    """(buckets,) int64: index of the value in the middle of each bucket."""
    mean: np.ndarray
    """(buckets,) float64, as ``low`` and ``high``."""
    low: np.ndarray
    high: np.ndarray


def reduce(values: Sequence[float] | array[float] | np.ndarray, points: int = POINTS) -> Reduced:
    """Minimum, maximum and mean of at most ``points`` buckets, in one pass.

    Args:
        values: (n,) float, with NaN for missing ones. Infinities count as missing.
        points: maximum number of buckets, at least 1.
    """
    series = np.asarray(values, dtype=np.float64)
    series = np.where(np.isfinite(series), series, math.nan)
    if len(series) <= points:
        return Reduced(np.arange(len(series)), series, series, series)
    starts = np.arange(points) * len(series) // points
    ends = np.append(starts[1:], len(series))
    there = ~np.isnan(series)
    count = np.add.reduceat(there, starts, dtype=np.int64)
    # Divided before they are added, so that no sum overflows.
    width = (ends - starts).astype(np.float64)
    shares = np.add.reduceat(np.where(there, series, 0.0) / np.repeat(width, ends - starts), starts)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = shares * (width / count)
    low, high = np.fmin.reduceat(series, starts), np.fmax.reduceat(series, starts)
    mean = np.where(count > 0, np.clip(mean, low, high), math.nan)  # rounding moves it out of a constant bucket
    return Reduced((starts + ends - 1) // 2, mean, low, high)
