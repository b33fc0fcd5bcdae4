"""Estimates of the KL divergence, exactly over all tokens of a small vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.losses import ESTIMATES, Estimate, k1, k2, k3

SEEDS = st.integers(0, 2**32 - 1)
POLICY = torch.tensor([0.3, -0.4, 1.0, 0.1, -1.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.0, 0.5, 0.8, -0.3, 0.2], dtype=torch.float64).log_softmax(0)


@given(SEEDS, st.integers(1, 30))
def test_against_numpy(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    policy, reference = -rng.exponential(2, n), -rng.exponential(2, n)
    expected = {
        "k1": policy - reference,
        "k2": (policy - reference) ** 2 / 2,
        "k3": np.exp(reference) / np.exp(policy) - 1 - (reference - policy),
    }
    for name, estimate in ESTIMATES.items():
        found = estimate(torch.from_numpy(policy), torch.from_numpy(reference)).numpy()
        np.testing.assert_allclose(found, expected[name], rtol=1e-6, atol=1e-9)
    assert (expected["k3"] >= 0).all()


def divergence(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum()


def test_k1_and_k3_are_unbiased() -> None:
    policy = POLICY.log_softmax(0)
    for estimate in (k1, k3):
        expectation = (policy.exp() * estimate(policy, REFERENCE)).sum()
        torch.testing.assert_close(expectation, divergence(policy, REFERENCE))


def gradient_of_loss(estimate: object) -> torch.Tensor:
    """Expected gradient, over sampled tokens, of an estimate that is a part of the loss."""
    logits = POLICY.clone().requires_grad_()
    policy = logits.log_softmax(0)
    chances = policy.detach().exp()
    (chances * estimate(policy, REFERENCE)).sum().backward()  # type: ignore[operator]
    assert logits.grad is not None
    return logits.grad


def test_in_the_loss_k1_has_no_gradient_k2_that_of_the_reverse_kl_and_k3_of_the_forward_kl() -> None:
    def gradient(of: str) -> torch.Tensor:
        logits = POLICY.clone().requires_grad_()
        policy = logits.log_softmax(0)
        (divergence(policy, REFERENCE) if of == "reverse" else divergence(REFERENCE, policy)).backward()
        assert logits.grad is not None
        return logits.grad

    torch.testing.assert_close(gradient_of_loss(k1), torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient_of_loss(k2), gradient("reverse"))
    torch.testing.assert_close(gradient_of_loss(k3), gradient("forward"))


def test_in_the_reward_only_k1_has_the_gradient_of_the_divergence() -> None:
    def gradient_of_reward(estimate: Estimate) -> torch.Tensor:
        logits = POLICY.clone().requires_grad_()
        policy = logits.log_softmax(0)
        chances, penalty = policy.detach().exp(), estimate(policy.detach(), REFERENCE)
        (chances * penalty * policy).sum().backward()  # the policy gradient of the advantage -penalty, to be minimised
        assert logits.grad is not None
        return logits.grad

    logits = POLICY.clone().requires_grad_()
    divergence(logits.log_softmax(0), REFERENCE).backward()
    assert logits.grad is not None
    torch.testing.assert_close(gradient_of_reward(k1), logits.grad)
    for other in (k2, k3):
        assert (gradient_of_reward(other) - logits.grad).norm() > 0.05 * logits.grad.norm()


@pytest.mark.parametrize("name", ESTIMATES)
def test_estimates_far_from_the_reference_have_finite_gradients(name: str) -> None:
    logprobs = torch.tensor([-200.0, -0.1]).requires_grad_()
    ESTIMATES[name](logprobs, torch.tensor([-0.1, -200.0])).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
