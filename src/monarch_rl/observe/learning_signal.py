"""Notices that steps are trained without a learning signal: equal rewards in every group, or a gradient of 0."""

from __future__ import annotations

import math
from collections.abc import Mapping

SPELL_STEPS = 3
"""Consecutive steps without a signal after which it is reported: one or two may be chance."""
ROUNDING = 1e-6
"""Standard deviation of rewards or advantages, relative to the rewards, below which it is a rounding error of 0."""

LOOK = "look at answers in rollouts/, or ask the model with tools/play.py"


class LearningSignal:
    """Reports each spell of steps without a learning signal once.

    Args:
        groups: groups per step.
        dropped_groups: most groups of equal rewards that ``buffer.drop_equal_rewards`` drops per step; 0 without it.
    """

    def __init__(self, groups: int, dropped_groups: int = 0) -> None:
        self._groups, self._dropped_groups = groups, dropped_groups
        self.reads_rewards = True
        """Whether advantages or objective read rewards. If not (distillation), equal ones say nothing."""
        self._spell = 0
        """Steps of the current spell."""

    def note(self, values: Mapping[str, float]) -> str:
        """Take note of a step's metrics; returns the message of the spell's third step, otherwise an empty text."""
        equal, gradient = self._equal(values), values.get("trainer/grad_norm", math.nan)
        self._spell = self._spell + 1 if equal or gradient == 0 else 0
        if self._spell != SPELL_STEPS:
            return ""
        if not equal:
            although = ""
            if self.reads_rewards and values.get("reward/equal_groups_share", 1) < 1:
                although = ", although rewards differ"
            return (
                f"the gradient has been 0 for {SPELL_STEPS} steps: nothing is learned{although}. The advantages are 0 "
                "(advantage/std), or all tokens are clipped or masked (trainer/clipped, trainer/masked_nonfinite), or "
                "the objective returns a constant"
            )
        effect = "nothing is learned"
        if gradient > 0:
            effect = f"they teach nothing, and the gradient (norm {gradient:.2g}) is not of the rewards"
        dropped = ""
        if self._dropped_groups:
            dropped = f", after buffer.drop-equal-rewards had dropped {self._dropped_groups} groups in each step"
        rewards, remedy = _diagnosis(values)
        return (
            f"all {self._groups} groups had equal rewards ({rewards}) for {SPELL_STEPS} steps{dropped}: {effect}. "
            f"{remedy}"
        )

    def _equal(self, values: Mapping[str, float]) -> bool:
        """Whether all groups of the step had equal rewards, so that advantages are 0: with a critic, or compared with
        other groups, they need not be."""
        if not self.reads_rewards or values.get("reward/equal_groups_share") != 1:
            return False
        return _is_zero(values.get("advantage/std", 0.0), values)


def _is_zero(deviation: float, values: Mapping[str, float]) -> bool:
    return deviation <= ROUNDING * max(1.0, abs(values["reward/mean"]))


def _diagnosis(values: Mapping[str, float]) -> tuple[str, str]:
    """The rewards in words, and what to do about them."""
    mean = values["reward/mean"]
    # Without a success_reward these metrics are missing. If all rewards are equal, 0 and 1 most likely mean the same.
    wrong = values.get("reward/all_wrong_share", float(mean <= 0))
    right = values.get("reward/all_right_share", float(mean >= 1))
    if not _is_zero(values["reward/std"], values):  # the groups differ from each other
        entropy = values.get("trainer/entropy", math.nan)
        rewards = "another one in each group"
        if "reward/all_right_share" in values:
            rewards = f"{right:.0%} of the groups right, {wrong:.0%} wrong"
        return rewards, (
            f"Either the episodes of a group are all alike (trainer/entropy {entropy:.2g}, --rollout.temperature), or "
            f"the reward does not depend on the answer: {LOOK}"
        )
    reward = f"{mean:.4g}"
    if right == 1:
        return reward, f"The task is too easy for the model, or the reward accepts every answer: {LOOK}"
    if wrong == 1 and mean <= 0:
        return reward, (
            "The task is too hard for the model, or its answers have another format than the reward expects: "
            f"{LOOK}, begin with easier items, or warm up with run.supervised"
        )
    return reward, f"The reward does not depend on the answer: {LOOK}"
