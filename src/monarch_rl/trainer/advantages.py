"""The advantages of a batch. Every trainer rank has the outcomes of all groups, and computes the advantages of all."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from monarch_rl.algorithms.advantages import overlong_penalty, part
from monarch_rl.algorithms.functions import Columns, is_of_batch
from monarch_rl.algorithms.group_view import Advantage, GroupView, PerToken, PerTurn
from monarch_rl.algorithms.returns import branch_means, paths
from monarch_rl.episode.shard import PackedShard
from monarch_rl.trainer.loss_settings import LossSettings
from monarch_rl.user_code import place_of

BatchAdvantages = list[list[torch.Tensor]]
"""For each group and sequence: a scalar, or float32[sampled tokens]. Sequences with NaN are not trained."""


def group_views(batch: PackedShard) -> list[GroupView]:
    """The input of an advantage function for each group.

    Its tensors are copies, because an advantage may write into its arguments, and metrics and the critic read the batch
    afterwards. They are views of one tensor for all groups, because many small ones take longer than any advantage.
    """
    if not batch.rewards:
        return []
    sizes = [len(of_group) for of_group in batch.rewards]

    def by_group(values: list[np.ndarray]) -> Sequence[torch.Tensor]:
        views: Sequence[torch.Tensor] = torch.from_numpy(np.concatenate(values)).split(sizes)
        return views

    rewards, lengths, cut = by_group(batch.rewards), by_group(batch.lengths), by_group(batch.cut)
    rollouts = by_group(batch.plays)
    turn_lengths = _by_turn(batch.turn_lengths, torch.int32)
    turn_rewards = _by_turn(
        [[[reward or 0.0 for reward in turns] for turns in of_group] for of_group in batch.turn_rewards], torch.float32
    )
    return [
        GroupView(
            rewards=rewards[group],
            lengths=lengths[group],
            cut=cut[group],
            rollouts=rollouts[group],
            seats=list(batch.seats[group]),
            forks=list(batch.forks[group]),
            parts=[dict(parts) for parts in batch.parts[group]],
            turn_lengths=turn_lengths[group],
            turn_rewards=turn_rewards[group],
            columns=Columns({name: list(map(torch.tensor, column[group])) for name, column in batch.columns.items()}),
            task=batch.tasks[group],
            item=batch.items[group],
        )
        for group in range(len(sizes))
    ]


def _by_turn(values: Sequence[Sequence[Sequence[float]]], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """For each group and sequence, a tensor with a value for each turn."""
    joined = torch.tensor(list(chain.from_iterable(chain.from_iterable(values))), dtype=dtype)
    views = iter(joined.split([len(turns) for of_group in values for turns in of_group]))
    return [list(islice(views, len(of_group))) for of_group in values]


def with_overlong_penalty(group: GroupView, loss: LossSettings) -> GroupView:
    """The group with the rewards of long answers lowered, if ``overlong_limit`` is set. The length of a branch includes
    the tokens before its fork."""
    if not loss.overlong_limit:
        return group
    lengths = torch.tensor([len(path.tokens) for path in paths(group)], dtype=torch.int32)
    penalty = loss.overlong_penalty * overlong_penalty(lengths, loss.overlong_limit, loss.penalised_tokens)
    return replace(group, rewards=group.rewards + penalty)


@torch.no_grad()
def advantages_of(groups: Sequence[GroupView], advantage: Advantage) -> BatchAdvantages:
    """The advantages of a batch. A sequence with a non-finite column is hidden from the function. Its advantage is NaN,
    which excludes it from the loss (``finite.py``).

    Raises:
        ValueError: the function returned a wrong shape or a non-finite value; names the function and where it is
            defined.
    """
    finite = [_finite_places(group) for group in groups]
    chosen = zip(groups, finite, strict=True)
    shown = [group if len(places) == len(group) else part(group, places) for group, places in chosen if places]
    returned = iter(_returned(shown, advantage))
    advantages: BatchAdvantages = []
    for group, places in zip(groups, finite, strict=True):
        of_group = [torch.tensor(torch.nan)] * len(group)
        for place, values in zip(places, next(returned) if places else [], strict=True):
            of_group[place] = values
        advantages.append(of_group)
    return advantages


def _finite_places(group: GroupView) -> list[int]:
    """Indices of sequences whose columns are finite, including those of the sequences that they were forked from."""
    places = range(len(group))
    if all(torch.cat(list(values)).isfinite().all() for values in group.columns.values() if len(values)):
        return list(places)
    finite = [all(bool(values[place].isfinite().all()) for values in group.columns.values()) for place in places]
    for place, (fork, rollout) in enumerate(zip(group.forks, group.rollouts, strict=True)):
        if fork is not None:
            finite[place] &= finite[int((group.rollouts == rollout).nonzero()[fork[0]])]
    return [place for place in places if finite[place]]


def _returned(groups: Sequence[GroupView], advantage: Advantage) -> BatchAdvantages:
    """The checked advantages of each group; see :func:`advantages_of`."""
    if not groups:
        return []
    call: Callable[[Any], Any] = advantage
    returned = call(groups) if is_of_batch(advantage) else [call(group) for group in groups]
    if not isinstance(returned, Sequence) or len(returned) != len(groups):
        raise ValueError(
            f"the advantage {place_of(advantage)} returned {_described(returned)} for a batch of {len(groups)} groups: "
            "return a list with the advantages of each group"
        )
    return [_checked(values, group, advantage) for values, group in zip(returned, groups, strict=True)]


def _checked(values: Any, group: GroupView, advantage: Advantage) -> list[torch.Tensor]:
    """One tensor per sequence: a scalar or float32[length]."""
    if isinstance(values, torch.Tensor) and values.shape == (len(group),) and values.isfinite().all():
        return _shared(list(values.float().unbind()), group)
    lengths: list[tuple[int, ...]] = [()] * len(group)
    kind = "sequence"
    if isinstance(values, PerTurn):
        lengths, kind, values = [tuple(turns.shape) for turns in group.turn_lengths], "turn", values.values
    elif isinstance(values, PerToken):
        lengths, kind, values = [(int(length),) for length in group.lengths], "sampled token", values.values
    try:
        by_sequence = [torch.as_tensor(of_sequence, dtype=torch.float32) for of_sequence in values]
    except (TypeError, ValueError) as error:
        raise _refused(f"{_described(values)} ({error})", group, advantage) from error
    shapes = [tuple(of_sequence.shape) for of_sequence in by_sequence]
    if shapes != lengths:
        problem = f"shapes {shapes!s:.100}, not {lengths!s:.100}: one value for each {kind}"
        raise _refused(problem, group, advantage)
    for number, of_sequence in enumerate(by_sequence):
        if not of_sequence.isfinite().all():
            rewards = f"{group.rewards.tolist()!s:.200}"
            problem = f"{of_sequence.tolist()!s:.100} for sequence {number} of a group with rewards {rewards}"
            raise _refused(problem, group, advantage)
    if kind == "turn":
        turns = zip(by_sequence, group.turn_lengths, strict=True)
        return [of_turns.repeat_interleave(lengths.long()) for of_turns, lengths in turns]
    return by_sequence if kind == "sampled token" else _shared(by_sequence, group)


def _shared(by_sequence: list[torch.Tensor], group: GroupView) -> list[torch.Tensor]:
    """The same values if there are no branches. Otherwise float32[length] for each sequence: a token that several
    branches begin with gets the mean of their values."""
    if not any(group.forks):
        return by_sequence
    found = list(by_sequence)
    for rollout in group.rollouts.unique():
        places = (group.rollouts == rollout).nonzero().flatten().tolist()
        turns = [group.turn_lengths[place] for place in places]
        values = torch.stack([by_sequence[place] for place in places])
        means = branch_means(values, [group.forks[place] for place in places], [len(lengths) for lengths in turns])
        for place, mean, lengths in zip(places, means, turns, strict=True):
            found[place] = mean.repeat_interleave(lengths.long())
    return found


def _refused(returned: str, group: GroupView, advantage: Advantage) -> ValueError:
    return ValueError(
        f"the advantage {place_of(advantage)} returned {returned}. For a group of {len(group)} sequences return "
        f"float32[{len(group)}], or PerTurn or PerToken with a tensor for each of them; all must be finite"
    )


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"shape {list(shape)}" if shape is not None else f"{value!r:.100}"


def flat(advantages: BatchAdvantages) -> list[np.ndarray]:
    """For each group, float32[values]: the advantages of all its sequences, concatenated."""
    return [torch.cat([values.reshape(-1) for values in of_group]).numpy() for of_group in advantages]


def fingerprint(advantages: BatchAdvantages) -> int:
    """A 32-bit checksum of the advantages' bits."""
    return zlib.crc32(b"".join(values.tobytes() for values in flat(advantages)))
