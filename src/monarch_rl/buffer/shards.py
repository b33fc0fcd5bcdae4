"""Splits a batch into one shard per trainer rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from monarch_rl.algorithms.packing import SharingGroup, plan_microbatches
from monarch_rl.buffer.groups import Batch
from monarch_rl.episode.serialization import BEHAVIOUR, SerializedGroup
from monarch_rl.episode.shard import MiniBatch, PackedShard


class ShardPlan(NamedTuple):
    """How a batch is split."""

    dp_size: int
    """Number of data-parallel ranks, each of which gets its own shard."""
    tokens_per_microbatch: int
    """Maximum tokens of a micro-batch."""
    columns: tuple[str, ...] = ()
    """Columns that every rank gets of all episodes."""
    minibatches: int = 1
    """Number of mini-batches: consecutive groups, about equally many each. At most the number of groups."""


def cut(batch: Batch, plan: ShardPlan) -> list[PackedShard]:
    """One shard per rank. All have the same number of micro-batches in each mini-batch, balanced by
    :func:`plan_microbatches`.

    Raises:
        ValueError: an episode exceeds ``tokens_per_microbatch``; groups have different columns, or lack a requested
            one.
    """
    groups = batch.groups
    sharing = [SharingGroup([one.tokens for one in group.episodes], *group.tree) for group in groups]
    bounds = [number * len(groups) // plan.minibatches for number in range(plan.minibatches + 1)]
    microbatches_by_rank: list[list[list[tuple[int, int]]]] = [[] for _ in range(plan.dp_size)]
    minibatches = []
    for start, end in pairwise(bounds):
        planned = plan_microbatches(sharing[start:end], plan.tokens_per_microbatch, plan.dp_size)
        minibatches.append(_mini_batch(batch, start, end, len(planned[0])))
        for of_rank, microbatches in zip(microbatches_by_rank, planned, strict=True):
            of_rank += [[(start + group, episode) for group, episode in microbatch] for microbatch in microbatches]
    whole = PackedShard(
        version=batch.version,
        trainable_tokens=int(batch.lag_counts.sum()),
        lag_counts=batch.lag_counts,
        rewards=[group.rewards for group in groups],
        lengths=[group.lengths for group in groups],
        cut=[group.cut for group in groups],
        tasks=[group.task for group in groups],
        success_rewards=[group.success_reward for group in groups],
        items=[group.task_index for group in groups],
        group_ids=[(group.group_id, group.attempt) for group in groups],
        parts=[[episode.parts for episode in group.episodes] for group in groups],
        seats=[[episode.seat for episode in group.episodes] for group in groups],
        plays=[group.rollouts for group in groups],
        forks=[[episode.fork for episode in group.episodes] for group in groups],
        turn_lengths=[[[tokens for tokens, _ in episode.turns] for episode in group.episodes] for group in groups],
        turn_rewards=[[[reward for _, reward in episode.turns] for episode in group.episodes] for group in groups],
        uses=batch.uses,
        minibatches=minibatches,
        column_names=_column_names(groups, plan.columns),
        columns={name: [group.column(name) for group in groups] for name in plan.columns},
        places=[],
        data=b"",
        oldest=batch.oldest,
    )

    def data(place: tuple[int, int]) -> bytes | memoryview:
        group, episode = place
        return groups[group].episodes[episode].data

    return [
        replace(
            whole,
            places=[[(*place, len(data(place))) for place in microbatch] for microbatch in microbatches],
            data=b"".join(data(place) for microbatch in microbatches for place in microbatch),
        )
        for microbatches in microbatches_by_rank
    ]


def _mini_batch(batch: Batch, start: int, end: int, microbatches: int) -> MiniBatch:
    """The mini-batch of groups ``start`` to ``end - 1``."""
    episodes = [episode for group in batch.groups[start:end] for episode in group.episodes]
    by_version = [item for episode in episodes for item in episode.tokens_by_version.items()]
    trained = (tokens for version, tokens in by_version if batch.oldest is None or version >= batch.oldest)
    return MiniBatch(microbatches, sum(trained), len(episodes))


def _column_names(groups: Sequence[SerializedGroup], needed: Sequence[str]) -> tuple[str, ...]:
    """Names of the columns that all groups have. Raises ValueError if groups have different ones, or lack one of the
    ``needed``, which training reads."""
    names = groups[0].columns if groups else ()
    for group in groups:
        missing = [name for name in needed if name not in (*group.columns, BEHAVIOUR)]
        if missing or group.columns != names:
            wanted = f"training reads column {missing[0]}" if missing else f"another group has {list(names)}"
            raise ValueError(
                f"group {group.group_id} of task {group.task!r} has columns {list(group.columns)}, but {wanted}: a "
                "stage must fill the same columns in every group"
            )
    return names
