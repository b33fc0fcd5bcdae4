"""Reduction of a series: what sticks out is kept."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.report.reduce import reduce

VALUES = st.lists(st.floats(allow_infinity=False), max_size=200)


@given(VALUES, st.integers(1, 50))
def test_extremes_are_kept(values: list[float], points: int) -> None:
    reduced = reduce(values, points)
    assert len(reduced.mean) == len(reduced.at) == min(len(values), points)
    assert (np.diff(reduced.at) > 0).all()
    there = [value for value in values if not math.isnan(value)]
    if there:
        assert np.nanmin(reduced.low) == min(there) and np.nanmax(reduced.high) == max(there)
    empty = np.isnan(reduced.mean)
    assert (np.isnan(reduced.low) == empty).all() and (np.isnan(reduced.high) == empty).all()
    assert (reduced.low[~empty] <= reduced.mean[~empty]).all() and (reduced.mean[~empty] <= reduced.high[~empty]).all()


@given(st.integers(1, 7), st.integers(1, 7))
def test_a_bucket_has_the_mean_of_its_values(size: int, points: int) -> None:
    values = np.arange(size * points, dtype=float)
    expected = values if size == 1 else values.reshape(points, size).mean(axis=1)
    assert np.allclose(reduce(values, points).mean, expected)


def test_a_missing_value_counts_neither_as_0_nor_as_a_bucket_without_values() -> None:
    reduced = reduce([4.0, math.nan, math.inf, math.nan], 2)
    assert reduced.mean[0] == reduced.low[0] == reduced.high[0] == 4.0 and math.isnan(reduced.mean[1])
