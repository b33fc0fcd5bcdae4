"""Advantages (how much better a sequence was than others) and changes of rewards: functions of a :class:`GroupView`.

An advantage of your own is a function of the recipe, given to ``run.start(advantage=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from monarch_rl.algorithms.distillation import distillation, sequence_distillation
from monarch_rl.algorithms.functions import Columns, is_of_batch, needed_columns, needs, of_batch, place_of
from monarch_rl.algorithms.group_view import Advantage, GroupView, PerToken, PerTurn, Values, remembering
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


# -- advantages of several seats: each is compared with its own kind --------------------------------------------------


class BySeat:
    """An advantage that sees the sequences of each seat as a group of their own.

    What one seat wins another may lose, so the mean of all says nothing; and who moves first may win more often.

    Args:
        advantage: from a group to its advantages, such as ``dr_grpo``.

    Raises:
        ValueError: it takes all groups of a batch at once.
    """

    def __init__(self, advantage: Callable[[GroupView], Values]) -> None:
        if is_of_batch(advantage):
            raise ValueError(
                f"BySeat({place_of(advantage)}): it takes all groups of a batch at once, and a seat is a part of one "
                "group. Give an advantage of one group"
            )
        self.advantage = advantage
        self.needed_columns = needed_columns(advantage)

    def __call__(self, group: GroupView) -> Values:
        """What the advantage returns for each seat, in the order of the sequences.

        Raises:
            ValueError: it returned something else, or not the same kind for each seat.
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
                f"the advantage {place_of(self.advantage)} returned {names}: return one kind for all seats"
            )
        (kind,) = kinds
        return kind(found) if issubclass(kind, PerTurn | PerToken) else torch.stack(found)

    def state_dict(self) -> dict[str, Any]:
        """What the advantage keeps from batch to batch; empty if it keeps nothing."""
        advantage = remembering(self.advantage)
        return {} if advantage is None else advantage.state_dict()

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from there."""
        advantage = remembering(self.advantage)
        if advantage is not None:
            advantage.load_state_dict(state)


def part(group: GroupView, places: list[int]) -> GroupView:
    """The group as if it had these sequences alone. One whose origin is not among them begins with nothing."""
    return replace(
        group,
        rewards=group.rewards[places],
        lengths=group.lengths[places],
        cut=group.cut[places],
        plays=group.plays[places],
        seats=[group.seats[place] for place in places],
        forks=_forks_among(group, places),
        parts=[group.parts[place] for place in places],
        turn_lengths=[group.turn_lengths[place] for place in places],
        turn_rewards=[group.turn_rewards[place] for place in places],
        columns=Columns({name: [values[place] for place in places] for name, values in group.columns.items()}),
    )


def _forks_among(group: GroupView, places: list[int]) -> list[tuple[int, int] | None]:
    """The forks of some sequences, whose origins are counted among those of the play that are in ``places``."""
    of_play: dict[int, list[int]] = {}
    for place, play in enumerate(group.plays.tolist()):
        of_play.setdefault(play, []).append(place)
    chosen, found = set(places), list[tuple[int, int] | None]()
    for place in places:
        fork, play = group.forks[place], of_play[int(group.plays[place])]
        if fork is None or play[fork[0]] not in chosen:
            found.append(None)
        else:
            found.append((sum(other in chosen for other in play[: fork[0]]), fork[1]))
    return found


# -- changes of rewards and advantages that go with any objective -----------------------------------------------------


def overlong_penalty(lengths: torch.Tensor, max_tokens: int, buffer: int) -> torch.Tensor:
    """What to add to the reward of long answers: 0 up to ``max_tokens - buffer``, then falling linearly to -1 at
    ``max_tokens`` (DAPO's soft overlong punishment, arXiv:2503.14476: 16,384 + 4,096 tokens, the last 4,096 of them the
    buffer).

    Args:
        lengths: int[G], tokens that each episode drew.
        max_tokens: that an episode may draw.
        buffer: tokens over which the penalty grows.

    Returns:
        float32[G], in [-1, 0].
    """
    beyond = lengths.to(torch.float32) - (max_tokens - buffer)
    return -(beyond / buffer).clamp(0.0, 1.0)


def positives_only(advantages: torch.Tensor) -> torch.Tensor:
    """``max(A, 0)``: only what was better than its baseline teaches, float[...].

    Nothing pushes probabilities down, so entropy falls faster, and stale tokens do less harm (filtering of rejected
    samples: RAFT, arXiv:2304.06767; asymmetric REINFORCE, arXiv:2506.20520, says why off-policy learners want it).
    """
    return advantages.clamp(min=0)
