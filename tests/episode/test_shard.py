"""Groups sampled from a batch for inspection: the ranks together have all of their episodes."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.episode import Fork
from monarch_rl.episode.serialization import SerializedGroup, deserialize_episode, serialize_group
from monarch_rl.episode.shard import sample_groups, trained_episodes
from tests.buffer.helpers import group

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=6)
"""Number of episodes of each group."""


@given(SIZES, st.integers(1, 3), st.integers(0, 8), st.integers(0, 5))
def test_the_ranks_have_each_episode_of_the_sampled_groups_once(
    sizes: list[int], ranks: int, limit: int, seed: int
) -> None:
    groups = [group(10 + g, *([4] * (1 + e) for e in range(size))) for g, size in enumerate(sizes)]
    for one in groups:
        for place, sequence in enumerate(one.episodes):
            sequence.rollout, sequence.fork = 0, Fork(place - 1, 1) if place else None
            sequence.turns[0].reward = place / 4 if place else None
    packed = [SerializedGroup.read(serialize_group(one)) for one in groups]
    shards = cut(Batch(4, packed, None, np.asarray([1], np.int64)), ShardPlan(ranks, 1000))
    advantages = [one.rewards * 10 for one in packed]
    found = [episode for shard in shards for episode in trained_episodes(shard, advantages, limit, seed)]
    by_group = Counter(episode.group_id for episode in found)
    assert len(by_group) == min(limit, len(groups))
    for episode in found:
        original = groups[episode.group_id - 10].episodes[episode.place]
        assert by_group[episode.group_id] == sizes[episode.group_id - 10]
        assert (episode.step, episode.task_index, episode.attempt) == (5, episode.group_id, 0)
        assert (episode.reward, episode.advantage) == (original.reward, 10 * original.reward)
        assert (episode.rollout, episode.fork) == (original.rollout, original.fork)
        assert episode.turn_rewards == [turn.reward for turn in original.turns]
        np.testing.assert_array_equal(deserialize_episode(episode.data).token_ids, original.token_ids)
    assert len({(episode.group_id, episode.place) for episode in found}) == len(found)


def test_a_sequence_without_an_advantage_has_none() -> None:
    packed = [SerializedGroup.read(serialize_group(group(0, [4], [5])))]
    (shard,) = cut(Batch(4, packed, None, np.asarray([1], np.int64)), ShardPlan(1, 1000))
    found = trained_episodes(shard, [[np.asarray(np.nan), np.asarray([1.0, 2.0])]], 1, seed=0)
    assert {episode.place: episode.advantage for episode in found} == {0: None, 1: [1.0, 2.0]}


def test_all_groups_are_sampled_equally_often() -> None:
    """2 of 8 groups in 4,000 samples: each is sampled 1,000 times, with a standard deviation of 27."""
    counts = Counter(place for step in range(4000) for place in sample_groups(8, 2, f"seed/{step}"))
    assert sorted(counts) == list(range(8)) and sum(counts.values()) == 8000
    assert max(abs(count - 1000) for count in counts.values()) < 5 * 27
    assert sample_groups(8, 2, "seed/1") == sample_groups(8, 2, "seed/1")
