from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.episode import NO_VERSION, Completion, Episode, Group, Turn
from monarch_rl.packed import PackedGroup, mask_older, unpack_episode

INFO = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9) | st.none() | st.booleans(), max_size=3)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    n = draw(st.integers(0, 6))
    finite = st.floats(-1024, 0, width=32)
    trainable = np.asarray(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
    return Turn(
        token_ids=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32),
        logprobs=np.where(trainable, np.asarray(draw(st.lists(finite, min_size=n, max_size=n)), np.float32), 0),
        policy_versions=np.asarray(draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n)), np.int32),
        trainable=trainable,
    )


EPISODES = st.builds(
    Episode,
    turns=st.lists(turns(), min_size=1, max_size=3),
    reward=st.floats(allow_nan=False, allow_infinity=False),
    finish_reason=st.sampled_from(["stop", "length"]),
    info=INFO,
)
GROUPS = st.builds(
    Group,
    group_id=st.integers(0, 2**40),
    task_index=st.integers(0, 2**40),
    episodes=st.lists(EPISODES, max_size=4),
    failed=st.integers(0, 8),
    attempt=st.integers(0, 3),
)


@given(GROUPS)
def test_group_survives_its_bytes(group: Group) -> None:
    read = Group.from_bytes(group.to_bytes())
    for name in ("group_id", "task_index", "failed", "attempt"):
        assert getattr(read, name) == getattr(group, name)
    for ours, theirs in zip(group.episodes, read.episodes, strict=True):
        assert (ours.reward, ours.finish_reason, ours.info) == (theirs.reward, theirs.finish_reason, theirs.info)
        assert len(ours.turns) == len(theirs.turns)
        for a, b in zip(ours.turns, theirs.turns, strict=True):
            for name in ("token_ids", "logprobs", "policy_versions", "trainable"):
                x, y = getattr(a, name), getattr(b, name)
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)
    assert read.oldest_version == group.oldest_version
    assert read.to_bytes() == group.to_bytes()


@given(GROUPS)
def test_oldest_version_is_that_of_trainable_tokens(group: Group) -> None:
    drawn = [
        int(version)
        for episode in group.episodes
        for turn in episode.turns
        for version, trainable in zip(turn.policy_versions, turn.trainable, strict=True)
        if trainable
    ]
    assert group.oldest_version == min(drawn, default=None)
    assert sum(episode.num_trainable for episode in group.episodes) == len(drawn)


@given(GROUPS)
def test_the_header_tells_what_the_buffer_decides_by(group: Group) -> None:
    packed = PackedGroup.read(group.to_bytes())
    assert packed.oldest_version == group.oldest_version
    assert packed.rewards.tolist() == group.rewards.tolist()
    for known, episode in zip(packed.episodes, group.episodes, strict=True):
        assert (known.tokens, known.trainable) == (episode.num_tokens, episode.num_trainable)
        drawn = episode.policy_versions[episode.trainable]
        for oldest in range(-1, 5):
            assert known.trainable_since(oldest) == (drawn >= oldest).sum()
            masked = unpack_episode(known.data)
            mask_older(masked, oldest)
            assert masked.trainable.tolist() == (episode.trainable & (episode.policy_versions >= oldest)).tolist()


def test_what_is_no_packed_group_is_refused() -> None:
    data = Group(7, 0, []).to_bytes()
    with pytest.raises(ValueError, match="group format b'GRP9' cannot be read here"):
        Group.from_bytes(b"GRP9" + data[4:])
    with pytest.raises(ValueError, match=f"group 7 has {len(data) + 1} bytes, its header tells of {len(data)}"):
        Group.from_bytes(data + b"x")
    with pytest.raises(ValueError, match="the header of a group of 20 bytes cannot be read"):
        Group.from_bytes(data[:20])


def test_a_logprob_that_would_be_lost_is_refused() -> None:
    turn = Turn(np.zeros(1, np.int32), np.ones(1, np.float32), np.zeros(1, np.int32), np.zeros(1, bool))
    with pytest.raises(ValueError, match="not 0 on a token that is not trainable"):
        Group(0, 0, [Episode([turn], 0.0, "stop")]).to_bytes()


def test_a_token_takes_eight_bytes() -> None:
    n = 1000
    turn = Turn.from_completion([], Completion(np.arange(n), np.full(n, -1.0), np.full(n, 3), "stop"))
    assert len(Group(0, 0, [Episode([turn], 0.0, "stop")] * 16).to_bytes()) < 16 * (8 * n + 128)


def test_turn_from_completion_trains_only_what_was_drawn() -> None:
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
