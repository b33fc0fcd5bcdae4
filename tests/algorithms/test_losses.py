"""Every policy loss: against an independent NumPy version, its gradient against finite differences of the formula, and
the property that its paper claims."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms import losses
from monarch_rl.algorithms.losses import TokenLoss

TOKENS, SEEDS = st.integers(1, 40), st.integers(0, 2**32 - 1)


class SampledTokens:
    """Tokens of several sequences: log-probs under three similar policies, and advantages of the sequences."""

    def __init__(self, seed: int, n: int, spread: float = 0.5) -> None:
        rng = np.random.default_rng(seed)
        self.old = -rng.exponential(2.0, n) - 0.01
        self.new = np.minimum(self.old + rng.normal(0, spread, n), -1e-3)
        self.behaviour = np.minimum(self.old + rng.normal(0, spread, n), -1e-3)
        self.sequences = np.sort(rng.integers(0, 1 + n // 4, n))
        self.advantages = rng.normal(0, 1, 1 + n // 4)[self.sequences]

    def tensors(self, *names: str) -> Any:
        """float64[n] each, as arguments of a function."""
        return [torch.from_numpy(getattr(self, name)) for name in names]


def mean_of(values: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    return np.asarray([values[sequences == s].mean() for s in sequences])


# -- the formulas in NumPy: the objective to maximise at each token ----------------------------------------------------


def ppo(d: SampledTokens, new: np.ndarray, low: float = 0.2, high: float = 0.28, dual: float = 0.0) -> np.ndarray:
    gains = []
    for ratio, advantage in zip(np.exp(new - d.old), d.advantages, strict=True):
        gain = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        gains.append(max(gain, dual * advantage) if dual and advantage < 0 else gain)
    return np.asarray(gains)


def cispo(d: SampledTokens, new: np.ndarray) -> np.ndarray:
    return np.minimum(np.exp(d.new - d.old), 4.0) * d.advantages * new  # the weight is detached


def gspo(d: SampledTokens, new: np.ndarray, low: float = 3e-4, high: float = 4e-4) -> np.ndarray:
    ratio = np.exp(mean_of(new - d.old, d.sequences))
    return np.minimum(ratio * d.advantages, np.clip(ratio, 1 - low, 1 + high) * d.advantages)


def sapo(d: SampledTokens, new: np.ndarray) -> np.ndarray:
    tau = np.where(d.advantages > 0, 1.0, 1.05)
    return 4 / tau / (1 + np.exp(-tau * (np.exp(new - d.old) - 1))) * d.advantages


def dppo(d: SampledTokens, new: np.ndarray, most: float = 0.05) -> np.ndarray:
    change = np.exp(d.new) - np.exp(d.old)
    too_far = np.where(d.advantages > 0, change > most, change < -most)
    return np.where(too_far, 0, np.exp(new - d.old) * d.advantages)


def decoupled(d: SampledTokens, new: np.ndarray, cap: float = 1.5) -> np.ndarray:
    weight = np.exp(d.old - d.behaviour)
    return np.where(weight <= cap, weight, 0) * ppo(d, new, 0.2, 0.2)


def ratio_loss(function: Callable[..., TokenLoss], *further: str, **parameters: float) -> Callable[..., Any]:
    """A loss of ``logprobs``; all other inputs are those of the sampled tokens."""

    def loss(d: SampledTokens, logprobs: torch.Tensor) -> torch.Tensor:
        names = ["old", *further, "advantages"] if further != ("sequences",) else ["old", "advantages", "sequences"]
        return function(logprobs, *d.tensors(*names), **parameters).loss

    return loss


def pg_loss(d: SampledTokens, logprobs: torch.Tensor) -> torch.Tensor:
    return losses.policy_gradient(logprobs, *d.tensors("advantages"))


CASES: dict[str, tuple[Callable[..., Any], Callable[..., np.ndarray]]] = {
    "pg": (pg_loss, lambda d, new: d.advantages * new),
    "ppo_clip": (ratio_loss(losses.clipped_ratio), ppo),
    "dual_clip": (ratio_loss(losses.clipped_ratio, dual_clip=1.5), partial(ppo, dual=1.5)),
    "cispo": (ratio_loss(losses.cispo), cispo),
    "gspo": (ratio_loss(losses.gspo, "sequences"), gspo),
    "gspo, wide": (ratio_loss(losses.gspo, "sequences", clip_low=0.2, clip_high=0.3), partial(gspo, low=0.2, high=0.3)),
    "sapo": (ratio_loss(losses.sapo), sapo),
    "dppo_tv": (ratio_loss(losses.dppo_tv, max_change=0.05), dppo),
    "decoupled": (ratio_loss(losses.decoupled, "behaviour", behaviour_cap=1.5), decoupled),
}


@pytest.mark.parametrize("name", CASES)
@given(seed=SEEDS, n=TOKENS)
def test_the_loss_is_the_formula(name: str, seed: int, n: int) -> None:
    loss, formula = CASES[name]
    d = SampledTokens(seed, n)
    found = loss(d, torch.from_numpy(d.new)).numpy()
    np.testing.assert_allclose(found, -formula(d, d.new), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@given(seed=SEEDS, n=st.integers(1, 12))
def test_the_gradient_equals_finite_differences_of_the_formula(name: str, seed: int, n: int) -> None:
    """In float64, for the sum with equal weights in each sequence, where both forms of GSPO agree."""
    loss, formula = CASES[name]
    d, step = SampledTokens(seed, n), 1e-6
    weights = np.random.default_rng(seed).uniform(0.5, 2, n)[d.sequences]
    logprobs = torch.from_numpy(d.new.copy()).requires_grad_()
    (loss(d, logprobs) * torch.from_numpy(weights)).sum().backward()
    assert logprobs.grad is not None

    def total(token: int, sign: float) -> np.ndarray:
        return -(formula(d, d.new + sign * step * (np.arange(n) == token)) * weights)

    for token in range(n):
        above, at, below = total(token, 1), total(token, 0), total(token, -1)
        one_sided = (above - at).sum() / step, (at - below).sum() / step
        if abs(one_sided[0] - one_sided[1]) > 1e-2 * (1e-3 + abs(one_sided[0])):
            continue  # where the formula has a corner, it has no derivative
        np.testing.assert_allclose(logprobs.grad[token].item(), sum(one_sided) / 2, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name != "pg"])
def test_with_equal_policies_every_loss_is_the_policy_gradient(name: str) -> None:
    """So with one update per batch, and no staleness, the choice does not matter."""
    d = SampledTokens(0, 30)
    d.behaviour = d.new = d.old
    gradients = []
    for loss in (CASES[name][0], pg_loss):
        logprobs = torch.from_numpy(d.new.copy()).requires_grad_()
        loss(d, logprobs).sum().backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_an_extreme_ratio_gives_no_nan(name: str) -> None:
    """In float32, where exp(100) is infinite, and infinity times an advantage of 0 is NaN."""
    d = SampledTokens(1, 6)
    d.old, d.behaviour = np.full(6, -150, np.float32), np.full(6, -150, np.float32)
    d.new, d.sequences = np.full(6, -1, np.float32), np.asarray([0, 0, 1, 1, 2, 2])
    d.advantages = np.asarray([0, 0, 1, 1, -1, -1], np.float32)
    logprobs = torch.from_numpy(d.new).requires_grad_()
    loss = CASES[name][0](d, logprobs)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()


# -- claims of the papers --------------------------------------------------------------------------------------------


def gradients(function: Callable[..., TokenLoss], log_ratio: list[float], advantages: list[float], **more: Any) -> Any:
    """Gradients of tokens with log-prob -1, given the change of the policy."""
    new = torch.full((len(log_ratio),), -1.0, dtype=torch.float64, requires_grad=True)
    old = new.detach() - torch.tensor(log_ratio, dtype=torch.float64)
    result = function(new, old, torch.tensor(advantages, dtype=torch.float64), **more)
    result.loss.sum().backward()
    assert new.grad is not None
    return -new.grad.numpy(), result.clipped.tolist()


def test_ppo_has_no_gradient_beyond_the_clip_and_the_policy_gradient_within_it() -> None:
    found, clipped = gradients(losses.clipped_ratio, [0.5, -0.5, 0.0, 0.5], [1.0, -1.0, 2.0, -1.0])
    np.testing.assert_allclose(found, [0, 0, 2, -np.exp(0.5)])
    assert clipped == [True, True, False, True]


def test_clip_higher_allows_rises_that_the_symmetric_clip_stops() -> None:
    moved = [float(np.log(1.25))]
    assert gradients(losses.clipped_ratio, moved, [1.0])[0][0] > 1
    assert gradients(losses.clipped_ratio, moved, [1.0], clip_high=0.2)[0][0] == 0


def test_the_dual_clip_bounds_the_loss_of_a_token_with_negative_advantage() -> None:
    for log_ratio in (1.0, 2.0, 5.0):
        arguments = torch.tensor([-1.0]), torch.tensor([-1.0 - log_ratio]), torch.tensor([-1.0])
        assert losses.clipped_ratio(*arguments).loss.item() == pytest.approx(np.exp(log_ratio), rel=1e-5)
        assert losses.clipped_ratio(*arguments, dual_clip=3.0).loss.item() == pytest.approx(
            min(np.exp(log_ratio), 3.0), rel=1e-5
        )


def test_cispo_keeps_gradients_of_tokens_that_ppo_clips() -> None:
    moved, advantages = [0.5, 2.0, -1.0], [1.0, 1.0, -1.0]
    assert gradients(losses.clipped_ratio, moved, advantages)[0].tolist() == [0, 0, 0]
    found, clipped = gradients(losses.cispo, moved, advantages)
    np.testing.assert_allclose(found, [np.exp(0.5), 4.0, -np.exp(-1.0)])
    assert clipped == [False, True, False]


@given(seed=SEEDS)
def test_gspo_gives_all_tokens_of_a_sequence_one_weight(seed: int) -> None:
    d = SampledTokens(seed, 20)
    logprobs = torch.from_numpy(d.new).requires_grad_()
    wide = partial(losses.gspo, clip_low=0.5, clip_high=0.5)
    wide(logprobs, *d.tensors("old", "advantages", "sequences")).loss.sum().backward()
    assert logprobs.grad is not None
    for sequence in set(d.sequences.tolist()):
        of_sequence = logprobs.grad.numpy()[d.sequences == sequence]
        np.testing.assert_allclose(of_sequence, of_sequence[0], rtol=1e-9)


@given(seed=SEEDS, tokens=st.integers(50, 400))
def test_token_noise_cancels_in_the_ratio_of_gspo(seed: int, tokens: int) -> None:
    """So a clip of 0.2 for tokens would never act on a sequence: its ratio is within three standard errors of 1."""
    noise = np.random.default_rng(seed).normal(0, 0.2, tokens)
    noise -= noise.mean() * (abs(noise.mean()) > 0.6 / tokens**0.5)  # one in 400 is larger, and is centred
    logprobs = torch.full((tokens,), -1.0, dtype=torch.float64)
    old, one = logprobs - torch.from_numpy(noise), torch.ones(tokens, dtype=torch.float64)
    sequences = torch.zeros(tokens, dtype=torch.int64)
    assert not losses.gspo(logprobs, old, one, sequences, 0.2, 0.2).clipped.any()
    assert losses.clipped_ratio(logprobs, old, one).clipped.any() == bool(
        ((np.exp(noise) < 0.8) | (np.exp(noise) > 1.28)).any()
    )


def test_the_gradient_of_sapo_falls_smoothly_and_faster_for_negative_advantages() -> None:
    moved = np.linspace(0, 2, 50)
    risen, _ = gradients(losses.sapo, moved.tolist(), [1.0] * 50)
    fallen, clipped = gradients(losses.sapo, moved.tolist(), [-1.0] * 50)
    per_ratio, negative = risen / np.exp(moved), -fallen / np.exp(moved)
    assert per_ratio[0] == pytest.approx(1) and (np.diff(per_ratio) < 0).all() and per_ratio[-1] > 0
    assert (negative[1:] < per_ratio[1:]).all()
    assert clipped == (negative < 0.5).tolist()


def test_dppo_clips_by_the_change_of_probability_and_not_by_the_ratio() -> None:
    """A rare token that became ten times as likely still has a gradient; a common one beyond the allowed change has
    none."""
    old = torch.tensor([1e-4, 0.5, 0.5, 0.5], dtype=torch.float64).log()
    new = torch.tensor([1e-3, 0.75, 0.75, 0.6], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    assert losses.dppo_tv(new, old, advantages).clipped.tolist() == [False, True, False, False]
    assert losses.clipped_ratio(new, old, advantages).clipped.tolist() == [True, True, True, False]


@given(seed=SEEDS)
def test_the_decoupled_clip_does_not_depend_on_the_age_of_tokens(seed: int) -> None:
    """AReaL's claim: the trust region is around the newest policy. The same clip against the behaviour policy would
    drop tokens for their age alone."""
    d = SampledTokens(seed, 40)
    d.new = d.old
    d.behaviour = d.old + np.random.default_rng(seed).normal(0, 1, 40)
    uncapped = partial(losses.decoupled, behaviour_cap=1e9)
    stale = uncapped(*d.tensors("new", "old", "behaviour", "advantages"))
    assert not stale.clipped.any()
    assert (stale.loss != 0).all()
    assert losses.clipped_ratio(*d.tensors("new", "behaviour", "advantages")).clipped.any()
