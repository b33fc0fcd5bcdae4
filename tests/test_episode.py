from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.episode import NO_VERSION, Completion, Episode, Group, Turn

INFO = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9) | st.none() | st.booleans(), max_size=3)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    n = draw(st.integers(0, 6))
    finite = st.floats(-1024, 0, width=32)
    return Turn(
        token_ids=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32),
        logprobs=np.asarray(draw(st.lists(finite, min_size=n, max_size=n)), np.float32),
        policy_versions=np.asarray(draw(st.lists(st.integers(-1, 1000), min_size=n, max_size=n)), np.int32),
        trainable=np.asarray(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool),
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
)


@given(GROUPS)
def test_group_survives_its_bytes(group: Group) -> None:
    read = Group.from_bytes(group.to_bytes())
    assert (read.group_id, read.task_index, len(read.episodes)) == (
        group.group_id,
        group.task_index,
        len(group.episodes),
    )
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


def test_other_format_is_refused() -> None:
    data = Group(0, 0, []).to_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].decode()
    group = json.loads(json.loads(header)["__metadata__"]["group"])
    assert group["format"] == 1
    changed = header.replace('\\"format\\": 1', '\\"format\\": 2').encode()
    with pytest.raises(ValueError, match="group format 2"):
        Group.from_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])


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
