"""A batch that is split into mini-batches: each is a batch of its own to the ranks."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.losses import Aggregation
from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.episode import Group
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.episode.shard import PackedShard
from monarch_rl.trainer.batch import pack_shard
from tests.buffer.helpers import episode

MAX_TOKENS = 20
LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6)


def shards(lengths: list[list[int]], ranks: int, minibatches: int, oldest: int | None) -> list[PackedShard]:
    """Shards of groups of episodes with so many sampled tokens each, every second episode sampled by version 1."""
    groups = [
        Group(g, g, [episode([(g + place) % 2] * n, reward=float(place)) for place, n in enumerate(of_group)])
        for g, of_group in enumerate(lengths)
    ]
    by_version = np.bincount(
        [(g + e) % 2 for g, of_group in enumerate(lengths) for e, n in enumerate(of_group) for _ in range(n)]
    )
    lag_counts = np.asarray([by_version[1] if len(by_version) > 1 else 0] + ([] if oldest else [by_version[0]]))
    batch = Batch(1, [SerializedGroup.read(serialize_group(group)) for group in groups], oldest, lag_counts)
    return cut(batch, ShardPlan(ranks, 40, minibatches=minibatches))


def by_minibatch(shard: PackedShard) -> list[list[list[tuple[int, int, int]]]]:
    """The shard's places."""
    places = iter(shard.places)
    return [list(islice(places, minibatch.microbatches)) for minibatch in shard.minibatches]


@given(LENGTHS, st.integers(1, 3), st.integers(1, 6), st.sampled_from([None, 1]))
def test_each_group_is_in_one_minibatch_and_all_ranks_have_equally_many_microbatches(
    lengths: list[list[int]], ranks: int, minibatches: int, oldest: int | None
) -> None:
    minibatches = min(minibatches, len(lengths))
    made = shards(lengths, ranks, minibatches, oldest)
    by_rank = [by_minibatch(shard) for shard in made]
    assert all(sum(of_rank, []) == shard.places for of_rank, shard in zip(by_rank, made, strict=True))
    assert {tuple(map(len, of_rank)) for of_rank in by_rank} == {tuple(map(len, by_rank[0]))}
    placed = [
        sorted((g, e) for of_rank in by_rank for microbatch in of_rank[number] for g, e, _ in microbatch)
        for number in range(minibatches)
    ]
    assert [place for part in placed for place in part] == [
        (g, e) for g, of_group in enumerate(lengths) for e in range(len(of_group))
    ]
    groups = [{g for g, _ in part} for part in placed]
    assert all(part for part in groups) and max(map(len, groups)) - min(map(len, groups)) <= 1
    assert sum(map(len, groups)) == len(lengths)


@given(LENGTHS, st.integers(1, 3), st.integers(1, 6), st.sampled_from([None, 1]))
def test_the_weights_of_every_minibatch_are_those_of_a_batch(
    lengths: list[list[int]], ranks: int, minibatches: int, oldest: int | None
) -> None:
    """Their sum over all ranks, without the tokens that are masked for their lag."""
    minibatches = min(minibatches, len(lengths))
    made = shards(lengths, ranks, minibatches, oldest)
    advantages = [[torch.tensor(0.0)] * len(of_group) for of_group in lengths]

    def sums(aggregation: Aggregation) -> list[float]:
        packed = [pack_shard(shard, advantages, aggregation, MAX_TOKENS, torch.device("cpu")) for shard in made]
        return [sum(float(m.weights.sum()) for part in packed for m in part[n]) for n in range(minibatches)]

    bounds = [number * len(lengths) // minibatches for number in range(minibatches + 1)]
    for number, found in enumerate(sums("constant")):
        groups = range(bounds[number], bounds[number + 1])
        trained = [n for g in groups for e, n in enumerate(lengths[g]) if oldest is None or (g + e) % 2 == 1]
        episodes = sum(len(lengths[g]) for g in groups)
        np.testing.assert_allclose(found, sum(trained) / (MAX_TOKENS * episodes), rtol=1e-5)
        np.testing.assert_allclose(sums("token_mean")[number], float(bool(trained)), rtol=1e-5)


@given(LENGTHS, st.integers(1, 3))
def test_one_minibatch_is_the_batch(lengths: list[list[int]], ranks: int) -> None:
    for shard in shards(lengths, ranks, 1, None):
        assert shard.minibatches == [(len(shard.places), shard.trainable_tokens, shard.num_episodes)]
