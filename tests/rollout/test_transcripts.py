"""Rows of ``rollouts.jsonl``, and the messages that a worker keeps for them."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.packed import PackedGroup, pack_group
from monarch_rl.episode.sampled import TrainedEpisode
from monarch_rl.episode.sampling import Completion
from monarch_rl.model.messages import ToolCall, assistant, tool, user
from monarch_rl.rollout.transcripts import MESSAGE_CHARACTERS, Transcripts, as_rows, row, rows, shown
from monarch_rl.tasks.mixture import Mixture
from monarch_rl.tasks.task import Task

ITEM = {"question": "1 + 2 =", "answer": "3", "scorer": len}
SAID = as_rows([user("1 + 2 ="), assistant("3")])


class Ids:
    """Decodes ids as their numbers."""

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


def played(reward: float = 1.0, messages: list[dict[str, Any]] = SAID) -> Episode:
    """Two turns of versions 5, 6 and 6, 7."""
    first = Completion(np.asarray([7, 8, 9]), np.full(3, -0.5), np.asarray([5, 6, 6]), "stop")
    second = Completion(np.asarray([4, 4]), np.full(2, -0.5), np.asarray([6, 7]), "stop")
    turns = [Turn.from_completion([1, 2], first), Turn.from_completion([3], second)]
    return Episode(turns, reward, "stop", {"note": "x"}, parts={"score": reward}, messages=messages)


def test_a_row_has_all_that_is_known_of_an_episode() -> None:
    data = PackedGroup.read(pack_group(Group(3, 4, [played()]))).episodes[0].data
    trained = TrainedEpisode(8, 3, 0, 0, "sums", 4, 1.0, -0.5, bytes(data), {"score": 1.0})
    template: Any = Ids()
    assert json.loads(json.dumps(row(trained, SAID, ITEM, template))) == {
        "step": 8,
        "group": 3,
        "episode": 0,
        "play": 0,
        "seat": "",
        "task": "sums",
        "task_index": 4,
        "item": {"question": "1 + 2 =", "answer": "3", "scorer": "<built-in function len>"},
        "messages": [{"role": "user", "content": "1 + 2 ="}, {"role": "assistant", "content": "3"}],
        "prompt": "1 2",
        "turns": [{"read": "1 2", "drawn": "7 8 9"}, {"read": "3", "drawn": "4 4"}],
        "reward": 1.0,
        "parts": {"score": 1.0},
        "advantage": -0.5,
        "info": {"note": "x"},
        "finish_reason": "stop",
        "tokens": 5,
        "versions": [[5, 1], [6, 3], [7, 1]],
    }


async def unplayed(item: Any, policy: Any) -> float:
    raise AssertionError("not played")


def test_a_row_of_a_mixture_has_the_item_of_its_own_task() -> None:
    data = PackedGroup.read(pack_group(Group(3, 4, [played()]))).episodes[0].data
    mixed = Mixture({Task(lambda cursor: {"number": cursor}, unplayed): 1})
    template: Any = Ids()
    asked = [(TrainedEpisode(8, 3, 0, 0, "a", cursor, 1.0, -0.5, bytes(data), {}), SAID) for cursor in range(2)]
    assert [shown["item"] for shown in rows(asked, mixed, template)] == [{"number": 0}, {"number": 1}]


def test_an_item_is_made_once_for_its_group_and_one_that_raises_ends_no_run() -> None:
    data = PackedGroup.read(pack_group(Group(3, 4, [played()]))).episodes[0].data
    made: list[int] = []

    def items(cursor: int) -> dict[str, int]:
        made.append(cursor)
        if cursor == 1:
            raise KeyError("gone")
        return {"number": cursor}

    template: Any = Ids()
    asked = [
        (TrainedEpisode(8, 3 + cursor, 0, place, "a", cursor, 1.0, -0.5, bytes(data), {}), SAID)
        for cursor in range(2)
        for place in range(3)
    ]
    told = [one["item"] for one in rows(asked, Task(items, unplayed), template)]
    assert made == [0, 1]
    assert told == [{"number": 0}] * 3 + ["<item 1 raised KeyError('gone') when it was made>"] * 3


@dataclass
class Locked:
    """As an item may be that opens something."""

    name: str
    lock: Any = field(default_factory=threading.Lock, repr=False)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


CIRCLE: list[Any] = [1]
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (Locked("a"), "Locked(name='a')"),
        (CIRCLE, "[1, [...]]"),
        ({"score": float("nan"), "name": "x"}, "{'score': nan, 'name': 'x'}"),
        ({"of": Unspeakable()}, {"of": "<Unspeakable: its representation raised RuntimeError>"}),
        ({1: {"a": (1, 2)}}, {"1": {"a": [1, 2]}}),
    ],
)
def test_any_item_can_be_shown(item: Any, expected: Any) -> None:
    assert shown(item) == expected
    json.dumps(shown(item), allow_nan=False)


def test_messages_have_their_tool_calls() -> None:
    call = ToolCall("add", {"a": 1}, "call00000")
    assert as_rows([tool("2", "add", "call00000")]) == [
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call00000"}
    ]
    (said,) = as_rows([type(assistant(""))("assistant", "", (call,))])
    assert said["content"] == "" and said["tool_calls"][0]["arguments"] == {"a": 1}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400)), max_size=30), st.integers(0, 1500))
def test_the_newest_messages_are_kept_within_the_bound(groups: list[tuple[int, int]], most: int) -> None:
    """Whatever is put, also the same group again."""
    transcripts = Transcripts(most)
    expected: list[tuple[int, int]] = []
    for group_id, size in groups:
        messages = [{"role": "user", "content": "x" * size}]
        transcripts.add(Group(group_id, 0, [played(messages=messages)]))
        expected = [one for one in expected if one[0] != group_id] + [(group_id, size)]
        while sum(MESSAGE_CHARACTERS + kept for _, kept in expected) > most:
            expected.pop(0)
        here = {known for known in range(10) if transcripts.of(known, 0, 0) is not None}
        assert here == {known for known, _ in expected}
    assert all(transcripts.of(group_id, 1, 0) is None for group_id in range(10))
    transcripts.forget_before(5)
    assert all(transcripts.of(group_id, 0, 0) is None for group_id in range(5))


def test_what_is_trained_again_is_known_again() -> None:
    """Group 0 is trained, then group 1, then group 0 once more."""
    for again, known in ((True, SAID), (False, None)):
        transcripts, said = Transcripts(), list[Any]()
        for group_id in range(2):
            transcripts.add(Group(group_id, 0, [played()]))
        for step, group_id in enumerate((0, 1, 0)):
            trained = TrainedEpisode(step, group_id, 0, 0, "sums", 0, 1.0, 0.0, b"", {})
            said += transcripts.take([trained], again)
        assert said == [SAID, SAID, known]
