"""Corrections for tokens that another policy sampled: against NumPy, and against their claims."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms import losses
from monarch_rl.algorithms.losses import sequence_means, whole_sequences
from tests.algorithms.test_losses import SampledTokens, mean_of

TOKENS, SEEDS = st.integers(1, 40), st.integers(0, 2**32 - 1)


@given(SEEDS, TOKENS)
def test_icepop_and_the_capped_behaviour_weight(seed: int, n: int) -> None:
    d = SampledTokens(seed, n)
    rho = np.exp(d.old - d.behaviour)
    found = losses.icepop_weights(*d.tensors("old", "behaviour")).numpy()
    np.testing.assert_allclose(found, [r if 0.5 <= r <= 2 else 0 for r in rho], rtol=1e-9)
    found = partial(losses.capped_behaviour_weights, cap=1.5)(*d.tensors("old", "behaviour")).numpy()
    np.testing.assert_allclose(found, [r if r <= 1.5 else 0 for r in rho], rtol=1e-9)


@given(SEEDS, TOKENS, st.floats(0, 0.5))
def test_sequence_mask(seed: int, n: int, width: float) -> None:
    d = SampledTokens(seed, n)
    rho = np.exp(mean_of(d.old - d.behaviour, d.sequences))
    found = partial(losses.sequence_mask, low=1 - width, high=1 + width)(
        *d.tensors("old", "behaviour", "sequences")
    ).numpy()
    away = np.minimum(np.abs(rho - (1 - width)), np.abs(rho - (1 + width))) > 1e-9
    np.testing.assert_array_equal(found[away], ((rho >= 1 - width) & (rho <= 1 + width))[away])


@given(SEEDS, TOKENS)
def test_off_policy_sequence_mask(seed: int, n: int) -> None:
    d = SampledTokens(seed, n)
    distance = mean_of(d.behaviour - d.new, d.sequences)
    found = partial(losses.off_policy_sequence_mask, max_kl=0.1)(
        *d.tensors("new", "behaviour", "advantages", "sequences")
    ).numpy()
    np.testing.assert_array_equal(found, ~((d.advantages < 0) & (distance > 0.1)))


def test_opsm_drops_only_bad_sequences_of_another_policy() -> None:
    behaviour = torch.full((8,), -1.0)
    # Unchanged, far less likely (twice), more likely.
    new = torch.tensor([-1.0, -1.0, -3.0, -3.0, -3.0, -3.0, 0.0, 0.0])
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    sequences = torch.arange(4).repeat_interleave(2)
    found = losses.off_policy_sequence_mask(new, behaviour, advantages, sequences)
    assert found.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]


def test_one_bad_token_drops_its_sequence_and_no_other() -> None:
    behaviour = torch.full((20,), -1.0)
    old = behaviour.clone()
    old[3] = -6.0
    found = losses.sequence_mask(old, behaviour, torch.arange(2).repeat_interleave(10))
    assert found.tolist() == [0.0] * 10 + [1.0] * 10


def test_uncapped_weights_are_unbiased() -> None:
    """Exactly, over a vocabulary of four: uncapped weights are unbiased, a cap and a mask are not."""
    engine, trainer = np.asarray([0.4, 0.3, 0.2, 0.1]), np.asarray([0.3, 0.3, 0.2, 0.2])
    value = torch.tensor([1.0, -2.0, 3.0, 5.0], dtype=torch.float64)
    logprobs = torch.from_numpy(np.log(trainer)), torch.from_numpy(np.log(engine))
    wanted = (torch.from_numpy(trainer) * value).sum()

    def expectation(weights: torch.Tensor) -> torch.Tensor:
        return (torch.from_numpy(engine) * weights * value).sum()

    for weights in (
        losses.truncated_importance_weights(*logprobs, cap=10.0),
        losses.icepop_weights(*logprobs, low=0.1, high=10.0),
        losses.capped_behaviour_weights(*logprobs, cap=10.0),
    ):
        torch.testing.assert_close(expectation(weights), wanted)
    capped = losses.truncated_importance_weights(*logprobs, cap=1.5)
    masked = losses.icepop_weights(*logprobs, low=0.8, high=1.5)
    np.testing.assert_allclose(capped, [0.75, 1.0, 1.0, 1.5])
    np.testing.assert_allclose(masked, [0.0, 1.0, 1.0, 0.0])


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-5, 5)), min_size=1, max_size=40))
def test_sequence_means_and_whole_sequences(tokens: list[tuple[int, float]]) -> None:
    sequences, values = (list(column) for column in zip(*sorted(tokens), strict=True))
    found = sequence_means(torch.tensor(values, dtype=torch.float64), torch.tensor(sequences))
    np.testing.assert_allclose(found, mean_of(np.asarray(values), np.asarray(sequences)), atol=1e-12)
    whole = whole_sequences(torch.tensor(values, dtype=torch.float64) >= 0, torch.tensor(sequences)).tolist()
    grouped = itertools.groupby(sorted(tokens), key=lambda token: token[0])
    whole_of = {sequence: all(value >= 0 for _, value in of_sequence) for sequence, of_sequence in grouped}
    assert whole == [whole_of[sequence] for sequence in sequences]


def test_sequence_functions_accept_no_tokens() -> None:
    nothing = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert sequence_means(*nothing).shape == (0,) and whole_sequences(nothing[0].bool(), nothing[1]).shape == (0,)
