from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.buffer.groups import Batch
from monarch_rl.buffer.shards import ShardPlan, cut
from monarch_rl.episode.episode import NO_VERSION, POSITION, Episode, Fork, Group, Turn
from monarch_rl.episode.sampling import Completion, SamplingMasks
from monarch_rl.episode.serialization import (
    BEHAVIOUR,
    SerializedGroup,
    deserialize_episode,
    deserialize_group,
    serialize_group,
)
from monarch_rl.episode.shard import mask_older

COLUMNS = st.lists(st.sampled_from(["teacher", "value", "a b"]), unique=True)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INFO = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9) | st.none() | st.booleans(), max_size=3)


@st.composite
def turns(draw: st.DrawFn, with_masks: bool, columns: list[str]) -> Turn:
    n = draw(st.integers(0, 6))
    finite = st.floats(-1024, 0, width=32)
    trainable = np.asarray(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
    sampling_masks = None
    if with_masks:
        sizes = draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
        counts = np.where(trainable, np.asarray(sizes, np.int32), 0).astype(np.int32)
        total = int(counts.sum())
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total))
        sampling_masks = SamplingMasks(counts, np.asarray(ids, np.int32))
    return Turn(
        token_ids=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32),
        logprobs=np.where(trainable, np.asarray(draw(st.lists(finite, min_size=n, max_size=n)), np.float32), 0),
        policy_versions=np.asarray(draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n)), np.int32),
        trainable=trainable,
        sampling_masks=sampling_masks,
        reward=draw(st.none() | FLOATS),
        columns={name: draw(column(trainable)) for name in draw(st.permutations(columns))},
    )


@st.composite
def column(draw: st.DrawFn, trainable: np.ndarray) -> np.ndarray:
    """Arbitrary bits at trainable tokens."""
    bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(trainable), max_size=len(trainable)))
    return np.where(trainable, np.asarray(bits, np.uint32), 0).astype(np.uint32).view(np.float32)


@st.composite
def episodes(draw: st.DrawFn, columns: list[str]) -> Episode:
    episode = Episode(
        turns=draw(st.lists(turns(draw(st.booleans()), columns), min_size=1, max_size=3)),
        reward=draw(FLOATS),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        info=draw(INFO),
        parts=draw(st.dictionaries(st.text(max_size=5), FLOATS, max_size=3)),
        seat=draw(st.text(max_size=5)),
        rollout=draw(st.just(POSITION) | st.integers(0, 9)),
        fork=draw(st.none() | st.builds(Fork, st.integers(0, 9), st.integers(1, 9))),
    )
    dtype = draw(st.sampled_from([None, np.uint8, np.uint16]))
    if dtype is not None and episode.num_tokens:
        shape = (episode.num_tokens - 1, *draw(st.tuples(st.integers(1, 3), st.integers(1, 3))))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        episode.expert_routes = rng.integers(0, np.iinfo(dtype).max, shape).astype(dtype)
    return episode


def groups_of(columns: list[str], fewest: int = 0) -> st.SearchStrategy[Group]:
    return st.builds(
        Group,
        group_id=st.integers(0, 2**40),
        task_index=st.integers(0, 2**40),
        episodes=st.lists(episodes(columns), min_size=fewest, max_size=4),
        failed=st.integers(0, 8),
        attempt=st.integers(0, 3),
        task=st.text(max_size=9),
    )


GROUPS = COLUMNS.flatmap(groups_of)
BATCHES = COLUMNS.flatmap(lambda columns: st.lists(groups_of(columns, fewest=1), min_size=1, max_size=3))
"""Batches whose groups have the same columns."""


def check_equal(ours: np.ndarray | None, theirs: np.ndarray | None) -> None:
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()


@given(GROUPS)
def test_a_group_survives_serialization(group: Group) -> None:
    read = deserialize_group(serialize_group(group))
    for name in ("group_id", "task_index", "failed", "attempt", "task"):
        assert getattr(read, name) == getattr(group, name)
    for ours, theirs in zip(group.episodes, read.episodes, strict=True):
        assert (ours.reward, ours.finish_reason, ours.info) == (theirs.reward, theirs.finish_reason, theirs.info)
        assert (ours.parts, list(ours.parts)) == (theirs.parts, list(theirs.parts))
        assert (ours.seat, ours.fork) == (theirs.seat, theirs.fork)
        assert len(ours.turns) == len(theirs.turns)
        check_equal(ours.expert_routes, theirs.expert_routes)
        for a, b in zip(ours.turns, theirs.turns, strict=True):
            for name in ("token_ids", "logprobs", "policy_versions", "trainable"):
                check_equal(getattr(a, name), getattr(b, name))
            assert a.reward == b.reward and a.columns.keys() == b.columns.keys()
            for name, values in a.columns.items():
                check_equal(values, b.columns[name])
            assert (a.sampling_masks is None) == (b.sampling_masks is None)
            if a.sampling_masks is not None and b.sampling_masks is not None:
                check_equal(a.sampling_masks.counts, b.sampling_masks.counts)
                check_equal(a.sampling_masks.ids, b.sampling_masks.ids)
    check_equal(read.rollouts, group.rollouts)
    assert [episode.rollout for episode in read.episodes] == group.rollouts.tolist()
    assert serialize_group(read) == serialize_group(group)


@given(GROUPS)
def test_only_trainable_tokens_count_for_the_oldest_and_newest_version(group: Group) -> None:
    versions = [
        int(version)
        for episode in group.episodes
        for turn in episode.turns
        for version, trainable in zip(turn.policy_versions, turn.trainable, strict=True)
        if trainable
    ]
    packed = SerializedGroup.read(serialize_group(group))
    assert packed.oldest_version == min(versions, default=None)
    assert packed.newest_version == max(versions, default=None)
    assert packed.trainable == sum(episode.num_trainable for episode in group.episodes) == len(versions)


@given(GROUPS)
def test_the_header_has_all_fields_that_the_buffer_reads(group: Group) -> None:
    packed = SerializedGroup.read(serialize_group(group))
    assert packed.rewards.tolist() == group.rewards.tolist()
    assert packed.task == group.task
    check_equal(packed.rollouts, group.rollouts)
    for name in packed.columns:
        for values, episode in zip(packed.column(name), group.episodes, strict=True):
            check_equal(values, episode.column(name)[episode.trainable])
    for values, episode in zip(packed.column(BEHAVIOUR), group.episodes, strict=True):
        check_equal(values, episode.logprobs[episode.trainable])
    check_equal(packed.lengths, np.asarray([episode.num_trainable for episode in group.episodes], np.int32))
    check_equal(packed.cut, np.asarray([episode.finish_reason == "length" for episode in group.episodes], bool))
    for header, episode in zip(packed.episodes, group.episodes, strict=True):
        assert (header.tokens, header.trainable) == (episode.num_tokens, episode.num_trainable)
        assert (header.finish_reason, header.parts) == (episode.finish_reason, episode.parts)
        assert (header.seat, len(header.turns)) == (episode.seat, len(episode.turns))
        for (sampled_tokens, reward), turn in zip(header.turns, episode.turns, strict=True):
            assert (sampled_tokens, reward) == (turn.trainable.sum(), turn.reward)
        versions = episode.policy_versions[episode.trainable]
        for oldest in range(-1, 5):
            since = sum(n for version, n in header.tokens_by_version.items() if version >= oldest)
            assert since == (versions >= oldest).sum()
            masked = deserialize_episode(header.data)
            mask_older(masked, oldest)
            assert masked.trainable.tolist() == (episode.trainable & (episode.policy_versions >= oldest)).tolist()


@given(BATCHES, st.data())
@settings(max_examples=50)
def test_a_shard_has_the_outcomes_of_all_groups_and_its_own_episodes(groups: list[Group], data: st.DataObject) -> None:
    packed = [SerializedGroup.read(serialize_group(group)) for group in groups]
    places = [(g, e) for g, group in enumerate(groups) for e in range(len(group.episodes))]
    own = data.draw(st.lists(st.sampled_from(places), unique=True))
    names = sorted(groups[0].episodes[0].turns[0].columns)
    asked = data.draw(st.lists(st.sampled_from([*names, BEHAVIOUR]), unique=True))
    oldest = data.draw(st.none() | st.integers(-1, 4))
    (whole,) = cut(Batch(5, packed, oldest, np.zeros(1, np.int64)), ShardPlan(1, 10_000, tuple(asked)))
    shard = replace(
        whole,
        places=[[(g, e, len(packed[g].episodes[e].data)) for g, e in own]],
        data=b"".join(packed[g].episodes[e].data for g, e in own),
    )
    assert shard.tasks == [group.task for group in groups]
    assert shard.items == [group.task_index for group in groups]
    assert shard.seats == [[episode.seat for episode in group.episodes] for group in groups]
    assert shard.column_names == tuple(names) and shard.columns.keys() == set(asked)
    for g, group in enumerate(groups):
        check_equal(shard.plays[g], group.rollouts)
        for e, original in enumerate(group.episodes):
            assert shard.turn_rewards[g][e] == [turn.reward for turn in original.turns]
            assert shard.turn_lengths[g][e] == [turn.trainable.sum() for turn in original.turns]
            for name in asked:
                values = original.logprobs if name == BEHAVIOUR else original.column(name)
                check_equal(shard.columns[name][g][e], values[original.trainable])
    assert shard.parts == [[episode.parts for episode in group.episodes] for group in groups]
    for group, rewards, lengths, truncated in zip(groups, shard.rewards, shard.lengths, shard.cut, strict=True):
        check_equal(rewards, group.rewards)
        check_equal(lengths, np.asarray([episode.num_trainable for episode in group.episodes], np.int32))
        check_equal(truncated, np.asarray([episode.finish_reason == "length" for episode in group.episodes], bool))
    (taken,) = shard.deserialize()
    for (g, e), episode in zip(own, taken, strict=True):
        original = groups[g].episodes[e]
        assert episode.reward == np.float32(original.reward) or np.isinf(np.float32(original.reward))
        assert (episode.parts, episode.finish_reason) == (original.parts, original.finish_reason)
        assert (episode.seat, episode.rollout) == (original.seat, groups[g].rollouts[e])
        assert [turn.reward for turn in episode.turns] == [turn.reward for turn in original.turns]
        for name in names:
            check_equal(episode.column(name), original.column(name))
        newer = original.trainable if oldest is None else original.trainable & (original.policy_versions >= oldest)
        check_equal(episode.trainable, newer)


def turn_of(tokens: int, **columns: list[float]) -> Turn:
    """A turn of sampled tokens only."""
    turn = Turn.from_completion([], Completion(np.arange(tokens), np.full(tokens, -1.0), np.full(tokens, 3), "stop"))
    turn.columns = {name: np.asarray(values, np.float32) for name, values in columns.items()}
    return turn


def test_turns_of_a_group_have_the_same_columns() -> None:
    one, other = turn_of(2, teacher=[1, 2]), turn_of(1, teacher=[3], value=[4])
    group = Group(7, 0, [Episode([one], 0.0, "stop"), Episode([one, other], 0.0, "stop")])
    message = r"group 7: turn 0 of episode 0 .*\['teacher'\], turn 1 of episode 1 .*\['teacher', 'value'\]"
    with pytest.raises(ValueError, match=message):
        serialize_group(group)


@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0, 0.0, 2.0, 3.0], [[1.0], [2.0], [3.0]]])
def test_a_column_without_a_number_for_each_token_is_refused(values: list[float]) -> None:
    group = Group(7, 0, [Episode([turn_of(3, value=values)], 0.0, "stop")])
    with pytest.raises(ValueError, match="column value of turn 0 of episode 0 .* 3"):
        serialize_group(group)


def test_a_column_value_that_would_be_lost_is_refused() -> None:
    turn = turn_of(2, value=[1.0, 2.0])
    turn.trainable[0], turn.logprobs[0] = False, 0.0
    with pytest.raises(ValueError, match="not trainable"):
        serialize_group(Group(7, 0, [Episode([turn], 0.0, "stop")]))


def test_an_episode_is_filled_turn_by_turn() -> None:
    episode = Episode([turn_of(2), turn_of(3)], 0.0, "stop")
    episode.turns[1].trainable[0] = False
    episode.fill_column("value", np.arange(1.0, 6.0))
    assert [turn.columns["value"].tolist() for turn in episode.turns] == [[1, 2], [0, 4, 5]]
    assert episode.column("value").dtype == np.float32
    with pytest.raises(ValueError, match=r" 5 tokens .*\[4\]"):
        episode.fill_column("value", np.zeros(4))


@given(groups_of(["a", "b"], fewest=1), groups_of(["b"], fewest=1))
@settings(max_examples=50)
def test_groups_of_a_batch_have_the_same_columns(one: Group, other: Group) -> None:
    packed = [SerializedGroup.read(serialize_group(group)) for group in (one, other)]
    with pytest.raises(ValueError, match=r"\['b'\], .*\['a', 'b'\]"):
        cut(Batch(0, packed, None, np.zeros(1, np.int64)), ShardPlan(1, 10_000))
    with pytest.raises(ValueError, match=r"\['b'\], .*column a"):
        cut(Batch(0, packed[1:], None, np.zeros(1, np.int64)), ShardPlan(1, 10_000, ("a",)))


def test_a_column_takes_four_bytes_per_sampled_token() -> None:
    """4 bytes per sampled token; none for a prompt."""
    bare = [turn_of(1000) for _ in range(2)]
    for turn in bare:
        turn.trainable[:300], turn.logprobs[:300] = False, 0.0
    full = [replace(turn, columns={"value": turn.trainable.astype(np.float32)}) for turn in bare]
    sizes = [len(serialize_group(Group(0, 0, [Episode([turn], 0.0, "stop")]))) for turn in (bare[0], full[0])]
    assert sizes[1] - sizes[0] == pytest.approx(4 * 700, abs=64)


def test_bytes_that_are_not_a_serialized_group_are_refused() -> None:
    data = serialize_group(Group(7, 0, []))
    with pytest.raises(ValueError, match="GRP9"):
        deserialize_group(b"GRP9" + data[4:])
    with pytest.raises(ValueError, match=f"group 7 .*{len(data) + 1} bytes.*{len(data)}"):
        deserialize_group(data + b"x")
    with pytest.raises(ValueError, match=" 20 bytes"):
        deserialize_group(data[:20])


def test_a_logprob_that_would_be_lost_is_refused() -> None:
    turn = Turn(np.zeros(1, np.int32), np.ones(1, np.float32), np.zeros(1, np.int32), np.zeros(1, bool))
    with pytest.raises(ValueError, match="not trainable"):
        serialize_group(Group(0, 0, [Episode([turn], 0.0, "stop")]))


def test_a_token_takes_eight_bytes() -> None:
    n = 1000
    turn = Turn.from_completion([], Completion(np.arange(n), np.full(n, -1.0), np.full(n, 3), "stop"))
    assert len(serialize_group(Group(0, 0, [Episode([turn], 0.0, "stop")] * 16))) < 16 * (8 * n + 160)


@pytest.mark.parametrize(("logprobs", "versions"), [(1, 3), (3, 1), (4, 3)])
def test_a_completion_without_a_number_for_each_token_is_refused(logprobs: int, versions: int) -> None:
    completion = Completion(np.arange(3), np.full(logprobs, -1.0), np.full(versions, 3), "stop")
    with pytest.raises(ValueError, match=" 3 tokens"):
        Turn.from_completion([7], completion)


def test_a_turn_from_a_completion_trains_only_sampled_tokens() -> None:
    completion = Completion(
        np.asarray([7, 8], np.int64), np.asarray([-0.5, -1.5]), np.asarray([3, 4], np.int64), "stop"
    )
    turn = Turn.from_completion([1, 2, 3], completion)
    assert turn.token_ids.tolist() == [1, 2, 3, 7, 8]
    assert turn.trainable.tolist() == [False, False, False, True, True]
    assert turn.policy_versions.tolist() == [NO_VERSION] * 3 + [3, 4]
    assert turn.logprobs.tolist() == [0, 0, 0, -0.5, -1.5]
    assert [str(array.dtype) for array in (turn.token_ids, turn.logprobs, turn.policy_versions)] == [
        "int32",
        "float32",
        "int32",
    ]


def test_arrays_of_a_turn_have_one_length() -> None:
    with pytest.raises(ValueError, match="one length"):
        Turn(np.zeros(2, np.int32), np.zeros(1, np.float32), np.zeros(2, np.int32), np.zeros(2, bool))


def test_sampling_masks_are_split_and_joined_by_tokens() -> None:
    sets = [[5, 3], [], [7], [1, 2, 4]]
    sampling_masks = SamplingMasks(
        np.asarray([len(ids) for ids in sets], np.int32), np.asarray(sum(sets, []), np.int32)
    )
    assert sampling_masks[1:3].ids.tolist() == [7] and sampling_masks[1:3].counts.tolist() == [0, 1]
    mask = np.asarray([True, False, False, True])
    assert sampling_masks[mask].ids.tolist() == [5, 3, 1, 2, 4] and sampling_masks[mask].counts.tolist() == [2, 3]
    parts = sampling_masks.split([1, 0, 3])
    assert [part.ids.tolist() for part in parts] == [[5, 3], [], [7, 1, 2, 4]]
    assert [part.counts.tolist() for part in parts] == [[2], [], [0, 1, 3]]
    joined = SamplingMasks.join([sampling_masks[:2], SamplingMasks.none(1), sampling_masks[2:]])
    assert joined.counts.tolist() == [2, 0, 0, 1, 3] and joined.ids.tolist() == sampling_masks.ids.tolist()
    with pytest.raises(ValueError, match=" 6 ids.* 5"):
        SamplingMasks(sampling_masks.counts, sampling_masks.ids[1:])


def test_a_sampling_mask_that_would_be_lost_is_refused() -> None:
    sampling_masks = SamplingMasks(np.ones(1, np.int32), np.zeros(1, np.int32))
    turn = Turn(
        np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), np.zeros(1, bool), sampling_masks
    )
    with pytest.raises(ValueError, match="sampling mask .*not trainable"):
        serialize_group(Group(0, 0, [Episode([turn], 0.0, "stop")]))
    with pytest.raises(ValueError, match="1 of the 2 turns"):
        _ = Episode([turn, replace(turn, sampling_masks=None)], 0.0, "stop").sampling_masks


def test_sampling_masks_and_routes_have_their_documented_sizes() -> None:
    """4 bytes per id of a mask and 4 per token; for routes one byte per token, layer and selected expert."""
    n, size, layers, k = 1000, 20, 4, 2
    sampling_masks = SamplingMasks(np.full(n, size, np.int32), np.zeros(n * size, np.int32))
    completion = Completion(np.arange(n), np.full(n, -1.0), np.full(n, 3), "stop")
    bare = Episode([Turn.from_completion([], completion)], 0.0, "stop")
    full = Episode([Turn.from_completion([], replace(completion, sampling_masks=sampling_masks))], 0.0, "stop")
    full.expert_routes = np.zeros((n - 1, layers, k), np.uint8)
    more = len(serialize_group(Group(0, 0, [full]))) - len(serialize_group(Group(0, 0, [bare])))
    assert more == pytest.approx(n * (4 + 4 * size) + n * layers * k, abs=64)
