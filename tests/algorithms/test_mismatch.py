"""Quantiles of differences from the summed histograms of ranks, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.mismatch import HIGHEST, LOWEST, PER_DECADE, histogram, quantile


@given(
    ranks=st.lists(st.lists(st.floats(-10.0, 10.0, width=32), max_size=20), min_size=1, max_size=4),
    share=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_quantiles_of_summed_histograms_are_exact_within_a_bin(ranks: list[list[float]], share: float) -> None:
    values = np.abs(np.concatenate([np.asarray(part, np.float64) for part in ranks]))
    if not len(values):
        return
    counts = torch.stack([histogram(torch.tensor(part, dtype=torch.float64)) for part in ranks]).sum(0)
    assert counts.sum() == len(values)
    found, exact = quantile(counts, share), float(np.quantile(values, share, method="inverted_cdf"))
    if exact <= 10.0**LOWEST:
        assert found == 0.0
    else:
        assert exact <= found * (1 + 1e-6) and found <= exact * 10 ** (1 / PER_DECADE) * (1 + 1e-6)


def test_values_above_the_highest_bin_are_counted_in_it() -> None:
    assert quantile(histogram(torch.tensor([10.0 ** (HIGHEST + 3)])), 1.0) == pytest.approx(10.0**HIGHEST)
    assert histogram(torch.tensor([float("nan"), float("inf"), 1.0])).sum() == 1
    with pytest.raises(ValueError):
        quantile(histogram(torch.zeros(0)), 0.5)
