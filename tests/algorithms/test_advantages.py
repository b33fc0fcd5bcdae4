"""Advantages and their modifiers: against NumPy, and against the claims of their papers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from monarch_rl.algorithms import advantages
from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.algorithms.returns import (
    clipped_value_loss,
    explained_variance,
    generalised_advantages,
    group_advantages,
)

# Multiples of 1/16: equal rewards are exactly equal, others differ by more than rounding.
REWARDS = arrays.arrays(np.float32, st.integers(2, 16), elements=st.integers(-80, 80).map(lambda i: i / 16))
NOT_NEGATIVE = arrays.arrays(np.float32, st.integers(1, 16), elements=st.integers(0, 80).map(lambda i: i / 16))
SEEDS = st.integers(0, 2**32 - 1)


def of(function: Callable[[GroupView], torch.Tensor], rewards: np.ndarray) -> np.ndarray:
    found: np.ndarray = function(GroupView.of(torch.from_numpy(rewards))).numpy()
    return found


def of_batch(*groups: np.ndarray) -> np.ndarray:
    views = [GroupView.of(torch.from_numpy(rewards)) for rewards in groups]
    return torch.cat(advantages.reinforce_pp(views)).numpy()


@given(REWARDS)
def test_rloo(rewards: np.ndarray) -> None:
    expected = [reward - np.delete(rewards, i).mean() for i, reward in enumerate(rewards)]
    np.testing.assert_allclose(of(advantages.rloo, rewards), expected, atol=1e-4)
    assert advantages.rloo(GroupView.of([3.0])).tolist() == [0.0]


@given(REWARDS, st.integers(0, 15), st.floats(-5, 5, width=32))
def test_the_baseline_of_rloo_does_not_depend_on_the_own_reward(rewards: np.ndarray, i: int, other: float) -> None:
    i %= len(rewards)
    changed = rewards.copy()
    changed[i] = other
    baselines = [r[i] - of(advantages.rloo, r)[i] for r in (rewards, changed)]
    assert baselines[0] == pytest.approx(baselines[1], abs=1e-4)


@given(NOT_NEGATIVE)
def test_max_rl(rewards: np.ndarray) -> None:
    mean = rewards.astype(np.float64).mean()
    expected = (rewards - mean) / mean if mean else np.zeros(len(rewards))
    np.testing.assert_allclose(of(advantages.max_rl, rewards), expected, atol=1e-4)


@given(st.integers(2, 6), st.floats(0.05, 0.95))
def test_the_expectation_of_max_rl_is_the_truncated_gradient_of_the_log_success_rate(n: int, p: float) -> None:
    """Over all outcomes of a group, with rewards of 0 and 1 and a policy that succeeds with probability p. The gradient
    of log p is the sum over all k of (1 - p)^(k - 1), times that of p; a group of n has its first n - 1 terms, and the
    mean reward alone only the first."""
    score = {1: 1 / p, 0: -1 / (1 - p)}  # the derivative of each outcome's log-prob by p
    expected = {"max_rl": 0.0, "dr_grpo": 0.0}
    for outcome in itertools.product((0, 1), repeat=n):
        chance = p ** sum(outcome) * (1 - p) ** (n - sum(outcome))
        for name in expected:
            advantage = of(getattr(advantages, name), np.asarray(outcome, np.float32))
            expected[name] += chance * sum(a * score[r] for a, r in zip(advantage, outcome, strict=True)) / n
    assert expected["max_rl"] == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, n)), rel=1e-4)
    assert expected["dr_grpo"] == pytest.approx((n - 1) / n, rel=1e-4)


def test_max_rl_refuses_rewards_below_0() -> None:
    with pytest.raises(ValueError, match="rewards"):
        advantages.max_rl(GroupView.of([-1.0, 1.0]))


@given(REWARDS, st.floats(0.5, 4), st.floats(-3, 3))
def test_grpo_ignores_the_scale_of_rewards_and_dr_grpo_does_not(
    rewards: np.ndarray, scale: float, shift: float
) -> None:
    if np.ptp(rewards) == 0:
        return
    moved = (scale * rewards + shift).astype(np.float32)
    np.testing.assert_allclose(of(advantages.grpo, moved), of(advantages.grpo, rewards), atol=1e-3)
    np.testing.assert_allclose(of(advantages.dr_grpo, moved), scale * of(advantages.dr_grpo, rewards), atol=1e-3)


def test_grpo_favours_prompts_with_similar_rewards_and_dr_grpo_does_not() -> None:
    nearly_all_right, half = np.asarray([0] + [1] * 7, np.float32), np.asarray([0, 1] * 4, np.float32)
    for name, larger in (("grpo", True), ("dr_grpo", False)):
        # The sum of |A| divided by p (1 - p), the weight of the prompt itself in its gradient.
        shares = [
            np.abs(of(getattr(advantages, name), group)).sum() / (group.mean() * (1 - group.mean()))
            for group in (nearly_all_right, half)
        ]
        assert (shares[0] > 1.2 * shares[1]) == larger


@given(REWARDS, st.integers(1, 15))
def test_reinforce_pp_has_mean_0_and_deviation_1_over_the_batch(rewards: np.ndarray, split: int) -> None:
    """However the batch is divided into groups."""
    found = of_batch(*filter(len, (rewards[:split], rewards[split:])))
    wide = rewards.astype(np.float64)
    np.testing.assert_allclose(found, (wide - wide.mean()) / (wide.std(ddof=1) + 1e-6), atol=1e-4)
    if np.ptp(rewards):
        assert found.mean() == pytest.approx(0, abs=1e-5) and found.std(ddof=1) == pytest.approx(1, abs=1e-3)


def test_reinforce_pp_learns_from_groups_of_equal_rewards() -> None:
    solved, unsolved = np.ones(4, np.float32), np.zeros(4, np.float32)
    assert np.abs(of_batch(solved, unsolved)).min() > 0.9
    assert np.abs(np.concatenate([of(advantages.dr_grpo, group) for group in (solved, unsolved)])).max() == 0


ANY_REWARD = (
    st.floats(-(2.0**127), 2.0**127, width=32) | st.floats(-2, 2, width=32) | st.integers(1, 99).map(lambda i: i / 100)
)
OF_THE_GROUP = (advantages.dr_grpo, advantages.grpo, advantages.rloo, advantages.max_rl)


@pytest.mark.parametrize("advantage", OF_THE_GROUP)
@given(ANY_REWARD, st.integers(1, 70), st.integers(1, 3))
def test_equal_rewards_have_advantages_of_exactly_0(
    advantage: Callable[[GroupView], torch.Tensor], reward: float, size: int, seats: int
) -> None:
    """At any scale and size, for which the float32 mean of equal rewards may differ from them."""
    reward = abs(reward) if advantage is advantages.max_rl else reward
    found = advantage(GroupView.of([reward] * size))
    assert found.shape == (size,) and not found.any()
    # With seats each seat is a group: its rewards are equal, whatever another gets.
    names = [place % seats for place in range(size)]
    view = GroupView.of([reward if name else 0.0 for name in names], seats=list(map(str, names)))
    by_seat = advantages.BySeat(advantage)(view)
    assert isinstance(by_seat, torch.Tensor) and not by_seat.any()


@given(ANY_REWARD, st.integers(1, 70), st.integers(1, 5))
def test_a_batch_of_equal_rewards_has_advantages_of_exactly_0(reward: float, size: int, groups: int) -> None:
    assert not of_batch(*[np.full(size, reward, np.float32)] * groups).any()


@given(ANY_REWARD, st.integers(1, 5), st.integers(1, 40), st.floats(-1, 1, width=32))
def test_gae_of_equal_returns_and_values_is_exactly_0(reward: float, branches: int, length: int, value: float) -> None:
    """With gamma and lam of 1, also for tokens that several branches share."""
    group = GroupView.of(
        [reward] * branches,
        lengths=[length, *[1] * (branches - 1)],
        rollouts=torch.zeros(branches, dtype=torch.int32),
        forks=[None, *[(0, 1)] * (branches - 1)],
        turn_lengths=[torch.tensor([length]), *[torch.tensor([0, 1])] * (branches - 1)],
        turn_rewards=[torch.zeros(1), *[torch.zeros(2)] * (branches - 1)],
        columns={"value": [torch.full((n,), value) for n in (length, *[1] * (branches - 1))]},
    )
    assert not any(values.any() for of_group in advantages.gae([group, group]) for values in of_group.values)


@given(st.floats(-100, 100, width=32), st.floats(0, 0.95))
def test_a_seat_baseline_that_has_converged_to_equal_rewards_gives_advantages_of_exactly_0(
    reward: float, decay: float
) -> None:
    baselines = advantages.SeatBaselines(decay)
    for _ in range(5):
        baselines(GroupView.of([reward] * 100))
    assert not baselines(GroupView.of([reward] * 8)).any()


@given(st.lists(st.tuples(st.sampled_from(["white", "black"]), st.integers(-4, 4)), max_size=30), st.floats(0, 0.99))
def test_seat_baselines(outcomes: list[tuple[str, int]], decay: float) -> None:
    baselines, expected, running = advantages.SeatBaselines(decay), [], {"white": 0.0, "black": 0.0}
    for seat, reward in outcomes:
        running[seat] = decay * running[seat] + (1 - decay) * reward
        expected.append(reward - running[seat])
    found = []
    for start in range(0, len(outcomes), 3):  # groups of up to three sequences, with a restart between them
        group = outcomes[start : start + 3]
        view = GroupView.of([float(reward) for _, reward in group], seats=[seat for seat, _ in group], task="chess")
        found += baselines(view).tolist()
        state, baselines = baselines.state_dict(), advantages.SeatBaselines(decay)
        baselines.load_state_dict(state)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_seat_baselines_remove_the_advantage_of_a_seat_itself() -> None:
    """White wins three of four games whatever it does: the mean of a group would reward that."""
    baselines, white, black = advantages.SeatBaselines(), [], []
    for game in range(400):
        result = -1.0 if game % 4 == 0 else 1.0
        advantage = baselines(GroupView.of([result, -result], seats=["white", "black"])).tolist()
        white.append(advantage[0])
        black.append(advantage[1])
    assert abs(np.mean(white[200:])) < 0.05 and abs(np.mean(black[200:])) < 0.05
    assert advantages.dr_grpo(GroupView.of([1.0, -1.0])).tolist() == [1.0, -1.0]


@given(SEEDS, st.integers(0, 70), st.floats(0, 1), st.floats(0, 1), st.floats(-1, 1))
def test_gae(seed: int, n: int, gamma: float, lam: float, last: float) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=n), rng.normal(size=n)
    expected, following = np.zeros(n), 0.0
    for t in reversed(range(n)):
        delta = rewards[t] + gamma * (values[t + 1] if t + 1 < n else last) - values[t]
        expected[t] = following = delta + gamma * lam * following
    found = generalised_advantages(torch.from_numpy(rewards), torch.from_numpy(values), gamma, lam, last).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-9)


@given(SEEDS, st.integers(1, 30))
def test_gae_ranges_from_the_one_step_error_to_the_return_minus_the_value(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = torch.from_numpy(rng.normal(size=n)), torch.from_numpy(rng.normal(size=n))
    returns = rewards.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(generalised_advantages(rewards, values), returns - values)
    after = torch.cat([values[1:], torch.zeros(1, dtype=torch.float64)])
    torch.testing.assert_close(generalised_advantages(rewards, values, lam=0.0), rewards + after - values)
    torch.testing.assert_close(generalised_advantages(rewards, returns), torch.zeros_like(returns), atol=1e-9, rtol=0)


def test_gae_places_turn_rewards_at_the_ends_of_turns_and_the_episode_reward_at_the_last_token() -> None:
    view = GroupView.of(
        [2.0],
        lengths=[5],
        turn_lengths=[torch.tensor([2, 3], dtype=torch.int32)],
        turn_rewards=[torch.tensor([0.5, 0.25])],
        columns={"value": [torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0])]},
    )
    (found,) = group_advantages(view)
    assert found.tolist() == [1.75, 1.75, 0.25, 0.25, 0.25]  # the sum of later rewards, minus the value
    (found,) = group_advantages(view, lam=0.0)
    assert found.tolist() == [0.0, 1.5, 0.0, 0.0, 0.25]
    with pytest.raises(ValueError, match="'value'"):
        advantages.gae([GroupView.of([1.0])])


@given(SEEDS, st.integers(1, 4), st.floats(0, 1))
def test_gae_is_normalised_over_the_tokens_of_the_batch(seed: int, groups: int, lam: float) -> None:
    rng, views = np.random.default_rng(seed), []
    for _ in range(groups):
        lengths = rng.integers(1, 9, rng.integers(1, 4)).tolist()
        values = [torch.from_numpy(rng.normal(size=n).astype(np.float32)) for n in lengths]
        rewards = rng.normal(size=len(lengths)).tolist()
        views.append(GroupView.of(rewards, lengths=lengths, columns={"value": values}))
    plain = np.concatenate([np.concatenate(group_advantages(view, lam=lam)) for view in views])
    spread = plain.std(ddof=1) if len(plain) > 1 else 1.0
    found = advantages.gae(views, lam=lam)
    assert [len(of_group.values) for of_group in found] == [len(view) for view in views]
    whole = np.concatenate([np.concatenate(of_group.values) for of_group in found])
    np.testing.assert_allclose(whole, (plain - plain.mean()) / (spread + 1e-6), atol=1e-4)


@given(SEEDS, st.floats(0, 1), st.floats(0, 1))
def test_gae_of_a_shared_token_is_the_mean_over_its_branches(seed: int, gamma: float, lam: float) -> None:
    """Against a direct computation: each sequence is followed from its first token to its end."""
    rng = np.random.default_rng(seed)
    sequences: list[list[int]] = []
    forks: list[tuple[int, int] | None] = []
    turns = [rng.normal(size=(rng.integers(1, 4), 1)) for _ in range(40)]
    """For each turn, the values of its sampled tokens."""
    given, fresh = rng.normal(size=40).round(1), iter(range(40))
    for place in range(rng.integers(1, 5)):
        origin = int(rng.integers(0, place)) if place else None
        shared = 0 if origin is None else int(rng.integers(1, len(sequences[origin]) + 1))
        begins = [] if origin is None else sequences[origin][:shared]
        forks.append(None if origin is None else (origin, shared))
        sequences.append(begins + [next(fresh) for _ in range(rng.integers(1, 4))])
    rewards = rng.normal(size=len(sequences)).round(1)
    seen: dict[tuple[int, int], list[float]] = {}
    for of_sequence, reward in zip(sequences, rewards, strict=True):
        tokens = [(turn, i) for turn in of_sequence for i in range(len(turns[turn]))]
        value = [float(turns[turn][i, 0]) for turn, i in tokens]
        following, after = 0.0, 0.0
        for t in reversed(range(len(tokens))):
            turn, i = tokens[t]
            r = given[turn] * (i == len(turns[turn]) - 1) + reward * (t == len(tokens) - 1)
            following = r + gamma * after - value[t] + gamma * lam * following
            after = value[t]
            seen.setdefault(tokens[t], []).append(following)
    own = [
        set(of_sequence[fork[1] :] if fork else of_sequence) for of_sequence, fork in zip(sequences, forks, strict=True)
    ]
    lengths = [[len(turns[turn]) * (turn in mine) for turn in s] for s, mine in zip(sequences, own, strict=True)]
    columns = [
        torch.from_numpy(np.concatenate([turns[turn][:, 0] for turn in s if turn in mine]).astype(np.float32))
        for s, mine in zip(sequences, own, strict=True)
    ]
    other = GroupView.of([1.0], columns={"value": [torch.zeros(1)]})
    view = GroupView.of(
        [*other.rewards.tolist(), *rewards.tolist()],
        lengths=[1, *map(sum, lengths)],
        rollouts=torch.tensor([0, *[1] * len(sequences)], dtype=torch.int32),
        forks=[None, *forks],
        turn_lengths=[torch.ones(1, dtype=torch.int32), *(torch.tensor(n, dtype=torch.int32) for n in lengths)],
        turn_rewards=[torch.zeros(1), *(torch.tensor(given[s], dtype=torch.float32) for s in sequences)],
        columns={"value": [torch.zeros(1), *columns]},
    )
    first, *found = group_advantages(view, gamma, lam)
    assert first.tolist() == [1.0]
    for s, mine, values in zip(sequences, own, found, strict=True):
        expected = [np.mean(seen[turn, i]) for turn in s if turn in mine for i in range(len(turns[turn]))]
        np.testing.assert_allclose(values.numpy(), expected, atol=1e-4)


@given(SEEDS, st.integers(1, 30), st.floats(0, 2))
def test_clipped_value_loss(seed: int, n: int, clip: float) -> None:
    rng = np.random.default_rng(seed)
    values, old, returns = rng.normal(size=(3, n))
    error = (values - returns) ** 2
    bound = (np.clip(values, old - clip, old + clip) - returns) ** 2 if clip else error
    found = clipped_value_loss(torch.from_numpy(values), torch.from_numpy(old), torch.from_numpy(returns), clip)
    np.testing.assert_allclose(found.loss.numpy(), 0.5 * np.maximum(error, bound), atol=1e-12)
    assert (found.clipped.numpy() == (bound > error)).all()


@given(SEEDS, st.floats(0.01, 1))
def test_the_value_loss_stops_at_the_clip_and_pulls_values_back_from_beyond(seed: int, clip: float) -> None:
    rng = np.random.default_rng(seed)
    old, returns, moved = torch.from_numpy(rng.normal(size=(3, 50)))
    values = (old + moved).requires_grad_()
    clipped_value_loss(values, old, returns, clip).loss.sum().backward()
    assert values.grad is not None
    error, beyond = values.detach() - returns, moved.abs() > clip
    torch.testing.assert_close(values.grad[~beyond], error[~beyond])
    assert (values.grad[beyond & (error * moved < 0)] == 0).all(), "its return is even further away"
    back = beyond & (values.grad != 0)
    assert (torch.sign(values.grad[back]) == torch.sign(moved[back])).all()
    torch.testing.assert_close(values.grad[back], error[back])
    far = beyond & (error * moved > 0) & ((returns - old) * moved < 0)
    assert back[far].all(), "it moved away from its return"
    again = (old + moved).requires_grad_()
    clipped_value_loss(again, old, returns, clip=0).loss.sum().backward()
    torch.testing.assert_close(again.grad, again.detach() - returns)


@given(SEEDS, st.integers(2, 40))
def test_explained_variance(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    values, returns = rng.normal(size=(2, n))
    expected = 1 - np.var(returns - values) / np.var(returns)
    as_tensors = torch.from_numpy(values), torch.from_numpy(returns)
    np.testing.assert_allclose(explained_variance(*as_tensors), expected, rtol=1e-6)
    assert explained_variance(as_tensors[1] + 3, as_tensors[1]) == pytest.approx(1)
    assert explained_variance(torch.full((n,), 0.3), as_tensors[1]) == pytest.approx(0)
    assert explained_variance(as_tensors[0], torch.ones(n)) == 0


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20), st.integers(1, 100), st.integers(1, 100))
def test_overlong_penalty(lengths: list[int], buffer: int, free: int) -> None:
    limit = free + buffer
    expected = [0.0 if n <= free else -1.0 if n >= limit else (free - n) / buffer for n in lengths]
    found = advantages.overlong_penalty(torch.tensor(lengths), limit, buffer).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    order = np.argsort(lengths)
    assert (np.diff(found[order]) <= 0).all()


def test_positives_only() -> None:
    assert advantages.positives_only(torch.tensor([-1.0, 0.0, 2.0])).tolist() == [0.0, 0.0, 2.0]
