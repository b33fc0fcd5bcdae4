"""Process rewards of turns: set at once, later, or by an awaitable that runs while the episode continues."""

from __future__ import annotations

import asyncio
import gc
import math
from typing import Any

import pytest

from monarch_rl.episode.episode import Episode
from monarch_rl.episode.sampling import Sampling
from monarch_rl.errors import ContextFull, JudgeFailed, ScorerBroken, ScoringFailed
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.play import EpisodeRunner
from monarch_rl.tasks.task import Outcome, Policy, Reply
from tests.rollout.test_play import SETTINGS, Echo, run, run_episode, task


@pytest.fixture
def template(model: str) -> ChatTemplate:
    return ChatTemplate(model)


def turn_rewards(episode: Episode) -> list[float | None]:
    return [turn.reward for turn in episode.turns]


def test_a_turn_has_the_last_reward_that_was_set_or_none(template: ChatTemplate) -> None:
    async def episode(item: Any, policy: Policy) -> float:
        first = await policy.reply("a")
        second = await policy.reply("b")
        await policy.reply("c")
        second.reward = {"format": 0.25, "right": 0.5}
        first.reward = 3
        first.reward = -1
        assert (first.reward, second.reward) == (-1.0, 0.75)
        return 1.0

    result = run_episode(Echo(template, "8"), template, episode)
    assert turn_rewards(result) == [-1.0, 0.75, None] and result.reward == 1.0


def test_a_turn_reward_is_computed_while_the_episode_continues_and_awaited_at_its_end(template: ChatTemplate) -> None:
    continued = asyncio.Event()

    async def judge(reply: Reply) -> Outcome:
        await continued.wait()
        return Outcome(float(reply.text))

    async def scored(*_: Any) -> Outcome:
        return Outcome(0.5)

    async def episode(item: Any, policy: Policy) -> float:
        first = await policy.reply("a")
        first.reward = judge(first)
        assert first.reward is None
        second = await policy.reply("b")
        second.reward = policy.in_scorer(len, "")
        third = await policy.reply("c")
        third.reward = asyncio.ensure_future(judge(third))
        continued.set()
        raise ContextFull  # ends by an exception, and still awaits the rewards

    scorer: Any = type("Scorer", (), {"score": scored})()
    result = run_episode(Echo(template, "8"), template, episode, scorer=scorer)
    assert turn_rewards(result) == [8.0, 0.5, 8.0] and result.reward == 0.0


def test_pending_rewards_of_failed_episodes_and_overwritten_ones_are_cancelled(template: ChatTemplate) -> None:
    ended: list[str] = []

    async def endless(name: str) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
        return 0.0

    async def overwriting(item: Any, policy: Policy) -> float:
        reply = await policy.reply("a")
        reply.reward = endless("overwritten")
        await asyncio.sleep(0)
        reply.reward = 2.0
        return 1.0

    async def failing(item: Any, policy: Policy) -> float:
        reply = await policy.reply("a")
        reply.reward = endless("failed")
        await asyncio.sleep(0)
        raise KeyError("a")

    assert turn_rewards(run_episode(Echo(template, "8"), template, overwriting)) == [2.0]
    with pytest.raises(EpisodeFailed, match="KeyError"):
        run_episode(Echo(template, "8"), template, failing)
    assert ended == ["overwritten", "failed"]


def test_errors_of_abandoned_rewards_are_not_logged(template: ChatTemplate, caplog: pytest.LogCaptureFixture) -> None:
    failed: list[str] = []

    async def judge(name: str) -> float:
        failed.append(name)
        raise KeyError(name)

    async def unwilling() -> float:
        try:
            await asyncio.Event().wait()
        finally:
            await judge("cancelled")
        return 0.0

    async def overwriting(item: Any, policy: Policy) -> float:
        reply = await policy.reply("a")
        rewards: list[Any] = [judge("overwritten"), unwilling(), 2.0]
        for reward in rewards:
            reply.reward = reward
            await asyncio.sleep(0)
        return 1.0

    async def failing(item: Any, policy: Policy) -> float:
        (await policy.reply("a")).reward = judge("of a failed episode")
        await asyncio.sleep(0)
        raise ValueError("a")

    assert turn_rewards(run_episode(Echo(template, "8"), template, overwriting)) == [2.0]
    with pytest.raises(EpisodeFailed, match="ValueError"):
        run_episode(Echo(template, "8"), template, failing)
    gc.collect()  # asyncio logs errors that were never retrieved when it collects the task
    assert failed == ["overwritten", "cancelled", "of a failed episode"]
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_turns_of_seats_and_branches_have_their_rewards(template: ChatTemplate) -> None:
    async def seats(item: Any, policy: Policy) -> dict[str, float]:
        for reward, name in enumerate(("white", "black")):
            (await policy.seat(name).reply("a")).reward = reward
        return {"white": 1.0, "black": -1.0}

    async def branches(item: Any, policy: Policy) -> list[float]:
        (await policy.reply("a")).reward = 5.0
        forks = [policy.fork(), policy.fork()]
        for reward, fork in enumerate(forks):
            (await fork.reply("b")).reward = reward
        return [1.0, 2.0]

    def run_all(episode: Any) -> list[Episode]:
        runner = EpisodeRunner(Echo(template, "8"), template, SETTINGS)
        return run(runner.play(task(episode), 7, "", Sampling(), 0))

    of_seats = run_all(seats)
    assert [(of.seat, turn_rewards(of)) for of in of_seats] == [("white", [0.0]), ("black", [1.0])]
    of_branches = run_all(branches)
    assert [turn_rewards(of) for of in of_branches] == [[5.0, 0.0], [5.0, 1.0]]


async def late(item: Any, policy: Policy) -> float:
    async def judge() -> float:
        await asyncio.Event().wait()
        return 1.0

    (await policy.reply("a")).reward = judge()
    return 1.0


async def raising(item: Any, policy: Policy) -> float:
    async def judge() -> float:
        return {"cat": 1.0}["dog"]

    (await policy.reply("a")).reward = judge()
    await asyncio.sleep(0.01)
    await policy.reply("b")
    return 1.0


async def leaving(item: Any, policy: Policy) -> float:
    async def judge() -> float:
        raise SystemExit

    (await policy.reply("a")).reward = judge()
    return 1.0


async def unjudged(item: Any, policy: Policy) -> float:
    async def reward() -> float:
        raise JudgeFailed("frozen model judge did not answer in time", "request 3")

    (await policy.reply("a")).reward = reward()
    return 1.0


async def cancelling(item: Any, policy: Policy) -> float:
    reply = await policy.reply("a")
    reply.reward = asyncio.get_running_loop().create_future()
    assert reply.awaited_reward is not None
    reply.awaited_reward.cancel()
    return 1.0


def setting(value: Any) -> Any:
    async def episode(item: Any, policy: Policy) -> float:
        (await policy.reply("a")).reward = value
        return 1.0

    return episode


async def becoming_text(item: Any, policy: Policy) -> float:
    async def judge() -> Any:
        return "good"

    (await policy.reply("a")).reward = judge()
    return 1.0


GOOD: Any = "good"


async def becoming_text_in_a_task(item: Any, policy: Policy) -> float:
    (await policy.reply("a")).reward = asyncio.create_task(asyncio.sleep(0, GOOD))
    return 1.0


async def becoming_text_on_a_thread(item: Any, policy: Policy) -> float:
    (await policy.reply("a")).reward = asyncio.to_thread(lambda: GOOD)
    return 1.0


@pytest.mark.parametrize(
    ("episode", "reason", "report"),
    [
        (late, "the episode's own code took over 0.2 s", "await asyncio.Event().wait()"),
        (raising, "turn reward raised KeyError", 'return {"cat": 1.0}["dog"]'),
        (leaving, "turn reward raised RuntimeError", "raise SystemExit"),
        (cancelling, "turn reward was cancelled by the episode's own code", ""),
        (unjudged, "frozen model judge did not answer in time", "request 3"),
        (becoming_text, "turn reward returned an unusable value", "'good' is text"),
        (becoming_text_in_a_task, "turn reward returned an unusable value", "'good' is text"),
        (becoming_text_on_a_thread, "turn reward returned an unusable value", "'good' is text"),
        (setting("good"), "turn reward returned an unusable value", "'good' is text"),
        (setting(math.nan), "turn reward returned an unusable value", "not a finite number"),
    ],
)
def test_an_invalid_turn_reward_fails_its_episode(
    template: ChatTemplate, episode: Any, reason: str, report: str
) -> None:
    with pytest.raises(EpisodeFailed) as raised:
        run_episode(Echo(template, "8"), template, episode)
    assert raised.value.reason == reason and report in raised.value.report
    assert raised.value.tokens
    if "unusable" in reason:
        assert __file__ in raised.value.place and raised.value.place in raised.value.report


def test_a_failed_turn_score_fails_its_episode_and_a_broken_scorer_the_worker(
    template: ChatTemplate,
) -> None:
    async def episode(item: Any, policy: Policy) -> float:
        (await policy.reply("a")).reward = policy.in_scorer(len, "")
        return 1.0

    def scorer(error: Exception) -> Any:
        async def score(*_: Any) -> Outcome:
            raise error

        return type("Scorer", (), {"score": score})()

    with pytest.raises(EpisodeFailed, match="score took over 1 s"):
        run_episode(Echo(template, "8"), template, episode, scorer=scorer(ScoringFailed("score took over 1 s")))
    with pytest.raises(ScorerBroken):
        run_episode(Echo(template, "8"), template, episode, scorer=scorer(ScorerBroken("no processes")))


def test_no_reward_can_be_set_after_the_episode(template: ChatTemplate) -> None:
    replies: list[Reply] = []

    async def episode(item: Any, policy: Policy) -> float:
        replies.append(await policy.reply("a"))
        return 1.0

    run_episode(Echo(template, "8"), template, episode)
    with pytest.raises(RuntimeError, match="over"):
        replies[0].reward = 1.0
    gc.collect()
