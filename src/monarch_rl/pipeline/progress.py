"""What the console shows while nothing is finished: the parts of the start, and what a long wait is waiting for.

A terminal shows it in its last line, each second; a file gets a line when a part is done, and for a long wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import TypeVar

from monarch_rl.buffer.actor import AwaitedBatch, Buffer
from monarch_rl.observe.console import area_of
from monarch_rl.observe.console_relay import existing_relay
from monarch_rl.pipeline.actor_pool import ActorPool, last_line
from monarch_rl.rollout.statistics import WorkerProgress
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import now, within

logger = logging.getLogger("monarch_rl")

T = TypeVar("T")
Note = Callable[[str], None]
"""Prints a line."""

STATUS_S = 1.0
"""Seconds between updates of a terminal's last line."""
FIRST_S = 30.0
"""Seconds after which a wait is reported for the first time."""
ANSWER_S = 5.0
"""Seconds for a process to report its progress. A worker whose event loop is blocked does not."""


@asynccontextmanager
async def reporting(
    note: Note,
    describe: Callable[[float], Awaitable[str]],
    steadily: bool = False,
    status: Note | None = None,
) -> AsyncIterator[None]:
    """While the block runs, print what it waits for: after :data:`FIRST_S`, and each time the wait has become twice as
    long.

    Args:
        describe: returns the line, given the seconds since the block began. If it raises, there is no line.
        steadily: print it every :data:`FIRST_S` instead.
        status: shows the line every :data:`STATUS_S` in addition, and "" at the end; None without a terminal.
    """
    began = now()

    async def report() -> None:
        next_s = FIRST_S
        while True:
            await asyncio.sleep(began + next_s - now())
            passed_s = now() - began  # much more than next_s if the process was stopped
            try:
                note(await describe(passed_s))  # waits: for processes, within ANSWER_S
            except Exception as error:  # the wait itself reports a lost process
                logger.debug("no progress to report: %s", last_line(error))
            next_s = passed_s + FIRST_S if steadily else 2 * passed_s

    async def show(status: Note) -> None:
        while True:
            await asyncio.sleep(STATUS_S)
            try:
                status(await describe(now() - began))  # waits: for processes, within ANSWER_S
            except Exception as error:  # as above
                logger.debug("no progress to show: %s", last_line(error))

    reporters = [asyncio.ensure_future(report())]
    if status is not None:
        reporters.append(asyncio.ensure_future(show(status)))
    try:
        yield
    finally:
        for reporter in reporters:
            reporter.cancel()
        if status is not None:
            status("")


# -- the start of a run -----------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a line before the run's console is open, at once, even into a pipe."""
    print(text, flush=True)


class Start:
    """The parts of a run's start: each is reported when it is done, and those that are not while they take long."""

    def __init__(self) -> None:
        self._began = now()
        self._pending: list[str] = []

    async def part(self, what: str, starting: Awaitable[T], done: str) -> T:
        """Await one part.

        Args:
            what: completes the sentence "waiting for ...".
            done: the line when it is done, without the time.
        """
        self._pending.append(what)
        try:
            result = await starting  # waits: it has deadlines of its own
        finally:
            self._pending.remove(what)
        say(f"{done} ({now() - self._began:.0f} s)")
        return result

    @asynccontextmanager
    async def reporting(self) -> AsyncIterator[None]:
        """While the block runs, print regularly which parts are not done; see :func:`reporting`."""
        area = area_of(existing_relay())

        def show(text: str) -> None:
            if text:
                area.show(text)
            else:
                area.end(keep=False)

        async with reporting(say, self._describe, steadily=True, status=show if area.terminal.is_terminal else None):
            yield

    async def _describe(self, seconds: float) -> str:
        return f"starting for {seconds:.0f} s; waiting for {', '.join(self._pending)}"


# -- a batch, and an evaluation ---------------------------------------------------------------------------------------


class Progress:
    """Reports what a run waits for, in blocks of code that may take long.

    Args:
        note: prints a line; None reports nothing.
        state_of: describes a process that does not answer, in words that complete a sentence beginning with its name;
            empty if nothing is known.
        status: shows a text in a terminal's last line, and nothing for ""; None without a terminal.
    """

    def __init__(
        self,
        note: Note | None,
        buffer: Buffer,
        workers: ActorPool[RolloutWorker],
        state_of: Callable[[str], str],
        status: Note | None = None,
    ) -> None:
        self._note, self._buffer, self._workers = note, buffer, workers
        self._state_of, self._status = state_of, status

    def step(self, step: str) -> AbstractAsyncContextManager[None]:
        """While a step, called ``step``, is made: what its batch lacks, or that the trainer computes."""
        return self._reporting(partial(self._of_step, step), self._status)

    def evaluation(self, when: str, episodes: int, concurrent: bool = False) -> AbstractAsyncContextManager[None]:
        """While the evaluation ``when`` ("after step 3") runs so many held-out episodes: how many of them are done. One
        that runs concurrently with training leaves a terminal's last line to the steps."""
        return self._reporting(partial(self._of_evaluation, when, episodes), None if concurrent else self._status)

    def waiting(self, what: str) -> AbstractAsyncContextManager[None]:
        """While something else is awaited, such as a write to a slow disk. ``what`` completes the sentence "waiting for
        ..."."""
        return self._reporting(partial(_of_wait, what), self._status)

    def _reporting(
        self, describe: Callable[[float], Awaitable[str]], status: Note | None
    ) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._note is None else reporting(self._note, describe, status=status)

    async def _of_step(self, step: str, seconds: float) -> str:
        call = self._buffer.awaited_batch.call_one()
        batch = await within(ANSWER_S, call, "the buffer to report on the batch", on="buffer")
        if batch is None:
            return f"{step}: the trainer has not finished it after {seconds:.0f} s"
        answers, silent = await self._ask(batch.missing)
        longest = _longest(answers)
        if batch.missing and not longest and not silent:
            longest = ["no episode of them is running: items, group rewards or stages take the time"]
        return "; ".join([f"{step}: {describe_batch(batch)}", *longest, *silent])

    async def _of_evaluation(self, when: str, episodes: int, seconds: float) -> str:
        answers, silent = await self._ask(None)
        ended = sum(answer.held_out for answer in answers)
        text = f"evaluating {when}: {ended} of {episodes} held-out episodes are done after {seconds:.0f} s"
        return "; ".join([text, *_longest(answers), *silent])

    async def _ask(self, groups: list[int] | None) -> tuple[list[WorkerProgress], list[str]]:
        """The workers' progress with some groups, or with held-out items; and the names of those that do not answer,
        with their states."""
        calls = {
            name: within(ANSWER_S, worker.progress.call_one(groups), f"{name} to report its progress", on=name)
            for index, worker in self._workers.handles.items()
            if (name := self._workers.name(index))
        }
        answers, silent = list[WorkerProgress](), list[str]()
        # waits: each call has a deadline
        for name, answer in zip(calls, await asyncio.gather(*calls.values(), return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                silent.append(f"{name} {self._state_of(name) or 'does not answer'}")
            else:
                answers.append(answer)
        return answers, silent


async def _of_wait(what: str, seconds: float) -> str:
    return f"waiting for {what} for {seconds:.0f} s"


def _longest(answers: Iterable[WorkerProgress]) -> list[str]:
    episodes = [answer.longest for answer in answers if answer.longest is not None]
    return [f"longest episode: {max(episodes, key=lambda episode: episode.tokens)}"] if episodes else []


def describe_batch(batch: AwaitedBatch) -> str:
    """What a batch lacks, in words."""
    missing = len(batch.missing)
    text = (
        f"waiting for its batch for {batch.waited_s:.0f} s: {batch.groups - missing - batch.unstarted} of "
        f"{batch.groups} groups are complete, {missing} are running"
    )
    if batch.unstarted:
        text += f", {batch.unstarted} have not started"
    if later := batch.running - missing:
        text += f"; {later} groups of later batches are running"
    if batch.dropped:
        text += "; dropped meanwhile: " + ", ".join(f"{count} {reason}" for reason, count in batch.dropped.items())
    return text
