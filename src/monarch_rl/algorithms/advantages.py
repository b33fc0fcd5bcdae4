"""Advantages: how much better an episode was than its group. Pure functions of one group's rewards.

An advantage of your own is a function of the type :data:`Advantage`: give it to the trainer as
``TrainerPlan.advantage``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

Advantage = Callable[[torch.Tensor], torch.Tensor]
"""From the rewards of a group, float[G], to the advantage of each of its episodes, float[G]."""
AdvantageName = Literal["grpo", "dr_grpo"]


def grpo(rewards: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``(R - mean) / (std + eps)`` in the group, std over the G - 1 degrees of freedom (arXiv:2402.03300).

    Args:
        rewards: float[G].

    Returns:
        float[G]; zeros for a group of one or of equal rewards.
    """
    # In float64: the rounding error of the mean of equal rewards must stay far below eps.
    wide = rewards.double()
    centred = wide - wide.mean()
    if len(wide) > 1:
        centred = centred / (wide.std() + eps)
    return centred.to(rewards.dtype)


def dr_grpo(rewards: torch.Tensor) -> torch.Tensor:
    """``R - mean`` in the group: without the division by std, which favours prompts whose rewards differ little
    (arXiv:2503.20783).

    Args:
        rewards: float[G].

    Returns:
        float[G].
    """
    return rewards - rewards.mean()


ADVANTAGES: dict[AdvantageName, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo}
"""By their names in the settings."""
