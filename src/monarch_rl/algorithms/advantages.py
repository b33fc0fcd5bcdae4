"""Advantages: how much better a sequence was than others. Pure functions of a :class:`GroupView`.

An advantage of your own is a function of the recipe, given to ``run.start(advantage=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, cast

import torch

from monarch_rl.algorithms.distillation import distillation, sequence_distillation
from monarch_rl.algorithms.functions import needs, of_batch
from monarch_rl.algorithms.group_view import Advantage, GroupView, PerToken
from monarch_rl.algorithms.returns import group_advantages


def grpo(group: GroupView, eps: float = 1e-6) -> torch.Tensor:
    """``(R - mean) / (std + eps)`` in the group, std over the S - 1 degrees of freedom (arXiv:2402.03300).

    Returns:
        float32[S]; zeros for a group of one or of equal rewards.
    """
    return _normalised(group.rewards, eps)


def _normalised(values: torch.Tensor, eps: float) -> torch.Tensor:
    """``(x - mean) / (std + eps)``, std over the n - 1 degrees of freedom: float32[n]."""
    # In float64: the rounding error of the mean of equal values must stay far below eps.
    wide = values.double()
    centred = wide - wide.mean()
    if len(wide) > 1:
        centred = centred / (wide.std() + eps)
    return centred.float()


def dr_grpo(group: GroupView) -> torch.Tensor:
    """``R - mean`` in the group: without the division by std, which favours prompts whose rewards differ little
    (arXiv:2503.20783).

    Returns:
        float32[S].
    """
    return group.rewards - group.rewards.mean()


def rloo(group: GroupView) -> torch.Tensor:
    """``R_i - mean of the others' R`` in the group: a baseline that does not depend on the sequence's own reward, so
    the policy gradient is unbiased (RLOO, arXiv:2402.14740). It is ``dr_grpo`` times S / (S - 1).

    Returns:
        float32[S]; zeros for a group of one.
    """
    size = len(group)
    return (group.rewards - group.rewards.mean()) * (size / (size - 1) if size > 1 else 0.0)


def max_rl(group: GroupView) -> torch.Tensor:
    """``(R - mean) / mean`` in the group: hard prompts count more, as in the gradient of log(success rate), which it
    approaches as the group grows (MaxRL, arXiv:2602.02710).

    Returns:
        float32[S]; zeros where all rewards are 0.

    Raises:
        ValueError: a reward is below 0: then the mean is no success rate, and its sign would turn the gradient round.
    """
    if (group.rewards < 0).any():
        rewards = group.rewards.tolist()
        raise ValueError(f"max_rl divides by a group's mean reward and needs rewards of at least 0, got {rewards}")
    mean = group.rewards.mean()
    return (group.rewards - mean) / mean if mean > 0 else torch.zeros_like(group.rewards)


@of_batch
def reinforce_pp(groups: Sequence[GroupView], eps: float = 1e-6) -> list[torch.Tensor]:
    """``(R - mean) / (std + eps)`` over the whole batch: no group has a baseline of its own, so one sequence a prompt
    is enough, and a group of equal rewards teaches, too (REINFORCE++, arXiv:2501.03262).

    Returns:
        For each group float32[S].
    """
    of_all = torch.cat([group.rewards for group in groups])
    return list(_normalised(of_all, eps).split([len(group) for group in groups]))


@needs("value")
@of_batch
def gae(groups: Sequence[GroupView], gamma: float = 1.0, lam: float = 1.0, eps: float = 1e-6) -> list[PerToken]:
    """GAE of each drawn token with the values in the column ``value`` (:func:`group_advantages`, which has the source
    of the defaults), then ``(A - mean) / (std + eps)`` over all tokens of the batch, as in PPO's implementations (TRL,
    verl).

    Returns:
        For each group, of S sequences: float32[length].
    """
    by_group = [group_advantages(group, gamma, lam) for group in groups]
    of_all = _normalised(torch.cat([values for of_group in by_group for values in of_group]), eps)
    whole = of_all.split([int(group.lengths.sum()) for group in groups])
    return [PerToken(values.split(group.lengths.tolist())) for values, group in zip(whole, groups, strict=True)]


class SeatBaselines:
    """``R - b``, b the running mean of the rewards of the task's seat: ``b <- decay b + (1 - decay) R`` with each
    sequence, before it is subtracted (role-conditioned advantages, SPIRAL, arXiv:2506.24119, whose decay is 0.95).

    In self-play a group's mean says nothing: what one seat wins another loses, and seats are not equally hard.

    Args:
        decay: in [0, 1): larger remembers longer.
    """

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay
        self.baselines: dict[str, float] = {}
        """By task and seat; 0 at first."""

    def __call__(self, group: GroupView) -> torch.Tensor:
        """float32[S]."""
        advantages = []
        for reward, seat in zip(group.rewards.tolist(), group.seats, strict=True):
            name = f"{group.task}/{seat}"
            baseline = self.decay * self.baselines.get(name, 0.0) + (1 - self.decay) * reward
            self.baselines[name] = baseline
            advantages.append(reward - baseline)
        return torch.tensor(advantages, dtype=torch.float32)

    def state_dict(self) -> dict[str, float]:
        return dict(self.baselines)

    def load_state_dict(self, state: dict[str, float], /) -> None:
        self.baselines = dict(state)


ADVANTAGES: dict[str, Callable[[], Advantage]] = {
    "dr_grpo": lambda: dr_grpo,
    "grpo": lambda: grpo,
    "rloo": lambda: rloo,
    "max_rl": lambda: max_rl,
    "reinforce_pp": lambda: cast(Advantage, reinforce_pp),
    "seat_baselines": SeatBaselines,
    "gae": lambda: cast(Advantage, gae),
    "distillation": lambda: distillation,
    "sequence_distillation": lambda: sequence_distillation,
}
"""What makes them, by their names in the settings: a new one for each run, because some remember."""

if TYPE_CHECKING:
    AdvantageName = str
else:
    AdvantageName = Literal[tuple(ADVANTAGES)]
"""For settings, whose command line and check read its choices."""
