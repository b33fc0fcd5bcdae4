"""Advantages (how much better a sequence is than others) and reward shaping: functions of a :class:`GroupView`.

A custom advantage is a function in the recipe, passed to ``run.start(advantage=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch

from monarch_rl.algorithms.distillation import distillation, sequence_distillation
from monarch_rl.algorithms.functions import Columns, is_of_batch, needed_columns, needs, of_batch
from monarch_rl.algorithms.group_view import Advantage, GroupView, PerToken, PerTurn, Values, remembering
from monarch_rl.algorithms.returns import group_advantages
from monarch_rl.user_code import place_of


def grpo(group: GroupView, eps: float = 1e-6) -> torch.Tensor:
    """``(R - mean) / (std + eps)`` over the group, std with S - 1 degrees of freedom (arXiv:2402.03300).

    Returns:
        float32[S]; zeros for a group of one or of equal rewards.
    """
    return _normalised(group.rewards, eps)


def _normalised(values: torch.Tensor, eps: float) -> torch.Tensor:
    """float32[n]: ``(x - mean) / (std + eps)``, std with n - 1 degrees of freedom."""
    # In float64, in which the mean of up to 2**29 equal float32 values is exact: they become exactly 0.
    wide = values.double()
    centred = wide - wide.mean()
    if len(wide) > 1:
        centred = centred / (wide.std() + eps)
    return centred.float()


def centred(rewards: torch.Tensor) -> torch.Tensor:
    """``R - mean``, float32[S]; exactly zeros if all rewards are equal.

    The float32 mean of equal rewards may differ from them by rounding, and Adam, which divides a gradient by its size,
    would make a full step of that.
    """
    return rewards - rewards.mean() if (rewards != rewards[:1]).any() else torch.zeros_like(rewards)


def dr_grpo(group: GroupView) -> torch.Tensor:
    """``R - mean`` over the group, without the division by std, which favours prompts whose rewards differ little
    (arXiv:2503.20783).

    Returns:
        float32[S]; zeros for equal rewards.
    """
    return centred(group.rewards)


def rloo(group: GroupView) -> torch.Tensor:
    """``R_i - mean of the others' R`` over the group: the baseline does not depend on the sequence's own reward, so the
    policy gradient is unbiased (RLOO, arXiv:2402.14740). Equals ``dr_grpo`` times S / (S - 1).

    Returns:
        float32[S]; zeros for a group of one or of equal rewards.
    """
    size = len(group)
    return centred(group.rewards) * (size / (size - 1) if size > 1 else 0.0)


def max_rl(group: GroupView) -> torch.Tensor:
    """``(R - mean) / mean`` over the group: hard prompts count more, as in the gradient of log(success rate), which it
    approximates for large groups (MaxRL, arXiv:2602.02710).

    Returns:
        float32[S]; zeros for equal rewards.

    Raises:
        ValueError: a reward is negative: the mean is then no success rate, and a negative one would flip the gradient.
    """
    if (group.rewards < 0).any():
        rewards = group.rewards.tolist()
        raise ValueError(f"max_rl divides by a group's mean reward and needs rewards of at least 0, got {rewards}")
    mean = group.rewards.mean()
    return centred(group.rewards) / mean if mean > 0 else torch.zeros_like(group.rewards)


@of_batch
def reinforce_pp(groups: Sequence[GroupView], eps: float = 1e-6) -> list[torch.Tensor]:
    """``(R - mean) / (std + eps)`` over the whole batch: there is no baseline per group, so few
    sequences per prompt are enough, and groups of equal rewards teach, too (REINFORCE++, arXiv:2501.03262).

    Returns:
        float32[S] for each group.
    """
    of_all = torch.cat([group.rewards for group in groups])
    return list(_normalised(of_all, eps).split([len(group) for group in groups]))


@needs("value")
@of_batch
def gae(groups: Sequence[GroupView], gamma: float = 1.0, lam: float = 1.0, eps: float = 1e-6) -> list[PerToken]:
    """GAE of each sampled token with the values in the column ``value`` (:func:`group_advantages`;
    :func:`~monarch_rl.algorithms.returns.generalised_advantages` has the source of the defaults), then
    ``(A - mean) / (std + eps)`` over all tokens of the batch, as in PPO's implementations (TRL, verl).

    Returns:
        For each group, float32[length] for each of S sequences.
    """
    by_group = [group_advantages(group, gamma, lam) for group in groups]
    of_all = _normalised(torch.cat([values for of_group in by_group for values in of_group]), eps)
    whole = of_all.split([int(group.lengths.sum()) for group in groups])
    return [PerToken(values.split(group.lengths.tolist())) for values, group in zip(whole, groups, strict=True)]


class SeatBaselines:
    """``R - b``, with b the running mean of rewards for task and seat: ``b <- decay b + (1 - decay) R`` for each
    sequence, before it is subtracted (role-conditioned advantages, SPIRAL, arXiv:2506.24119, whose decay is 0.95).

    In self-play a group's mean is no useful baseline: what one seat wins another loses, and seats are not equally hard.

    Args:
        decay: decay of the running mean, in [0, 1).
    """

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay
        self.baselines: dict[str, float] = {}
        """Running means by task and seat; initially 0."""

    def __call__(self, group: GroupView) -> torch.Tensor:
        """float32[S]."""
        advantages = []
        for reward, seat in zip(group.rewards.tolist(), group.seats, strict=True):
            name = f"{group.task}/{seat}"
            baseline = self.decay * self.baselines.get(name, 0.0) + (1 - self.decay) * reward
            self.baselines[name] = baseline
            # Rewards are float32: a baseline that differs by less has converged, and never becomes equal in float64.
            advantages.append(reward - baseline if np.float32(baseline) != reward else 0.0)
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
"""Factories by the names in the settings: each run creates its own advantage, because some have state."""

if TYPE_CHECKING:
    AdvantageName = str
else:
    AdvantageName = Literal[tuple(ADVANTAGES)]
"""A type for settings, whose command line and checks read its choices."""


# -- advantages for several seats: each seat is a separate group ------------------------------------------------------


class BySeat:
    """Applies an advantage to the sequences of each seat as a separate group.

    What one seat wins another may lose, so the mean over all seats is no useful baseline; and who moves first may win
    more often.

    Args:
        advantage: an advantage of one group, such as ``dr_grpo``.

    Raises:
        ValueError: the advantage takes all groups of a batch at once.
    """

    def __init__(self, advantage: Callable[[GroupView], Values]) -> None:
        if is_of_batch(advantage):
            raise ValueError(
                f"BySeat({place_of(advantage)}): it takes all groups of a batch at once, but a seat is a part of one "
                "group. Give an advantage of one group"
            )
        self.advantage = advantage
        self.needed_columns = needed_columns(advantage)

    def __call__(self, group: GroupView) -> Values:
        """The advantages of all seats, in the order of the sequences.

        Raises:
            ValueError: the advantage returned a wrong number of values, or different types for different seats.
        """
        found: list[Any] = [None] * len(group)
        kinds = set()
        for seat in dict.fromkeys(group.seats):
            places = [place for place, other in enumerate(group.seats) if other == seat]
            returned = self.advantage(part(group, places))
            kinds.add(type(returned))
            values = returned.values if isinstance(returned, PerTurn | PerToken) else returned
            if len(values) != len(places):
                raise ValueError(
                    f"the advantage {place_of(self.advantage)} returned {len(values)} values for the {len(places)} "
                    f"sequences of seat {seat!r}"
                )
            for place, value in zip(places, values, strict=True):
                found[place] = value
        if len(kinds) > 1:
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(
                f"the advantage {place_of(self.advantage)} returned {names}: return the same type for all seats"
            )
        (kind,) = kinds
        return kind(found) if issubclass(kind, PerTurn | PerToken) else torch.stack(found)

    def state_dict(self) -> dict[str, Any]:
        """State of the advantage; empty if it has none."""
        advantage = remembering(self.advantage)
        return {} if advantage is None else advantage.state_dict()

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the state of the advantage."""
        advantage = remembering(self.advantage)
        if advantage is not None:
            advantage.load_state_dict(state)


def part(group: GroupView, places: list[int]) -> GroupView:
    """The group reduced to these sequences. A branch whose origin is not among them loses its fork."""
    return replace(
        group,
        rewards=group.rewards[places],
        lengths=group.lengths[places],
        cut=group.cut[places],
        rollouts=group.rollouts[places],
        seats=[group.seats[place] for place in places],
        forks=_forks_among(group, places),
        parts=[group.parts[place] for place in places],
        turn_lengths=[group.turn_lengths[place] for place in places],
        turn_rewards=[group.turn_rewards[place] for place in places],
        columns=Columns({name: [values[place] for place in places] for name, values in group.columns.items()}),
    )


def _forks_among(group: GroupView, places: list[int]) -> list[tuple[int, int] | None]:
    """The forks of the sequences at ``places``, with origins as indices among those of the rollout in ``places``."""
    by_rollout: dict[int, list[int]] = {}
    for place, rollout in enumerate(group.rollouts.tolist()):
        by_rollout.setdefault(rollout, []).append(place)
    chosen, found = set(places), list[tuple[int, int] | None]()
    for place in places:
        fork, rollout = group.forks[place], by_rollout[int(group.rollouts[place])]
        if fork is None or rollout[fork[0]] not in chosen:
            found.append(None)
        else:
            found.append((sum(other in chosen for other in rollout[: fork[0]]), fork[1]))
    return found


# -- reward and advantage shaping for any objective -------------------------------------------------------------------


def overlong_penalty(lengths: torch.Tensor, max_tokens: int, buffer: int) -> torch.Tensor:
    """Penalty to add to the reward of long answers: 0 up to ``max_tokens - buffer``, then falling linearly to -1 at
    ``max_tokens`` (DAPO's soft overlong punishment, arXiv:2503.14476: 16,384 + 4,096 tokens, the last 4,096 of them the
    buffer).

    Args:
        lengths: int[G], sampled tokens of each episode.
        max_tokens: sampled tokens at which the penalty is -1.
        buffer: tokens over which the penalty grows.

    Returns:
        float32[G], in [-1, 0].
    """
    beyond = lengths.to(torch.float32) - (max_tokens - buffer)
    return -(beyond / buffer).clamp(0.0, 1.0)


def positives_only(advantages: torch.Tensor) -> torch.Tensor:
    """``max(A, 0)``, float[...]: only sequences better than their baseline teach.

    Nothing pushes probabilities down, so entropy falls faster, and stale tokens do less harm (filtering of rejected
    samples: RAFT, arXiv:2304.06767; asymmetric REINFORCE, arXiv:2506.20520, explains why this helps off-policy).
    """
    return advantages.clamp(min=0)
