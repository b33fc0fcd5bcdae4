"""However episode code ends, its resources are closed, and its errors fail no other episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from monarch_rl.episode.sampling import Sampling
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.play import EpisodeRunner, all_or_none
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.tasks.task import Policy
from tests.rollout.test_play import SETTINGS, Echo, Silent, line_of, run_episode, task


class Opened:
    """A resource of an episode; closing it takes several turns of the event loop."""

    def __init__(self) -> None:
        self.opened = self.closed = 0

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[None]:
        self.opened += 1
        try:
            yield
        finally:
            for _ in range(10):
                await asyncio.sleep(0.01)
            self.closed += 1


@pytest.fixture
def template(model: str) -> ChatTemplate:
    return ChatTemplate(model)


def test_a_cancelled_episode_closes_its_resources(template: ChatTemplate) -> None:
    """An episode that is late, or is cancelled with its group during a turn or in its own code; all are closed before
    the worker ends."""
    opened = Opened()

    async def late(item: Any, policy: Policy) -> float:
        async with opened.connection():
            await asyncio.Event().wait()
        return 1.0

    async def at_its_turn(item: Any, policy: Policy) -> float:
        async with opened.connection():
            await policy.reply("guess")
        return 1.0

    async def test() -> None:
        runner = EpisodeRunner(Silent(), template, SETTINGS)
        with pytest.raises(EpisodeFailed, match=r"0\.2 s"):
            await runner.play(task(late), 0, "", Sampling(), 0)
        await runner.leave()
        assert (opened.opened, opened.closed) == (1, 1)
        rollouts = [runner.play(task(episode), 0, "", Sampling(), 0) for episode in (late, at_its_turn) * 3]
        group = asyncio.ensure_future(all_or_none(rollouts))
        while opened.opened < 7:
            await asyncio.sleep(0)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert opened.closed < 7
        await runner.leave()
        assert opened.closed == 7

    run_virtual(test())


def test_an_episode_that_does_not_close_delays_the_end_for_a_bounded_time(
    template: ChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    async def stubborn(item: Any, policy: Policy) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()
        return 1.0

    async def test() -> None:
        runner = EpisodeRunner(Echo(template, "8"), template, SETTINGS)
        with pytest.raises(EpisodeFailed, match=r"0\.2 s"):
            await runner.play(task(stubborn), 0, "", Sampling(), 0)
        await runner.leave()

    run_virtual(test())
    assert "within 5 s" in caplog.text


async def recurses(item: Any, policy: Policy) -> float:
    await policy.reply("a")
    return deeper(0)


def deeper(depth: int) -> float:
    return deeper(depth + 1)


async def awaits_itself(item: Any, policy: Policy) -> float:
    return await awaits_itself(item, policy)


async def interrupts(item: Any, policy: Policy) -> float:
    raise KeyboardInterrupt


class Ends(BaseException):
    """Raised by a library that ends its work by an exception of its own."""


async def raises_no_exception(item: Any, policy: Policy) -> float:
    await policy.reply("a")
    raise Ends("enough")


class Unprintable(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


async def raises_what_cannot_be_printed(item: Any, policy: Policy) -> float:
    raise Unprintable("no text")


async def raises_from_itself(item: Any, policy: Policy) -> float:
    try:
        return float("a")
    except ValueError as error:
        raise error from error


async def in_too_many_parts(item: Any, policy: Policy) -> dict[str, float]:
    await policy.reply("a")
    return {str(part): 0.0 for part in range(1000)}


@pytest.mark.parametrize(
    ("episode", "reason", "report", "line"),
    [
        (recurses, "episode raised RecursionError", "in deeper", (deeper, "return")),
        (awaits_itself, "episode raised RecursionError", "in awaits_itself", (awaits_itself, "return")),
        (interrupts, "episode raised KeyboardInterrupt", "in interrupts", (interrupts, "raise")),
        (raises_no_exception, "episode raised Ends", "enough", (raises_no_exception, "enough")),
        (
            raises_what_cannot_be_printed,
            "episode raised Unprintable",
            "in raises_what",
            (raises_what_cannot_be_printed, "no text"),
        ),
        (raises_from_itself, "episode raised ValueError", "in raises_from_itself", (raises_from_itself, "return")),
        (in_too_many_parts, "episode returned an unusable value", "1000", (in_too_many_parts, "async def")),
    ],
)
def test_an_error_that_would_end_the_event_loop_or_fill_the_metrics_fails_only_its_episode(
    template: ChatTemplate, episode: Any, reason: str, report: str, line: tuple[Any, str]
) -> None:
    with pytest.raises(EpisodeFailed) as failed:
        run_episode(Echo(template, "8"), template, episode)
    assert failed.value.reason == reason and report in failed.value.report
    assert len(failed.value.report) < 10_000
    assert failed.value.place == f"{__file__}:{line_of(*line)}"
