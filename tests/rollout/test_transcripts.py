"""Episodes, items and messages as JSON objects."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode.episode import Episode, EpisodeTimes, Fork, Turn
from monarch_rl.episode.sampling import Completion
from monarch_rl.model.messages import ToolCall, assistant, tool, user
from monarch_rl.rollout.sequences import untrained
from monarch_rl.rollout.transcripts import as_line, as_rows, episode_rows, shown

MESSAGES = as_rows([user("1 + 2 ="), assistant("3")])


class Ids:
    """Decodes ids as their numbers."""

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))

    def decode_with_ends(self, token_ids: list[int]) -> tuple[str, np.ndarray]:
        ends = [len(self.decode(token_ids[: place + 1])) for place in range(len(token_ids))]
        return self.decode(token_ids), np.asarray(ends, np.uint32)


def sampled_episode(reward: float = 1.0, messages: list[dict[str, Any]] = MESSAGES) -> Episode:
    """Two turns of versions 5, 6 and 6, 7."""
    first = Completion(np.asarray([7, 8, 9]), np.full(3, -0.5), np.asarray([5, 6, 6]), "stop")
    second = Completion(np.asarray([4, 4]), np.full(2, -0.5), np.asarray([6, 7]), "stop")
    turns = [Turn.from_completion([1, 2], first), Turn.from_completion([3], second)]
    return Episode(turns, reward, "stop", {"note": "x"}, parts={"score": reward}, messages=messages)


def test_a_row_describes_an_episode_completely() -> None:
    episode = sampled_episode()
    episode.turns[1].reward, episode.turns[0].replica = 0.25, 2
    episode.turns[0].seconds, episode.turns[1].seconds = 1.5, 0.25
    episode.times = EpisodeTimes(100.0, 103.0, tool_s=0.5, score_s=0.25)
    template: Any = Ids()
    (row,) = episode_rows([episode], template, with_tokens=False)
    assert json.loads(as_line(row)) == {
        "seat": "",
        "fork": None,
        "messages": [{"role": "user", "content": "1 + 2 ="}, {"role": "assistant", "content": "3"}],
        "prompt": "1 2",
        "turns": [
            {"read": "1 2", "sampled": "7 8 9", "reward": None, "tokens": 3, "seconds": 1.5, "replica": 2},
            {"read": "3", "sampled": "4 4", "reward": 0.25, "tokens": 2, "seconds": 0.25, "replica": None},
        ],
        "reward": 1.0,
        "parts": {"score": 1.0},
        "info": {"note": "x"},
        "finish_reason": "stop",
        "tokens": 5,
        "versions": [[5, 1], [6, 3], [7, 1]],
        "began": 100.0,
        "ended": 103.0,
        "generate_s": 1.75,
        "tool_s": 0.5,
        "score_s": 0.25,
    }


def test_a_line_has_no_nan() -> None:
    assert as_line({"info": {"a": [float("nan"), (1.0, float("-inf"))]}}) == '{"info": {"a": [null, [1.0, null]]}}'


@pytest.mark.parametrize("key", [(1, "a"), b"a", np.int64(3)])
def test_a_key_that_json_does_not_support_is_represented(key: Any) -> None:
    line = as_line({"info": {key: [float("nan"), {key: 1}], 2: "two"}})
    assert json.loads(line) == {"info": {repr(key): [None, {repr(key): 1}], "2": "two"}}


def test_rows_of_branches_have_their_fork_and_all_their_turns() -> None:
    """Two rollouts of a tree: the second sequence forks from the first after a turn, the third from the second after
    two, the last from the first in the middle of its second turn."""

    def turn(context: list[int], ids: list[int]) -> Turn:
        n = len(ids)
        completion = Completion(np.asarray(ids), np.full(n, -0.5), np.zeros(n, int), "stop", seconds=1.0)
        return Turn.from_completion(context, completion)

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
    template: Any = Ids()
    found = episode_rows([sequence(n, fork, *turns) for n in range(2) for fork, turns in tree], template, False)
    for rollout in (found[:4], found[4:]):
        assert [row["fork"] for row in rollout] == [
            None,
            {"sequence": 0, "turns": 1},
            {"sequence": 1, "turns": 2},
            {"sequence": 0, "turns": 2},
        ]
        assert [[(turn["read"], turn["sampled"]) for turn in row["turns"]] for row in rollout] == [
            [("1 2", "7"), ("3", "8 8"), ("", "9")],
            [("1 2", "7"), ("4 4", "5")],
            [("1 2", "7"), ("4 4", "5"), ("6", "6")],
            [("1 2", "7"), ("3", "8 8"), ("", "5 5")],
        ]
        assert {row["prompt"] for row in rollout} == {"1 2"} and [row["tokens"] for row in rollout] == [4, 1, 1, 2]
        assert [row["generate_s"] for row in rollout] == [3.0, 1.0, 1.0, 1.0], "a shared turn counts once"


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
        ({"question": "1 + 2 =", "scorer": len}, {"question": "1 + 2 =", "scorer": "<built-in function len>"}),
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
