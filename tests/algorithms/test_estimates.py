"""pass@k against an enumeration, intervals against their definitions and their nominal coverage."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.estimates import Z, bootstrap_interval, pass_at_k, share_interval, wilson_interval


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(6, 8), st.integers(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(correct: list[int], samples: int, k: int) -> None:
    found = pass_at_k(np.asarray(correct), samples, k)
    for value, right in zip(found, correct, strict=True):
        subsets = list(combinations([True] * right + [False] * (samples - right), k))
        assert value == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@given(st.floats(0, 1), st.integers(1, 12), st.integers(1, 12))
def test_pass_at_k_is_unbiased(p: float, samples: int, k: int) -> None:
    """Its expectation over all outcomes of ``samples`` trials is the probability that one of k trials is right."""
    k = min(k, samples)
    outcomes = pass_at_k(np.arange(samples + 1), samples, k)
    weights = [math.comb(samples, c) * p**c * (1 - p) ** (samples - c) for c in range(samples + 1)]
    assert float(np.dot(outcomes, weights)) == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


def test_pass_at_k_of_too_few_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@3 .* 2 episodes"):
        pass_at_k(np.asarray([1]), 2, 3)
    with pytest.raises(ValueError, match="0 and 3 .* 2"):
        pass_at_k(np.asarray([0, 3]), 2, 1)


@given(st.integers(1, 500), st.data())
def test_bounds_of_wilson_are_where_the_score_test_begins_to_reject(count: int, data: st.DataObject) -> None:
    """The interval holds the p that a score test at 5 % does not reject: |share - p| = z sqrt(p (1 - p) / n) at both
    ends."""
    share = data.draw(st.integers(0, count)) / count
    low, high = wilson_interval(share, count)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    for bound in (low, high):
        if 1e-6 < bound < 1 - 1e-6:
            assert abs(share - bound) == pytest.approx(Z * math.sqrt(bound * (1 - bound) / count), abs=1e-9)


def test_intervals_have_about_their_nominal_coverage() -> None:
    """400 evaluations of 50 items: a coverage of 95 %, with a standard deviation of 1.1 %."""
    rng = np.random.default_rng(0)
    right = rng.random((400, 50)) < 0.3
    held = [low <= 0.3 <= high for low, high in (share_interval(items.astype(float)) for items in right)]
    assert abs(np.mean(held) - 0.95) < 0.04
    rates = np.clip(rng.normal(0.4, 0.2, (400, 50)), 0, 1)
    truth = float(np.clip(np.random.default_rng(1).normal(0.4, 0.2, 10**6), 0, 1).mean())
    shares = rng.binomial(4, rates) / 4
    held = [low <= truth <= high for low, high in (bootstrap_interval(items) for items in shares)]
    assert abs(np.mean(held) - 0.95) < 0.05


def test_an_interval_is_deterministic() -> None:
    values = np.asarray([0.0, 0.25, 1.0, 0.5])
    assert bootstrap_interval(values) == bootstrap_interval(values)
    low, high = share_interval(values)
    assert low < values.mean() < high
    assert share_interval(np.asarray([1.0, 0.0])) == wilson_interval(0.5, 2)
