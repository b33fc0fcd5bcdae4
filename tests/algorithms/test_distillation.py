"""Distillation: against NumPy, and exactly over all sequences of a small vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.distillation import distillation, reverse_kl, top_k_divergence
from monarch_rl.algorithms.group_view import GroupView

SEEDS = st.integers(0, 2**32 - 1)
VOCABULARY, LENGTH = 3, 3


def group_of(teacher: list[torch.Tensor], behaviour: list[torch.Tensor]) -> GroupView:
    columns = {"teacher": teacher, "behaviour": behaviour}
    return GroupView.of([0.0] * len(teacher), lengths=[len(values) for values in teacher], columns=columns)


@given(SEEDS, st.lists(st.integers(0, 20), min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 1.0]))
def test_against_numpy(seed: int, lengths: list[int], discount: float) -> None:
    rng = np.random.default_rng(seed)
    teacher, behaviour = ([-rng.exponential(2, n).astype(np.float32) for n in lengths] for _ in range(2))
    group = group_of([torch.from_numpy(v) for v in teacher], [torch.from_numpy(v) for v in behaviour])
    for found, of_teacher, own in zip(distillation(group, discount).values, teacher, behaviour, strict=True):
        expected, following = [], 0.0
        for gain in reversed(of_teacher.astype(np.float64) - own):
            following = gain + discount * following
            expected.append(following)
        np.testing.assert_allclose(found.numpy(), expected[::-1], rtol=1e-4, atol=1e-4)


def test_the_advantage_of_a_shared_token_is_the_mean_over_its_branches() -> None:
    """The first sequence has turns of 2 and 1 tokens; the second one shares its first turn, and the third one both."""
    gains = [[1.0, 2.0, 3.0], [5.0], [7.0, 9.0]]
    group = GroupView.of(
        [0.0] * 3,
        lengths=[3, 1, 2],
        rollouts=torch.zeros(3, dtype=torch.int32),
        forks=[None, (0, 1), (0, 2)],
        turn_lengths=[torch.tensor(n, dtype=torch.int32) for n in ([2, 1], [0, 1], [0, 0, 2])],
        turn_rewards=[torch.zeros(n) for n in (2, 2, 3)],
        columns={"teacher": [torch.tensor(g) for g in gains], "behaviour": [torch.zeros(len(g)) for g in gains]},
    )
    found = [values.tolist() for values in distillation(group, 1.0).values]
    assert found == [[pytest.approx((6 + 8 + 22) / 3), pytest.approx((5 + 7 + 21) / 3), (3 + 19) / 2], [5], [16, 9]]
    plain = [values.tolist() for values in distillation(group, 0.0).values]
    assert plain == [pytest.approx(values) for values in gains]


class Tables:
    """Two policies of sequences: logits of the next token after each sequence of up to ``LENGTH`` - 1 tokens."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        prefixes = [p for n in range(LENGTH) for p in itertools.product(range(VOCABULARY), repeat=n)]
        shape = len(prefixes), VOCABULARY
        self.rows = {prefix: row for row, prefix in enumerate(prefixes)}
        self.policy = torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()
        self.teacher = torch.randn(shape, generator=rng, dtype=torch.float64).log_softmax(-1)

    def logprobs(self, table: torch.Tensor, sequence: tuple[int, ...]) -> torch.Tensor:
        """float64[LENGTH]."""
        return torch.stack([table[self.rows[sequence[:n]]].log_softmax(-1)[token] for n, token in enumerate(sequence)])

    def gradient(self, of: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(of, self.policy)
        return found

    def expected(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The expected gradient of a sum of token losses over sequences that the policy samples."""
        total = torch.zeros((), dtype=torch.float64)
        for sequence in itertools.product(range(VOCABULARY), repeat=LENGTH):
            own, others = self.logprobs(self.policy, sequence), self.logprobs(self.teacher, sequence)
            total = total + own.detach().sum().exp() * loss(own, others).sum()
        return self.gradient(total)

    def of_sequences(self) -> torch.Tensor:
        """The gradient of KL(policy || teacher), both as distributions of whole sequences."""
        total = torch.zeros((), dtype=torch.float64)
        for sequence in itertools.product(range(VOCABULARY), repeat=LENGTH):
            own = self.logprobs(self.policy, sequence).sum()
            total = total + own.exp() * (own - self.logprobs(self.teacher, sequence).sum())
        return self.gradient(total)

    def of_tokens(self) -> torch.Tensor:
        """The same for next tokens, given prefixes that the policy samples, without gradient through the prefixes."""
        total = torch.zeros((), dtype=torch.float64)
        for prefix, row in self.rows.items():
            own, other = self.policy[row].log_softmax(-1), self.teacher[row]
            chance = self.logprobs(self.policy, prefix).detach().sum().exp() if prefix else 1.0
            total = total + chance * (own.exp() * (own - other)).sum()
        return self.gradient(total)


def by_advantage(discount: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        (advantages,) = distillation(group_of([others], [own.detach()]), discount).values
        return -advantages * own

    return loss


@pytest.mark.parametrize("seed", range(3))
def test_each_form_has_the_gradient_of_its_divergence(seed: int) -> None:
    """As in the papers: per token for the loss and for the advantage without discount, and of whole sequences for
    MiniLLM. They differ: only the second includes the consequences of a token."""
    tables = Tables(seed)
    of_tokens, of_sequences = tables.of_tokens(), tables.of_sequences()
    torch.testing.assert_close(tables.expected(reverse_kl), of_tokens)
    torch.testing.assert_close(tables.expected(by_advantage(0.0)), of_tokens)
    torch.testing.assert_close(tables.expected(by_advantage(1.0)), of_sequences)
    assert (of_tokens - of_sequences).abs().max() > 1e-2


def test_a_teacher_equal_to_the_policy_gives_no_advantage() -> None:
    values = [torch.tensor([-1.0, -2.0])]
    assert distillation(group_of(values, values), 1.0).values[0].tolist() == [0.0, 0.0]


# -- over the teacher's most likely tokens -----------------------------------------------------------------------------


def distributions(seed: int, n: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs float64[n, size] of a policy and of a teacher, the teacher's most likely tokens first."""
    rng = torch.Generator().manual_seed(seed)
    policy, teacher = (torch.randn(n, size, generator=rng, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    order = teacher.argsort(-1, descending=True)
    return policy.gather(-1, order), teacher.gather(-1, order)


@given(SEEDS, st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_the_top_k_divergence_is_the_formula(seed: int, n: int, k: int, forward: bool) -> None:
    policy, teacher = (values.numpy() for values in distributions(seed, n, 7))
    found = top_k_divergence(torch.from_numpy(policy[:, :k]), torch.from_numpy(teacher[:, :k]), forward).numpy()
    for row in range(n):
        p, q = (np.append(np.exp(values[row, :k]), np.exp(values[row, k:]).sum()) for values in (policy, teacher))
        p, q = (q, p) if forward else (p, q)
        assert found[row] == pytest.approx(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True)), abs=1e-6)


@given(SEEDS, st.booleans())
def test_the_top_k_divergence_grows_with_k_to_the_full_divergence(seed: int, forward: bool) -> None:
    policy, teacher = distributions(seed, 4, 6)
    first, second = (teacher, policy) if forward else (policy, teacher)
    whole = (first.exp() * (first - second)).sum(-1)
    seen = [top_k_divergence(policy[:, :k], teacher[:, :k], forward) for k in range(1, 7)]
    assert all((fewer <= more + 1e-5).all() for fewer, more in itertools.pairwise([torch.zeros(4), *seen]))
    torch.testing.assert_close(seen[-1], whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("forward", [False, True])
def test_minimising_the_top_k_divergence_reaches_the_teachers_distribution(forward: bool) -> None:
    """By gradient descent on logits; in float32 nothing becomes infinite."""
    _, teacher = distributions(0, 3, 5)
    logits = torch.zeros(3, 5, requires_grad=True)
    for _ in range(400):
        loss = top_k_divergence(logits.log_softmax(-1)[:, :3], teacher[:, :3].float(), forward).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - gradient).detach().requires_grad_()
    probabilities = logits.softmax(-1)
    torch.testing.assert_close(probabilities[:, :3], teacher[:, :3].exp().float(), atol=1e-3, rtol=0)
    sure = torch.tensor([[0.0, -50.0]], requires_grad=True)
    top_k_divergence(sure, torch.tensor([[-50.0, 0.0]]), forward).sum().backward()
    assert sure.grad is not None and sure.grad.isfinite().all()
