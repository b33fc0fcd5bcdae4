"""Slow groups are not lost: the lengths that are trained are distributed as the lengths that were generated.

A group takes time in proportion to its length, lengths are long-tailed (Pareto), and the buffer's core runs in virtual
time. Two tests of the same null hypothesis, "a group's length does not decide whether it is trained":

- Exact: of a fixed window of admissions, every group is trained. Nothing is estimated.
- Statistical, as one would test a run: two-sample Kolmogorov-Smirnov between the lengths of the first N groups trained
  and N freshly sampled lengths, at level ALPHA. Under the default the trained groups are the first N admitted, except
  for at most the window and a batch, so it rejects in about ALPHA of the runs. Against the greedy order that drops
  late groups, its power is measured over RUNS seeds.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.virtual_time import Outcome, drive
from monarch_rl.buffer.core import BufferCore
from monarch_rl.buffer.ledger import LATE
from monarch_rl.buffer.settings import BufferSettings

GROUPS, LAG, STEPS, RUNS, ALPHA = 8, 2, 150, 50, 0.01
N = GROUPS * STEPS
DEFAULT, GREEDY = BufferSettings(LAG), BufferSettings(LAG, late="drop")


def lengths(seed: int) -> np.ndarray:
    """Pareto with shape 1.5: 10 % are above 4.6 times the least, 1 % above 21 times; the mean is 3 times."""
    return np.random.default_rng(seed).pareto(1.5, 4 * N) + 1


def run(settings: BufferSettings, seed: int) -> tuple[BufferCore, Outcome]:
    seconds, core = lengths(seed), BufferCore(GROUPS, settings)
    outcome = drive(core, lambda group: float(seconds[group]), 2 * GROUPS, step_s=1.5, publish_s=0.2, steps=STEPS)
    return core, outcome


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The two-sample Kolmogorov-Smirnov statistic: the largest distance of the empirical distributions."""
    at = np.concatenate([a, b])
    below = [np.searchsorted(np.sort(one), at, side="right") / len(one) for one in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


def rejected(settings: BufferSettings, seed: int) -> bool:
    _, outcome = run(settings, seed)
    trained, fresh = lengths(seed)[outcome.trained], lengths(10_000 + seed)[:N]
    # Smirnov's asymptotic critical value for two samples of N: sqrt(-ln(alpha / 2) / N).
    return distance(trained, fresh) > np.sqrt(-np.log(ALPHA / 2) / N)


@pytest.mark.parametrize("window", ["auto", 0, GROUPS, LAG * GROUPS])
def test_every_group_of_a_window_of_admissions_is_trained(window: int | str) -> None:
    settings = BufferSettings(LAG, window=window)  # type: ignore[arg-type]
    core, outcome = run(settings, seed=0)
    assert core.counts().dropped == {}
    overtaking = core.window or 0
    assert set(range(N - overtaking)) <= set(outcome.trained)
    assert len(outcome.trained) == len(set(outcome.trained)) == N
    for place, group in enumerate(outcome.trained):
        assert sum(other > group for other in outcome.trained[:place]) <= overtaking


def test_greedy_order_loses_slow_groups() -> None:
    core, outcome = run(GREEDY, seed=0)
    lost = sorted(set(range(N)) - set(outcome.trained))
    assert core.counts().dropped[LATE] > N / 50
    assert lengths(0)[lost].mean() > 2 * lengths(0)[outcome.trained].mean()


def test_trained_lengths_are_distributed_as_generated_and_the_test_has_power() -> None:
    default = sum(rejected(DEFAULT, seed) for seed in range(RUNS))
    greedy = sum(rejected(GREEDY, seed) for seed in range(RUNS))
    print(f"KS of {N} against {N} lengths at level {ALPHA}: rejects {default} of {RUNS} default runs, {greedy} greedy")
    assert default <= 4  # of 50 at level 0.01: five or more have probability 0.0002
    assert greedy >= 0.9 * RUNS
