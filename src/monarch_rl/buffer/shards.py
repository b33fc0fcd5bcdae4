"""Splits a batch into one shard per trainer rank."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from monarch_rl.algorithms.packing import SharingGroup, plan_microbatches
from monarch_rl.buffer.groups import Batch
from monarch_rl.episode.shard import MiniBatch, PackedShard, outcomes


class ShardPlan(NamedTuple):
    """How a batch is split."""

    dp_size: int
    """Number of data-parallel ranks, each of which gets its own shard."""
    token_budget: int
    """Maximum tokens of a micro-batch."""
    columns: tuple[str, ...] = ()
    """Columns that every rank gets of all episodes."""
    minibatches: int = 1
    """Number of mini-batches: consecutive groups, about equally many each. At most the number of groups."""


def cut(batch: Batch, plan: ShardPlan) -> list[PackedShard]:
    """One shard per rank. All have the same number of micro-batches in each mini-batch, balanced by
    :func:`plan_microbatches`."""
    groups = [SharingGroup([one.tokens for one in group.episodes], *group.tree) for group in batch.groups]
    bounds = [number * len(groups) // plan.minibatches for number in range(plan.minibatches + 1)]
    microbatches_by_rank: list[list[list[tuple[int, int]]]] = [[] for _ in range(plan.dp_size)]
    minibatches = []
    for start, end in pairwise(bounds):
        planned = plan_microbatches(groups[start:end], plan.token_budget, plan.dp_size)
        minibatches.append(_mini_batch(batch, start, end, len(planned[0])))
        for of_rank, microbatches in zip(microbatches_by_rank, planned, strict=True):
            of_rank += [[(start + group, episode) for group, episode in microbatch] for microbatch in microbatches]
    shared = outcomes(batch.groups, plan.columns) | {"uses": batch.uses}

    def data(place: tuple[int, int]) -> bytes | memoryview:
        group, episode = place
        return batch.groups[group].episodes[episode].data

    return [
        PackedShard(
            **shared,
            version=batch.version,
            places=[[(*place, len(data(place))) for place in microbatch] for microbatch in microbatches],
            data=b"".join(data(place) for microbatch in microbatches for place in microbatch),
            trainable_tokens=int(batch.lag_counts.sum()),
            lag_counts=batch.lag_counts,
            oldest=batch.oldest,
            minibatches=minibatches,
        )
        for microbatches in microbatches_by_rank
    ]


def _mini_batch(batch: Batch, start: int, end: int, microbatches: int) -> MiniBatch:
    """The mini-batch of groups ``start`` to ``end - 1``."""
    episodes = [episode for group in batch.groups[start:end] for episode in group.episodes]
    by_version = [item for episode in episodes for item in episode.tokens_by_version.items()]
    trained = (tokens for version, tokens in by_version if batch.oldest is None or version >= batch.oldest)
    return MiniBatch(microbatches, sum(trained), len(episodes))


class SplitBatch:
    """Caches the shards of the batch being taken, so that all ranks get shards of the same split."""

    def __init__(self) -> None:
        self._requested: tuple[int, ShardPlan] | None = None
        self._shards: list[PackedShard] = []

    def shards(self, batch: Batch, plan: ShardPlan) -> list[PackedShard]:
        """One shard per rank. Raises ValueError if ranks request different versions or plans."""
        requested = batch.version, plan
        if self._requested is None:
            self._requested, self._shards = requested, cut(batch, plan)
        elif self._requested != requested:
            raise ValueError(
                f"trainer ranks disagree on version and {ShardPlan._fields}: first {self._requested}, now {requested}"
            )
        return self._shards

    def clear(self) -> None:
        """Forget the shards, once the batch is trained."""
        self._requested, self._shards = None, []
