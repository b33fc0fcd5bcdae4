"""Every formula against an independent NumPy version."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from monarch_rl.algorithms import advantages, losses
from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.mismatch import figures

# Multiples of 1/16: equal rewards are exactly equal, others differ by more than rounding.
REWARDS = arrays.arrays(np.float32, st.integers(2, 16), elements=st.integers(-80, 80).map(lambda i: i / 16))
TOKENS = st.integers(1, 40)
SEEDS = st.integers(0, 2**32 - 1)


def logprobs(seed: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two similar sets of log-probs, and advantages."""
    rng = np.random.default_rng(seed)
    first = -rng.exponential(2.0, n)
    return first, np.minimum(first + rng.normal(0, 0.5, n), 0.0), rng.normal(0, 1, n)


@given(REWARDS)
def test_dr_grpo(rewards: np.ndarray) -> None:
    found = advantages.dr_grpo(GroupView.of(torch.from_numpy(rewards))).numpy()
    np.testing.assert_allclose(found, rewards - rewards.mean(), atol=1e-5)


@given(REWARDS)
def test_grpo(rewards: np.ndarray) -> None:
    found = advantages.grpo(GroupView.of(torch.from_numpy(rewards))).numpy()
    wide = rewards.astype(np.float64)
    expected = (wide - wide.mean()) / (wide.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    for advantage in (advantages.dr_grpo, advantages.grpo, advantages.rloo, advantages.max_rl):
        assert advantage(GroupView.of(torch.full((8,), 0.7))).abs().max() < 1e-6


@given(SEEDS, TOKENS, st.floats(1.0, 5.0))
def test_truncated_importance_weights(seed: int, n: int, cap: float) -> None:
    old, behaviour, _ = logprobs(seed, n)
    found = losses.truncated_importance_weights(torch.from_numpy(old), torch.from_numpy(behaviour), cap)
    np.testing.assert_allclose(found.numpy(), np.minimum(np.exp(old - behaviour), cap), rtol=1e-9)


@given(SEEDS, TOKENS)
def test_mismatch_k3(seed: int, n: int) -> None:
    old, behaviour, _ = logprobs(seed, n)
    found = losses.mismatch_k3(torch.from_numpy(old), torch.from_numpy(behaviour)).numpy()
    ratio = np.exp(old - behaviour)
    np.testing.assert_allclose(found, ratio - 1 - np.log(ratio), atol=1e-9)
    assert (found >= -1e-12).all()


def test_finite_tokens() -> None:
    first = torch.tensor([0.0, float("nan"), -1.0, -2.0])
    second = torch.tensor([0.0, 0.0, -float("inf"), -2.0])
    assert losses.finite_tokens(first, second).tolist() == [True, False, False, True]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(50, 100))
def test_token_weights(lengths: list[int], tokens: int) -> None:
    total, episodes = sum(lengths), len(lengths)
    expected: dict[losses.Aggregation, list[float]] = {
        "token_mean": [1 / total] * episodes,
        "sequence_mean": [1 / (length * episodes) for length in lengths],
        "constant": [1 / (tokens * episodes)] * episodes,
    }
    for name, weights in expected.items():
        found = losses.token_weights(
            torch.tensor(lengths), name, batch_tokens=total, batch_episodes=episodes, normaliser_tokens=tokens
        )
        np.testing.assert_allclose(found.numpy(), weights, rtol=1e-5)


def pulls(name: losses.Aggregation, lengths: list[int]) -> list[np.ndarray]:
    """The gradient of the log-prob of each token: of a right answer, then of wrong ones, of these lengths."""
    of_group = advantages.dr_grpo(GroupView.of(torch.tensor([1.0] + [0.0] * (len(lengths) - 1))))
    weights = losses.token_weights(
        torch.tensor(lengths), name, batch_tokens=sum(lengths), batch_episodes=len(lengths), normaliser_tokens=100
    )
    logprobs = torch.full((sum(lengths),), -1.0, requires_grad=True)
    advantages_N, weights_N = (values.repeat_interleave(torch.tensor(lengths)) for values in (of_group, weights))
    loss = (losses.policy_gradient(logprobs, advantages_N) * weights_N).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return [values.numpy() for values in gradient.split(lengths)]


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 20))
def test_aggregations_weight_long_and_short_wrong_answers_as_documented(right: int, short: int, more: int) -> None:
    """As in the papers: token_mean gives long answers more weight, sequence_mean hardly punishes a long wrong answer,
    and constant has no length bias."""
    long, lengths = short + more, [right, short, short + more]
    found = {name: pulls(name, lengths) for name in ("token_mean", "sequence_mean", "constant")}
    for _, of_short, of_long in found.values():
        assert (of_short > 0).all() and (of_long > 0).all()  # descent lowers the log-probs of both
    _, of_short, of_long = found["token_mean"]
    np.testing.assert_allclose(of_long, of_short[0])
    np.testing.assert_allclose(of_long.sum(), of_short.sum() * long / short, rtol=1e-5)
    _, of_short, of_long = found["sequence_mean"]
    np.testing.assert_allclose(of_long.sum(), of_short.sum(), rtol=1e-5)
    np.testing.assert_allclose(of_long, of_short[0] * short / long, rtol=1e-5)
    # constant: the gradient of a token depends on no length. token_mean: it is smaller in longer batches.
    of_shorter = {name: pulls(name, [right, short, short]) for name in ("token_mean", "constant")}
    _, of_short, of_long = found["constant"]
    for values in (of_short, of_long, *of_shorter["constant"][1:]):
        np.testing.assert_allclose(values, of_short[0])
    assert of_shorter["token_mean"][1][0] > found["token_mean"][1][0]


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="aggregation 'mean'"):
        losses.token_weights(torch.ones(1), "mean", batch_tokens=1, batch_episodes=1, normaliser_tokens=1)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 9), max_size=40), st.floats(0, 1))
def test_lag_discount(lags: list[int], factor: float) -> None:
    found = losses.lag_discount(torch.tensor(lags, dtype=torch.int64), factor).numpy()
    np.testing.assert_allclose(found, [np.prod([factor] * lag) for lag in lags], rtol=1e-4, atol=1e-30)


def test_mismatch_metrics() -> None:
    rng = np.random.default_rng(0)
    engine = rng.normal(-2, 1, 5000).astype(np.float32)
    trainer = engine + rng.normal(0, 0.4, 5000).astype(np.float32)
    engine[7], trainer[9] = -np.inf, np.nan
    found = figures(torch.from_numpy(trainer), torch.from_numpy(engine), 0.5, 2.0)
    keep = np.isfinite(engine) & np.isfinite(trainer)
    log_ratio = trainer[keep].astype(np.float64) - engine[keep].astype(np.float64)
    ratio = np.exp(log_ratio)
    expected = {
        "tokens": 5000,
        "mean": np.abs(log_ratio).mean(),
        **{f"p{name}": np.quantile(np.abs(log_ratio), q) for name, q in (("50", 0.5), ("90", 0.9), ("99_9", 0.999))},
        "p99": np.quantile(np.abs(log_ratio), 0.99),
        "max": np.abs(log_ratio).max(),
        "k3": (ratio - 1 - log_ratio).mean(),
        "outside": ((ratio < 0.5) | (ratio > 2)).mean(),
        "nonfinite": 2 / 5000,
    }
    assert found == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match=" 2 tokens "):
        figures(torch.full((2,), torch.nan), torch.zeros(2), 0.5, 2.0)
