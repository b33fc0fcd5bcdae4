"""Rows of ``rollouts.jsonl``, and the messages that a worker keeps for them."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.episode.episode import Episode, Fork, Group, Turn
from monarch_rl.episode.sampling import Completion
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from monarch_rl.episode.shard import TrainedEpisode
from monarch_rl.model.messages import ToolCall, assistant, tool, user
from monarch_rl.rollout.sequences import untrained
from monarch_rl.rollout.transcripts import MESSAGE_CHARACTERS, Transcripts, as_rows, rows, shown
from monarch_rl.tasks.mixture import Mixture
from monarch_rl.tasks.task import Task

ITEM = {"question": "1 + 2 =", "answer": "3", "scorer": len}
MESSAGES = as_rows([user("1 + 2 ="), assistant("3")])


class Ids:
    """Decodes ids as their numbers."""

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


def sampled_episode(reward: float = 1.0, messages: list[dict[str, Any]] = MESSAGES) -> Episode:
    """Two turns of versions 5, 6 and 6, 7."""
    first = Completion(np.asarray([7, 8, 9]), np.full(3, -0.5), np.asarray([5, 6, 6]), "stop")
    second = Completion(np.asarray([4, 4]), np.full(2, -0.5), np.asarray([6, 7]), "stop")
    turns = [Turn.from_completion([1, 2], first), Turn.from_completion([3], second)]
    return Episode(turns, reward, "stop", {"note": "x"}, parts={"score": reward}, messages=messages)


async def never_run(item: Any, policy: Any) -> float:
    raise AssertionError("not run")


def trained_of(group: Group) -> list[TrainedEpisode]:
    """The episodes of a group as one rank received them in step 8."""
    return [
        TrainedEpisode(
            8,
            group.group_id,
            0,
            place,
            group.task,
            group.task_index,
            one.reward,
            -0.5,
            bytes(one.data),
            one.parts,
            one.seat,
            one.rollout,
            one.fork,
            [reward for _, reward in one.turns],
        )
        for place, one in enumerate(SerializedGroup.read(serialize_group(group)).episodes)
    ]


def test_a_row_describes_an_episode_completely() -> None:
    episode = sampled_episode()
    episode.turns[1].reward = 0.25
    (trained,) = trained_of(Group(3, 4, [episode], task="sums"))
    template: Any = Ids()
    (row,) = rows([(trained, MESSAGES)], Task(lambda cursor: ITEM, never_run), template)
    assert json.loads(json.dumps(row)) == {
        "step": 8,
        "group": 3,
        "episode": 0,
        "play": 0,
        "seat": "",
        "fork": None,
        "task": "sums",
        "task_index": 4,
        "item": {"question": "1 + 2 =", "answer": "3", "scorer": "<built-in function len>"},
        "messages": [{"role": "user", "content": "1 + 2 ="}, {"role": "assistant", "content": "3"}],
        "prompt": "1 2",
        "turns": [{"read": "1 2", "drawn": "7 8 9", "reward": None}, {"read": "3", "drawn": "4 4", "reward": 0.25}],
        "reward": 1.0,
        "parts": {"score": 1.0},
        "advantage": -0.5,
        "info": {"note": "x"},
        "finish_reason": "stop",
        "tokens": 5,
        "versions": [[5, 1], [6, 3], [7, 1]],
    }


def test_rows_of_branches_have_their_fork_and_all_their_turns() -> None:
    """Two rollouts of a tree: the second sequence forks from the first after a turn, the third from the second after
    two, the last from the first in the middle of its second turn."""

    def turn(context: list[int], ids: list[int]) -> Turn:
        n = len(ids)
        return Turn.from_completion(context, Completion(np.asarray(ids), np.full(n, -0.5), np.zeros(n, int), "stop"))

    def sequence(rollout: int, fork: Fork | None, *turns: Turn) -> Episode:
        shared = 0 if fork is None else fork.turns
        context = [untrained(turn, False) for turn in turns[:shared]]
        return Episode([*context, *turns[shared:]], 1.0, "stop", rollout=rollout, fork=fork)

    first, begun, rest, other = turn([1, 2], [7]), turn([3], [8, 8]), turn([], [9]), turn([4, 4], [5])
    tree = [
        (None, [first, begun, rest]),
        (Fork(0, 1), [first, other]),
        (Fork(1, 2), [first, other, turn([6], [6])]),
        (Fork(0, 2), [first, begun, turn([], [5, 5])]),
    ]
    group = Group(3, 4, [sequence(rollout, fork, *turns) for rollout in range(2) for fork, turns in tree])
    asked: list[Any] = [(trained, MESSAGES) for trained in trained_of(group)]
    template: Any = Ids()
    found = rows(asked[::-1], Task(lambda cursor: ITEM, never_run), template)[::-1]
    for rollout in (found[:4], found[4:]):
        assert [row["fork"] for row in rollout] == [
            None,
            {"sequence": 0, "turns": 1},
            {"sequence": 1, "turns": 2},
            {"sequence": 0, "turns": 2},
        ]
        assert [[(turn["read"], turn["drawn"]) for turn in row["turns"]] for row in rollout] == [
            [("1 2", "7"), ("3", "8 8"), ("", "9")],
            [("1 2", "7"), ("4 4", "5")],
            [("1 2", "7"), ("4 4", "5"), ("6", "6")],
            [("1 2", "7"), ("3", "8 8"), ("", "5 5")],
        ]
        assert {row["prompt"] for row in rollout} == {"1 2"} and [row["tokens"] for row in rollout] == [4, 1, 1, 2]


def test_a_row_of_a_mixture_has_the_item_of_its_task() -> None:
    mixed = Mixture({Task(lambda cursor: {"number": cursor}, never_run): 1})
    template: Any = Ids()
    asked = [(one, MESSAGES) for cursor in range(2) for one in trained_of(Group(cursor, cursor, [sampled_episode()]))]
    assert [shown["item"] for shown in rows(asked, mixed, template)] == [{"number": 0}, {"number": 1}]


def test_an_item_is_made_once_per_group_and_its_error_does_not_end_the_run() -> None:
    made: list[int] = []

    def items(cursor: int) -> dict[str, int]:
        made.append(cursor)
        if cursor == 1:
            raise KeyError("gone")
        return {"number": cursor}

    template: Any = Ids()
    asked = [
        (one, MESSAGES) for cursor in range(2) for one in trained_of(Group(cursor, cursor, [sampled_episode()] * 3))
    ]
    shown = [row["item"] for row in rows(asked, Task(items, never_run), template)]
    assert made == [0, 1]
    assert shown == [{"number": 0}] * 3 + ["<item 1 raised KeyError('gone') when it was made>"] * 3


@dataclass
class Locked:
    """An item that holds a resource."""

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
        ({"board": [{(0, 1): "x"}], date(2026, 5, 1): 1}, {"board": [{"(0, 1)": "x"}], "datetime.date(2026, 5, 1)": 1}),
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
    (row,) = as_rows([type(assistant(""))("assistant", "", (call,))])
    assert row["content"] == "" and row["tool_calls"][0]["arguments"] == {"a": 1}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400)), max_size=30), st.integers(0, 1500))
def test_the_newest_messages_are_kept_within_the_bound(groups: list[tuple[int, int]], most: int) -> None:
    """Whatever is added, including the same group again."""
    transcripts = Transcripts(most)
    expected: list[tuple[int, int]] = []
    for group_id, size in groups:
        messages = [{"role": "user", "content": "x" * size}]
        transcripts.add(Group(group_id, 0, [sampled_episode(messages=messages)]))
        expected = [one for one in expected if one[0] != group_id] + [(group_id, size)]
        while sum(MESSAGE_CHARACTERS + size for _, size in expected) > most:
            expected.pop(0)
        stored = {group_id for group_id in range(10) if transcripts.of(group_id, 0, 0) is not None}
        assert stored == {group_id for group_id, _ in expected}
    assert all(transcripts.of(group_id, 1, 0) is None for group_id in range(10))
    transcripts.forget_before(5)
    assert all(transcripts.of(group_id, 0, 0) is None for group_id in range(5))


def test_messages_survive_a_step_if_the_group_may_be_trained_again() -> None:
    """Group 0 is trained, then group 1, then group 0 once more."""
    for again, expected in ((True, MESSAGES), (False, None)):
        transcripts, found = Transcripts(), list[Any]()
        for group_id in range(2):
            transcripts.add(Group(group_id, 0, [sampled_episode()]))
        for step, group_id in enumerate((0, 1, 0)):
            trained = TrainedEpisode(step, group_id, 0, 0, "sums", 0, 1.0, 0.0, b"", {})
            found += transcripts.take([trained], again)
        assert found == [MESSAGES, MESSAGES, expected]
