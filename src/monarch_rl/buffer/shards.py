"""A batch cut into the shares of the trainer ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from monarch_rl.algorithms.packing import SharingGroup, plan_microbatches
from monarch_rl.buffer.groups import Batch
from monarch_rl.episode.shard import MiniBatch, PackedShard, outcomes


class ShardPlan(NamedTuple):
    """How a batch is cut."""

    dp_size: int
    """Ranks that get shares of their own."""
    token_budget: int
    """Tokens of a micro-batch."""
    columns: tuple[str, ...] = ()
    """Those that every rank gets of all episodes."""
    minibatches: int = 1
    """Parts of about equally many groups, in order; not more than there are groups."""


def cut(batch: Batch, way: ShardPlan) -> list[PackedShard]:
    """One shard a rank. All have the same number of micro-batches in each mini-batch, balanced: see
    :func:`plan_microbatches`."""
    groups = [SharingGroup([one.tokens for one in group.episodes], *group.tree) for group in batch.groups]
    bounds = [number * len(groups) // way.minibatches for number in range(way.minibatches + 1)]
    plan: list[list[list[tuple[int, int]]]] = [[] for _ in range(way.dp_size)]
    parts = []
    for start, end in pairwise(bounds):
        planned = plan_microbatches(groups[start:end], way.token_budget, way.dp_size)
        parts.append(_mini_batch(batch, start, end, len(planned[0])))
        for of_rank, microbatches in zip(plan, planned, strict=True):
            of_rank += [[(start + group, episode) for group, episode in microbatch] for microbatch in microbatches]
    known = outcomes(batch.groups, way.columns) | {"uses": batch.uses}

    def data(place: tuple[int, int]) -> bytes | memoryview:
        group, episode = place
        return batch.groups[group].episodes[episode].data

    return [
        PackedShard(
            **known,
            version=batch.version,
            places=[[(*place, len(data(place))) for place in microbatch] for microbatch in microbatches],
            data=b"".join(data(place) for microbatch in microbatches for place in microbatch),
            trainable_tokens=int(batch.lag_counts.sum()),
            lag_counts=batch.lag_counts,
            oldest=batch.oldest,
            minibatches=parts,
        )
        for microbatches in plan
    ]


def _mini_batch(batch: Batch, start: int, end: int, microbatches: int) -> MiniBatch:
    """Of the groups from ``start`` to before ``end``."""
    episodes = [episode for group in batch.groups[start:end] for episode in group.episodes]
    by_version = [item for episode in episodes for item in episode.tokens_by_version.items()]
    trained = (tokens for version, tokens in by_version if batch.oldest is None or version >= batch.oldest)
    return MiniBatch(microbatches, sum(trained), len(episodes))


class CutBatch:
    """The shards of the batch that is being taken. All ranks get those of one cut."""

    def __init__(self) -> None:
        self._asked: tuple[int, ShardPlan] | None = None
        self._shards: list[PackedShard] = []

    def shards(self, batch: Batch, way: ShardPlan) -> list[PackedShard]:
        """One a rank. Raises ValueError if a rank asks for something else than the first one did."""
        asked = batch.version, way
        if self._asked is None:
            self._asked, self._shards = asked, cut(batch, way)
        elif self._asked != asked:
            raise ValueError(
                f"trainer ranks disagree on version and {ShardPlan._fields}: {self._asked} before, {asked} now"
            )
        return self._shards

    def forget(self) -> None:
        """The batch is trained."""
        self._asked, self._shards = None, []
