"""Rewards that compare the episodes of a group."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.episode.sampling import Completion
from monarch_rl.errors import JudgeFailed, LoopBlocked
from monarch_rl.rollout.episode_clock import episode_clock_stopped
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.stages import GroupRewarder
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.tasks.task import MOST_INFO_BYTES, Outcome, Task
from tests.patience import patiently
from tests.rollout.cores import AMPLE_S, with_cores

LOST = EpisodeFailed("score hung")


async def _never_run(item: Any, policy: Any) -> float:
    raise AssertionError


def group(*answers: str) -> list[list[Episode] | EpisodeFailed]:
    """One episode of one sequence of one token for each answer, and one that failed."""
    turn = Turn.from_completion([1], Completion(np.asarray([7]), np.full(1, -0.5), np.asarray([5]), "stop"))
    parts, info = {"own": 0.25}, {"of": "the episode"}
    episodes = [Episode([turn], 0.25, "stop", info, parts=parts, answer=answer) for answer in answers]
    return [*([episode] for episode in episodes[:1]), LOST, *([episode] for episode in episodes[1:])]


def rewarded(function: Any, *answers: str, scorer: Any = None, deadline_s: float = 10.0) -> list[Any]:
    """In virtual time, except with scoring processes."""
    task = Task(lambda cursor: cursor, _never_run, group_rewards=function)
    rollouts = group(*answers)

    async def rewards() -> list[Any]:
        adding = GroupRewarder(scorer, deadline_s).added(task, "item", 7, rollouts)
        return [rollout if isinstance(rollout, EpisodeFailed) else rollout[0] for rollout in await adding]

    return run_virtual(rewards()) if scorer is None else asyncio.run(patiently(rewards(), "the rewards"))


def majority(item: str, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """1 for the most frequent answer (TTRL, arXiv:2504.16084)."""
    counts = Counter(outcome.answer for outcome in outcomes)
    votes = [counts[outcome.answer] for outcome in outcomes]
    return [Outcome(float(vote == max(votes)), {"votes": vote}, {"item": item}) for vote in votes]


def missing(item: str, outcomes: Sequence[Outcome]) -> list[float]:
    return [{"cat": 1.0}[outcome.answer] for outcome in outcomes]


def too_few(item: str, outcomes: Sequence[Outcome]) -> list[float]:
    return [1.0]


def one_for_all(item: str, outcomes: Sequence[Outcome]) -> Any:
    return 1.0


def hanging(item: str, outcomes: Sequence[Outcome]) -> list[float]:
    while True:
        pass


async def ranks(item: str, outcomes: Sequence[Outcome]) -> Any:
    await asyncio.sleep(0)
    order = sorted(outcome.answer for outcome in outcomes)
    return [np.float32(order.index(outcome.answer)) for outcome in outcomes]


async def raising(item: str, outcomes: Sequence[Outcome]) -> Any:
    raise KeyError("dog")


async def unjudged(item: str, outcomes: Sequence[Outcome]) -> Any:
    raise JudgeFailed("frozen model judge did not answer in time", "request 3")


async def endless(item: str, outcomes: Sequence[Outcome]) -> Any:
    await asyncio.Event().wait()


async def blocking(item: Any, outcomes: Any) -> Any:
    raise LoopBlocked  # as the worker's guard does in a loop without an `await`


async def leaving(item: str, outcomes: Sequence[Outcome]) -> Any:
    raise SystemExit


async def at_length(item: str, outcomes: Sequence[Outcome]) -> Any:
    return [Outcome(1.0, info={"why": "x" * (MOST_INFO_BYTES - 20)}) for _ in outcomes]


async def words(item: str, outcomes: Sequence[Outcome]) -> Any:
    return ["good"] * len(outcomes)


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    scorer = Scorer(1, AMPLE_S)
    yield scorer
    scorer.close()


def test_a_function_compares_the_group_in_a_scoring_process(scorer: Scorer) -> None:
    first, lost, second, third = rewarded(majority, "a", "b", "b", scorer=scorer)
    assert lost is LOST and [first.reward, second.reward, third.reward] == [0.0, 1.0, 1.0]
    assert first.parts == {"own": 0.25, "votes": 1.0} and third.info == {"of": "the episode", "item": "item"}


@pytest.mark.parametrize(
    ("function", "reason", "report"),
    [
        (missing, "group rewards: score raised KeyError", 'return [{"cat": 1.0}[outcome.answer]'),
        (hanging, "group rewards: score took over 1 s", "in hanging"),
        (one_for_all, "group rewards: score returned an unusable value", "one reward per episode, got 1.0"),
        (too_few, "group rewards returned an unusable value", "2 outcomes"),
    ],
)
def test_a_failed_function_fails_its_group(
    scorer: Scorer, function: Any, reason: str, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cores(monkeypatch)
    scorer.deadline_s = 1.0 if function is hanging else AMPLE_S
    first, lost, second = rewarded(function, "a", "b", scorer=scorer)
    assert lost is LOST and first.reason == second.reason == reason and report in first.report
    assert (first.tokens, first.index) == (1, 7)


def test_a_coroutine_compares_the_group_in_the_worker() -> None:
    first, _, second = rewarded(ranks, "b", "a")
    assert [first.reward, second.reward] == [1.0, 0.0] and first.parts == {"own": 0.25}


@pytest.mark.parametrize(
    ("function", "reason", "report"),
    [
        (raising, "group rewards raised KeyError", 'raise KeyError("dog")'),
        (endless, "group rewards took over 0.2 s", "--rollout.episode-deadline-s"),
        (leaving, "group rewards raised SystemExit", "raise SystemExit"),
        (blocking, "group rewards blocked the worker", "asyncio.to_thread"),
        (words, "group rewards returned an unusable value", "'good' is text"),
        (at_length, "group rewards cannot be used", "65,548 bytes"),
        (unjudged, "group rewards: frozen model judge did not answer in time", "request 3"),
    ],
)
def test_a_failed_coroutine_fails_its_group(function: Any, reason: str, report: str) -> None:
    first, lost, second = rewarded(function, "a", "b", deadline_s=0.2)
    assert lost is LOST and first.reason == second.reason == reason and report in first.report


def test_time_of_a_judge_does_not_count_against_the_deadline_of_group_rewards() -> None:
    """In virtual time."""

    async def judged(item: str, outcomes: Sequence[Outcome]) -> list[float]:
        with episode_clock_stopped():
            await asyncio.sleep(50.0)
        return [1.0, 0.0]

    async def judged_and_late(item: str, outcomes: Sequence[Outcome]) -> list[float]:
        rewards = await judged(item, outcomes)
        await asyncio.sleep(50.0)
        return rewards

    no_scorer: Any = None

    def rewards(function: Any) -> list[Any]:
        of_group = Task(lambda cursor: cursor, _never_run, group_rewards=function)
        return run_virtual(GroupRewarder(no_scorer, 10.0).added(of_group, "item", 7, group("a", "b")))

    first, _, second = rewards(judged)
    assert [first[0].reward, second[0].reward] == [1.0, 0.0]
    assert rewards(judged_and_late)[0].reason == "group rewards took over 10 s"


def test_each_seat_and_branch_has_its_own_outcome() -> None:
    (white,), _, (black,) = group("a", "b")  # type: ignore[misc]
    white.seat, black.seat = "white", "black"
    task = Task(lambda cursor: cursor, _never_run, group_rewards=placed)

    async def rewards() -> None:
        scorer: Any = None
        await GroupRewarder(scorer, 10.0).added(task, "item", 7, [[white, black], LOST, [replace(white)]])

    asyncio.run(rewards())
    assert (white.reward, black.reward) == (1.0, 2.0) and black.info["was"] == ["black", "b", 0]


async def placed(item: str, outcomes: Sequence[Outcome]) -> list[Outcome]:
    assert [(outcome.seat, outcome.rollout) for outcome in outcomes] == [("white", 0), ("black", 0), ("white", 1)]
    return [Outcome(place + 1.0, {}, {"was": [of.seat, of.answer, of.rollout]}) for place, of in enumerate(outcomes)]


def test_a_group_without_episodes_is_not_compared() -> None:
    assert rewarded(raising) == [LOST]
