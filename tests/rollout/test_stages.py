"""Stages on synthetic groups: their effects, and the consequences of their failures."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode.episode import Fork, Group
from monarch_rl.episode.failure import KINDS
from monarch_rl.episode.serialization import deserialize_group, serialize_group
from monarch_rl.errors import LoopBlocked
from monarch_rl.rollout.stages import DropGroup, Stage, StageFailed, Stages, columns_filled
from monarch_rl.simulate.clock import run_virtual
from tests.buffer.helpers import group

Times = list[tuple[str, float, float]]


def run(stages: list[Stage], *groups: Group) -> tuple[list[StageFailed | None], Times]:
    """All groups at once, with the items 0, 1, ..., in virtual time."""
    times: Times = []

    async def all_groups() -> list[StageFailed | None]:
        of_worker = Stages(stages, lambda *time: times.append(time))

        async def one(item: int, of_item: Group) -> StageFailed | None:
            try:
                await of_worker.run(item, of_item)
            except StageFailed as failed:
                return failed
            return None

        return await asyncio.gather(*(one(item, of_item) for item, of_item in enumerate(groups)))

    return run_virtual(all_groups()), times


def made(group_id: int = 0) -> Group:
    """Two episodes of two turns."""
    one, other = group(group_id, [0, 0, 1], [0]), group(group_id, [1], [1, 1])
    for episode, second in zip(one.episodes, other.episodes, strict=True):
        episode.turns += second.turns
    return one


async def teacher(item: Any, group: Group) -> None:
    for episode in group.episodes:
        episode.fill_column("teacher", episode.token_ids + item + 0.5)


async def judge(item: Any, group: Group) -> None:
    for episode in group.episodes:
        episode.reward += float(episode.column("teacher").sum())
        episode.turns[0].reward = -1.0


async def picky(item: Any, group: Group) -> None:
    if item:
        raise DropGroup("too easy")


def test_stages_fill_columns_and_change_rewards_one_after_the_other() -> None:
    groups = [made(0), made(1)]
    (first, second), times = run([Stage(teacher, fills=("teacher",)), Stage(judge), Stage(picky)], *groups)
    assert first is None and second is not None
    assert (second.reason, second.failure) == ("stage picky: too easy", None)
    for item, of_item in enumerate(deserialize_group(serialize_group(of_item)) for of_item in groups):
        for number, episode in enumerate(of_item.episodes):
            values = episode.token_ids + item + np.float32(0.5)
            assert episode.column("teacher").tolist() == np.where(episode.trainable, values, 0).tolist()
            assert episode.reward == pytest.approx(number + values[episode.trainable].sum())
            assert [turn.reward for turn in episode.turns] == [-1.0, None]
    assert sorted(name for name, _, _ in times) == ["judge"] * 2 + ["picky"] * 2 + ["teacher"] * 2


async def in_float32(item: Any, group: Group) -> None:
    for number, episode in enumerate(group.episodes):
        episode.reward = np.float32(number + 0.5)  # type: ignore[assignment]
        episode.parts = {"style": np.ones(3, np.float32).mean()}  # type: ignore[dict-item]
        episode.turns[1].reward = np.float32(0.25)  # type: ignore[assignment]


def test_numpy_rewards_of_a_stage_are_submitted_as_plain_numbers() -> None:
    group = made()
    (failed,), _ = run([Stage(in_float32)], group)
    assert failed is None
    for number, episode in enumerate(deserialize_group(serialize_group(group)).episodes):
        assert (episode.reward, episode.parts) == (number + 0.5, {"style": 1.0})
        assert [turn.reward for turn in episode.turns] == [None, 0.25]


async def typo(item: Any, group: Group) -> None:
    group.episode[0].reward = 1.0  # type: ignore[attr-defined]


async def hang(item: Any, group: Group) -> None:
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:  # as a library may
            await asyncio.sleep(0.1)
            return


async def leave(item: Any, group: Group) -> None:
    raise SystemExit(3)


async def block(item: Any, group: Group) -> None:
    raise LoopBlocked  # as the worker's guard does in a loop without an `await`


async def cancel_itself(item: Any, group: Group) -> None:
    raise asyncio.CancelledError


def no_coroutine(item: Any, group: Group) -> Any:
    return group.episodes[99]


async def nothing(item: Any, group: Group) -> None: ...


async def half(item: Any, group: Group) -> None:
    group.episodes[0].fill_column("teacher", np.zeros(group.episodes[0].num_tokens))


async def not_finite(item: Any, group: Group) -> None:
    for episode in group.episodes:
        episode.fill_column("teacher", np.where(np.arange(episode.num_tokens) == 2, np.nan, 1.0))


async def bad_reward(item: Any, group: Group) -> None:
    group.episodes[1].reward = float("inf")


async def text_reward(item: Any, group: Group) -> None:
    group.episodes[1].reward = "much"  # type: ignore[assignment]


async def bad_part(item: Any, group: Group) -> None:
    group.episodes[1].parts["style"] = float("nan")


async def bad_turn_reward(item: Any, group: Group) -> None:
    group.episodes[1].turns[1].reward = float("nan")


async def bad_info(item: Any, group: Group) -> None:
    group.episodes[0].info["ids"] = np.zeros(2)


async def no_episode(item: Any, group: Group) -> None:
    group.episodes.clear()


async def one_episode_less(item: Any, group: Group) -> None:
    del group.episodes[0]


async def another_fork(item: Any, group: Group) -> None:
    group.episodes[1].fork = Fork(1, 1)


async def another_order(item: Any, group: Group) -> None:
    group.episodes.reverse()


CANNOT = "left a group that cannot be trained"
FAILURES: list[tuple[Callable[[Any, Group], Any], tuple[str, ...], str, str]] = [
    (typo, (), "raised AttributeError", "'episode'"),
    (hang, (), "took over 0.2 s", "await asyncio.sleep(600)"),
    (leave, (), "raised SystemExit", "raise SystemExit(3)"),
    (block, (), "blocked the worker", "asyncio.to_thread"),
    (cancel_itself, (), "raised CancelledError", "Group 7"),
    (no_coroutine, (), "raised IndexError", "group.episodes[99]"),
    (lambda item, group: 1, (), "raised TypeError", "not a coroutine function"),
    (nothing, ("teacher",), CANNOT, "columns teacher"),
    (half, ("teacher",), CANNOT, "turn 0 of episode 1 has []"),
    (not_finite, ("teacher",), CANNOT, "episode 0 column teacher is nan at token 2"),
    (bad_reward, (), CANNOT, "Episode 1: the reward is inf"),
    (text_reward, (), CANNOT, "'much' is text"),
    (bad_part, (), CANNOT, "style is nan"),
    (bad_turn_reward, (), CANNOT, "Episode 1: turn 1: the reward is nan"),
    (bad_info, (), CANNOT, "ndarray"),
    (no_episode, (), CANNOT, "2 episodes and left 0"),
    (one_episode_less, (), CANNOT, "2 episodes and left 1"),
    (another_fork, (), CANNOT, "left 2"),
    (another_order, (), CANNOT, "DropGroup"),
]


@pytest.mark.parametrize(
    ("function", "fills", "reason", "report"), FAILURES, ids=[case[0].__name__ for case in FAILURES]
)
def test_a_failed_stage_drops_its_group_and_reports_why(
    function: Callable[[Any, Group], Awaitable[None]], fills: tuple[str, ...], reason: str, report: str
) -> None:
    async def only_the_first(item: Any, group: Group) -> None:
        if item:
            await teacher(item, group)
        else:
            await function(item, group)

    only_the_first = function if "coroutine" in report or function is no_coroutine else only_the_first  # type: ignore[assignment]
    stage = Stage(only_the_first, fills=fills, deadline_s=0.2, name="mine")
    (failed, other), _ = run([stage], made(7), made(8))
    assert failed is not None and failed.reason == f"stage mine {reason}"
    assert failed.failure is not None and report in failed.failure.report
    assert "Group 7, item 7" in failed.failure.report
    if only_the_first is not function:
        assert other is None
    if reason.startswith(("raised A", "raised I", "raised S", "took")):
        assert __file__ in failed.failure.place


def test_a_column_that_is_not_finite_in_one_episode_reaches_the_trainer() -> None:
    """The trainer leaves out the episode, and names and counts it."""

    async def one_wrong(item: Any, group: Group) -> None:
        await teacher(item, group)
        await not_finite(item, Group(0, 0, group.episodes[1:]))
        group.episodes[1].reward = 0.5

    of_one = made()
    (failed,), _ = run([Stage(one_wrong, fills=("teacher",))], of_one)
    assert failed is None
    right, wrong = deserialize_group(serialize_group(of_one)).episodes
    assert np.isfinite(right.column("teacher")).all() and wrong.reward == 0.5
    assert np.flatnonzero(np.isnan(wrong.column("teacher"))).tolist() == [2]


def test_a_group_is_dropped_if_every_episode_has_a_column_that_is_not_finite() -> None:
    async def each_another(item: Any, group: Group) -> None:
        for number, episode in enumerate(group.episodes):
            for place, name in enumerate(("teacher", "student")):
                episode.fill_column(name, np.full(episode.num_tokens, np.inf if place == number else 1.0))

    (failed,), _ = run([Stage(each_another, fills=("student", "teacher"))], made())
    assert failed is not None and failed.failure is not None
    assert "episode 0 column teacher is inf at token 2" in failed.failure.report


def test_concurrency_of_a_stage_is_bounded_and_waiting_is_reported_separately() -> None:
    inside, most = 0, 0

    async def slow(item: Any, group: Group) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.05)
        inside -= 1

    failed, times = run([Stage(slow, concurrency=2, deadline_s=60)], *(made(i) for i in range(6)))
    assert failed == [None] * 6 and most == 2
    waited = [0.0, 0.0, 0.05, 0.05, 0.1, 0.1]
    assert sorted(waited_s for _, waited_s, _ in times) == pytest.approx(waited)
    assert [seconds for _, _, seconds in times] == pytest.approx([0.05] * 6)


def test_waiting_for_a_stage_does_not_count_against_its_deadline() -> None:
    async def slow(item: Any, group: Group) -> None:
        await asyncio.sleep(0.3)

    failed, times = run([Stage(slow, concurrency=1, deadline_s=0.4)], *(made(i) for i in range(4)))
    assert failed == [None] * 4 and max(waited_s for _, waited_s, _ in times) == pytest.approx(0.9)


def test_reasons_beyond_a_maximum_are_counted_together() -> None:
    async def fussy(item: Any, group: Group) -> None:
        raise DropGroup(f"score {item}" + "!" * 1000 * (item % 2))

    failed, _ = run([Stage(fussy)], *(made(i) for i in range(3 * KINDS)))
    reasons = {one.reason for one in failed if one is not None}
    assert len(reasons) == KINDS + 1 and "stage fussy: other reasons" in reasons
    assert max(map(len, reasons)) < 120


def test_stages_are_checked_when_they_are_made() -> None:
    assert Stage(functools.partial(teacher)).name == "partial" and Stage(teacher).name == "teacher"
    assert columns_filled([Stage(teacher, fills=("a", "b")), Stage(judge)]) == {"a": "teacher", "b": "teacher"}
    with pytest.raises(ValueError, match="two.*'teacher'"):
        columns_filled([Stage(teacher), Stage(teacher)])
    with pytest.raises(ValueError, match="'teacher' and 'judge' .*'a'"):
        columns_filled([Stage(teacher, fills=("a",)), Stage(judge, fills=("a",))])
    with pytest.raises(ValueError, match="stage judge: concurrency"):
        Stage(judge, concurrency=0)
