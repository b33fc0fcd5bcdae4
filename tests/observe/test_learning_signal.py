"""Steps without a learning signal: each spell of them is reported once, with its cause and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.observe.learning_signal import SPELL_STEPS, LearningSignal


def metrics(groups: Sequence[Sequence[float]], grad_norm: float = 0.0, advantage_std: float = 0.0) -> dict[str, float]:
    """Metrics of a step with these rewards, as ``trainer/metrics.py`` computes them: in float32."""
    rewards = np.asarray(groups, np.float32)
    return {
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "reward/equal_groups_share": float(np.mean(np.ptp(rewards, axis=1) == 0)),
        "reward/all_right_share": float(np.mean(np.all(rewards >= 1, axis=1))),
        "reward/all_wrong_share": float(np.mean(np.all(rewards < 1, axis=1))),
        "advantage/std": advantage_std,
        "trainer/grad_norm": grad_norm,
        "trainer/entropy": 0.01,
    }


def report(values: dict[str, float], signal: LearningSignal | None = None) -> str:
    """What is reported of a spell of such steps."""
    signal = signal or LearningSignal(16)
    *before, message = [signal.note(values) for _ in range(SPELL_STEPS)]
    assert not any(before)
    return message


DIFFERENT = metrics([[0, 1]] * 16, grad_norm=0.1, advantage_std=0.5)


@pytest.mark.parametrize(
    "groups, facts",
    [
        ([[0.0] * 4] * 16, ("all 16 groups", "(0)", "too hard", "format", "rollouts/", "run.supervised")),
        ([[-1.0] * 4] * 16, ("all 16 groups", "(-1)", "too hard")),
        ([[1.0] * 4] * 16, ("all 16 groups", "(1)", "too easy")),
        ([[0.43] * 7] * 16, ("all 16 groups", "(0.43)", "does not depend on the answer")),
        ([[1.0] * 4] * 4 + [[0.0] * 4] * 12, ("25% of the groups right", "75% wrong", "alike", "temperature")),
        ([[0.1 * number] * 4 for number in range(16)], ("all 16 groups", "alike", "does not depend on the answer")),
    ],
    ids=["all 0", "all negative", "all 1", "a constant", "right or wrong", "one per group"],
)
def test_equal_rewards_are_reported_with_what_they_say_about_task_and_reward(
    groups: list[list[float]], facts: tuple[str, ...]
) -> None:
    values = metrics(groups)
    message = report(values)
    assert all(fact in message for fact in (*facts, f"{SPELL_STEPS} steps", "nothing is learned")), message
    shares = ("_right_share", "_wrong_share")
    without = report({name: value for name, value in values.items() if not name.endswith(shares)})
    facts = tuple(fact for fact in facts if "%" not in fact)
    assert all(fact in without for fact in facts) and "right" not in without, "a task without a success_reward"


@given(st.lists(st.booleans(), max_size=30))
def test_each_spell_is_reported_once_at_its_third_step(has_signal: list[bool]) -> None:
    signal = LearningSignal(16)
    reported = [bool(signal.note(DIFFERENT if has else metrics([[0, 0]] * 16))) for has in has_signal]
    expected: list[bool] = []
    for has, spell in groupby(has_signal):
        expected += [not has and place == SPELL_STEPS - 1 for place, _ in enumerate(spell)]
    assert reported == expected


def test_rounding_errors_of_advantages_are_no_signal() -> None:
    assert "nothing" in report(metrics([[0.43] * 7] * 16, grad_norm=1e-9, advantage_std=3e-8))


def test_advantages_beyond_the_group_are_a_signal_although_groups_have_equal_rewards() -> None:
    """A critic, or a comparison with other groups."""
    assert not report(metrics([[1.0] * 4] * 4 + [[0.0] * 4] * 12, grad_norm=0.1, advantage_std=0.4))


def test_a_gradient_that_is_not_of_the_rewards_is_told_apart() -> None:
    """A KL to a reference, or supervised rows."""
    message = report(metrics([[0.0] * 4] * 16, grad_norm=0.25))
    assert "equal rewards" in message and "0.25" in message and "nothing is learned" not in message


def test_rewards_that_are_not_read_are_not_reported() -> None:
    signal = LearningSignal(16)
    signal.reads_rewards = False
    assert not report(metrics([[0.0] * 4] * 16, grad_norm=0.25), signal)


def test_a_gradient_of_zero_is_reported_whatever_the_rewards() -> None:
    message = report(DIFFERENT | {"trainer/grad_norm": 0.0})
    assert "gradient" in message and "trainer/clipped" in message and "equal rewards" not in message
    assert "rewards differ" in message
    distillation = LearningSignal(16)
    distillation.reads_rewards = False
    for message in (report({"trainer/grad_norm": 0.0}), report(DIFFERENT | {"trainer/grad_norm": 0.0}, distillation)):
        assert "gradient" in message and "rewards differ" not in message


def test_rewards_without_a_right_and_a_wrong_one_are_reported_by_their_value() -> None:
    values = metrics([[0.5] * 4] * 16)
    del values["reward/all_right_share"], values["reward/all_wrong_share"]
    message = report(values)
    assert "0.5" in message and "nothing is learned" in message


def test_groups_that_were_dropped_for_equal_rewards_are_counted_in_the_report() -> None:
    message = report(metrics([[0.0] * 4] * 16), LearningSignal(16, dropped_groups=160))
    assert "drop-equal-rewards" in message and "160 groups" in message
