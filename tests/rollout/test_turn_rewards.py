"""Process rewards of turns: set at once, later, or by something that runs while the episode goes on."""

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
from tests.rollout.test_play import SETTINGS, Echo, play, run, task


@pytest.fixture
def template(model: str) -> ChatTemplate:
    return ChatTemplate(model)


def turn_rewards(episode: Episode) -> list[float | None]:
    return [turn.reward for turn in episode.turns]


def test_a_turn_keeps_the_reward_that_is_set_last_and_no_reward_is_none(template: ChatTemplate) -> None:
    async def episode(item: Any, policy: Policy) -> float:
        first = await policy.reply("a")
        second = await policy.reply("b")
        await policy.reply("c")
        second.reward = {"format": 0.25, "right": 0.5}
        first.reward = 3
        first.reward = -1
        assert (first.reward, second.reward) == (-1.0, 0.75)
        return 1.0

    played = play(Echo(template, "8"), template, episode)
    assert turn_rewards(played) == [-1.0, 0.75, None] and played.reward == 1.0


def test_a_turns_reward_is_computed_while_the_episode_goes_on_and_waited_for(template: ChatTemplate) -> None:
    gone_on = asyncio.Event()

    async def judge(reply: Reply) -> Outcome:
        await gone_on.wait()
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
        gone_on.set()
        raise ContextFull  # it ends in another way, and waits for them all the same

    scorer: Any = type("Scorer", (), {"score": scored})()
    played = play(Echo(template, "8"), template, episode, scorer=scorer)
    assert turn_rewards(played) == [8.0, 0.5, 8.0] and played.reward == 0.0


def test_what_an_overwritten_or_failed_episodes_rewards_wait_for_is_ended(template: ChatTemplate) -> None:
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

    assert turn_rewards(play(Echo(template, "8"), template, overwriting)) == [2.0]
    with pytest.raises(EpisodeFailed, match="KeyError"):
        play(Echo(template, "8"), template, failing)
    assert ended == ["overwritten", "failed"]


def test_what_a_reward_raised_that_nobody_waits_for_is_not_logged(
    template: ChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
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

    assert turn_rewards(play(Echo(template, "8"), template, overwriting)) == [2.0]
    with pytest.raises(EpisodeFailed, match="ValueError"):
        play(Echo(template, "8"), template, failing)
    gc.collect()  # asyncio logs what nobody looked at when the task is collected
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

    def play_all(episode: Any) -> list[Episode]:
        player = EpisodeRunner(Echo(template, "8"), template, SETTINGS)
        return run(player.play(task(episode), 7, "", Sampling(), 0))

    of_seats = play_all(seats)
    assert [(of.seat, turn_rewards(of)) for of in of_seats] == [("white", [0.0]), ("black", [1.0])]
    of_branches = play_all(branches)
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


@pytest.mark.parametrize(
    ("episode", "reason", "report"),
    [
        (late, "the episode's own code took over 0.2 s", "await asyncio.Event().wait()"),
        (raising, "turn reward raised KeyError", 'return {"cat": 1.0}["dog"]'),
        (leaving, "turn reward raised RuntimeError", "raise SystemExit"),
        (cancelling, "turn reward was cancelled by the episode's own code", ""),
        (unjudged, "frozen model judge did not answer in time", "request 3"),
        (becoming_text, "turn reward raised ValueError", "'good' is text"),
        (setting("good"), "episode raised ValueError", '(await policy.reply("a")).reward = value'),
        (setting(math.nan), "episode raised ValueError", "not a finite number"),
    ],
)
def test_a_turns_reward_that_cannot_be_costs_its_episode(
    template: ChatTemplate, episode: Any, reason: str, report: str
) -> None:
    with pytest.raises(EpisodeFailed) as raised:
        play(Echo(template, "8"), template, episode)
    assert raised.value.reason == reason and report in raised.value.report
    assert raised.value.tokens


def test_a_scoring_process_that_fails_a_turn_costs_its_episode_and_a_broken_one_the_worker(
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
        play(Echo(template, "8"), template, episode, scorer=scorer(ScoringFailed("score took over 1 s")))
    with pytest.raises(ScorerBroken):
        play(Echo(template, "8"), template, episode, scorer=scorer(ScorerBroken("no processes")))


def test_after_the_episode_no_reward_can_be_set(template: ChatTemplate) -> None:
    kept: list[Reply] = []

    async def episode(item: Any, policy: Policy) -> float:
        kept.append(await policy.reply("a"))
        return 1.0

    play(Echo(template, "8"), template, episode)
    with pytest.raises(RuntimeError, match="over"):
        kept[0].reward = 1.0
    gc.collect()
