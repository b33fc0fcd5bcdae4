"""The advantages of a batch, computed by every trainer rank for all groups, of which each rank knows the outcomes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from monarch_rl.algorithms.advantages import overlong_penalty, part
from monarch_rl.algorithms.functions import Columns, is_of_batch, place_of
from monarch_rl.algorithms.group_view import Advantage, GroupView, PerToken, PerTurn
from monarch_rl.algorithms.returns import branch_means, paths
from monarch_rl.episode.shard import BatchOutcomes
from monarch_rl.trainer.loss_settings import LossSettings

BatchAdvantages = list[list[torch.Tensor]]
"""For each group and sequence: a scalar, or float32[tokens that it drew]. NaN is not trained."""


def group_views(batch: BatchOutcomes) -> list[GroupView]:
    """What an advantage sees of each group."""
    return [_group_view(batch, number) for number in range(len(batch.rewards))]


def _group_view(batch: BatchOutcomes, group: int) -> GroupView:
    drawn, given = batch.turn_lengths[group], batch.turn_rewards[group]
    # Copies: an advantage may write into what it was given, and metrics and the critic read the batch afterwards.
    columns = {name: list(map(torch.tensor, by_group[group])) for name, by_group in batch.columns.items()}
    return GroupView(
        rewards=torch.tensor(batch.rewards[group]),
        lengths=torch.tensor(batch.lengths[group]),
        cut=torch.tensor(batch.cut[group]),
        plays=torch.tensor(batch.plays[group]),
        seats=list(batch.seats[group]),
        forks=list(batch.forks[group]),
        parts=[dict(parts) for parts in batch.parts[group]],
        turn_lengths=_by_sequence(drawn, drawn, torch.int32),
        turn_rewards=_by_sequence([[reward or 0.0 for reward in of_turns] for of_turns in given], drawn, torch.float32),
        columns=Columns(columns),
        task=batch.tasks[group],
        item=batch.items[group],
    )


def _by_sequence(
    values: Sequence[Sequence[float]], turns: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """A tensor of each sequence's turns: parts of one, because making many takes longer than anything else here."""
    joined = torch.tensor(list(chain.from_iterable(values)), dtype=dtype)
    return list(joined.split([len(of_sequence) for of_sequence in turns]))


def with_overlong_penalty(group: GroupView, loss: LossSettings) -> GroupView:
    """A group whose rewards are lowered for long answers, if ``overlong_limit`` is set. A branch is as long as all that
    was drawn on its way."""
    if not loss.overlong_limit:
        return group
    lengths = torch.tensor([len(path.tokens) for path in paths(group)], dtype=torch.int32)
    penalty = loss.overlong_penalty * overlong_penalty(lengths, loss.overlong_limit, loss.penalised_tokens)
    return replace(group, rewards=group.rewards + penalty)


@torch.no_grad()
def advantages_of(groups: Sequence[GroupView], advantage: Advantage) -> BatchAdvantages:
    """The advantages of a batch. A sequence with a column that is not finite is not shown to the function; its
    advantage is NaN, by which it is left out of the loss (``finite.py``).

    Raises:
        ValueError: the function returned another shape, or what is not finite; names it and where it is defined.
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
    """Sequences whose columns are finite, as are those of what they begin with."""
    places = range(len(group))
    if all(torch.cat(list(values)).isfinite().all() for values in group.columns.values() if len(values)):
        return list(places)
    finite = [all(bool(values[place].isfinite().all()) for values in group.columns.values()) for place in places]
    for place, (fork, play) in enumerate(zip(group.forks, group.plays, strict=True)):
        if fork is not None:
            finite[place] &= finite[int((group.plays == play).nonzero()[fork[0]])]
    return [place for place in places if finite[place]]


def _returned(groups: Sequence[GroupView], advantage: Advantage) -> BatchAdvantages:
    """Of each group that the function is shown; see :func:`advantages_of`."""
    if not groups:
        return []
    call: Callable[[Any], Any] = advantage
    returned = call(groups) if is_of_batch(advantage) else [call(group) for group in groups]
    if not isinstance(returned, Sequence) or len(returned) != len(groups):
        raise ValueError(
            f"the advantage {place_of(advantage)} returned {_described(returned)} for a batch of {len(groups)} groups: "
            "return a list with the advantages of each"
        )
    return [_checked(values, group, advantage) for values, group in zip(returned, groups, strict=True)]


def _checked(values: Any, group: GroupView, advantage: Advantage) -> list[torch.Tensor]:
    """One tensor a sequence: a scalar or float32[length]."""
    if isinstance(values, torch.Tensor) and values.shape == (len(group),) and values.isfinite().all():
        return _shared(list(values.float().unbind()), group)
    lengths: list[tuple[int, ...]] = [()] * len(group)
    kind = "sequence"
    if isinstance(values, PerTurn):
        lengths, kind, values = [tuple(turns.shape) for turns in group.turn_lengths], "turn", values.values
    elif isinstance(values, PerToken):
        lengths, kind, values = [(int(length),) for length in group.lengths], "drawn token", values.values
    try:
        by_sequence = [torch.as_tensor(of_sequence, dtype=torch.float32) for of_sequence in values]
    except (TypeError, ValueError) as error:
        raise _refused(f"{_described(values)} ({error})", group, advantage) from error
    shapes = [tuple(of_sequence.shape) for of_sequence in by_sequence]
    if shapes != lengths:
        said = f"shapes {shapes!s:.100}, not {lengths!s:.100}: one value for each {kind}"
        raise _refused(said, group, advantage)
    for number, of_sequence in enumerate(by_sequence):
        if not of_sequence.isfinite().all():
            said = f"{of_sequence.tolist()!s:.100} for sequence {number}, of rewards {group.rewards.tolist()!s:.200}"
            raise _refused(said, group, advantage)
    if kind == "turn":
        turns = zip(by_sequence, group.turn_lengths, strict=True)
        return [of_turns.repeat_interleave(drawn.long()) for of_turns, drawn in turns]
    return by_sequence if kind == "drawn token" else _shared(by_sequence, group)


def _shared(by_sequence: list[torch.Tensor], group: GroupView) -> list[torch.Tensor]:
    """The same, unless there are branches. Then of each sequence float32[length]: a token that several branches begin
    with has the mean of theirs."""
    if not any(group.forks):
        return by_sequence
    found = list(by_sequence)
    for play in group.plays.unique():
        places = (group.plays == play).nonzero().flatten().tolist()
        turns = [group.turn_lengths[place] for place in places]
        values = torch.stack([by_sequence[place] for place in places])
        means = branch_means(values, [group.forks[place] for place in places], [len(drawn) for drawn in turns])
        for place, mean, drawn in zip(places, means, turns, strict=True):
            found[place] = mean.repeat_interleave(drawn.long())
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
    """For each group, float32[values]: those of all its sequences, one after the other."""
    return [np.concatenate([values.reshape(-1).numpy() for values in of_group]) for of_group in advantages]


def fingerprint(advantages: BatchAdvantages) -> int:
    """Equal for equal bits; 32 bits."""
    return zlib.crc32(b"".join(values.tobytes() for values in flat(advantages)))
