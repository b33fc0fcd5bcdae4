"""The way between one caller and one replica: many requests a message, many answers a message.

A message costs about 0.3 ms of Python on each side, and an engine answers hundreds of requests a second. So requests
that are made in one turn of the caller's event loop, such as the episodes of a group, travel together, and so do the
answers, and parts of answers, that are ready in one turn of the replica's. Nobody waits for a message to fill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.parts import UNFINISHED, OnPart
from monarch_rl.runtime.deadlines import DeadlineExceeded, within

Request = tuple[list[int], Sampling]
"""Prompt ids and how to draw after them."""
Answer = tuple[int, "Completion | Exception"]
"""The index of a request in its message, and what came of it, or a part of that (``UNFINISHED``)."""


class ReplicaLost(RuntimeError):
    """A replica cannot answer what it was asked: it ended, or its engine did. Another one can be asked."""

    def __init__(self, why: str, drawn: Sequence[Completion] = ()) -> None:
        super().__init__(why)
        self.drawn = list(drawn)
        """The parts of the answer that had arrived, in order."""


class Outlet(Protocol):
    """Where a replica sends answers: the sending end of a Monarch channel."""

    def send(self, obj: list[Answer], /) -> None: ...


@dataclass(eq=False, slots=True)
class _Asked:
    """A request on its way."""

    request: Request
    answer: asyncio.Future[Completion]
    drawn: list[Completion] = field(default_factory=list)
    """Parts that have arrived."""


class Link:
    """The caller's end; ``replica`` is the handle of a :class:`Generator` called ``name``. Use from one event loop."""

    def __init__(self, replica: Any, deadline_s: float, name: str) -> None:
        self._replica = replica
        self._name = name
        self._deadline_s = deadline_s
        self._outbox: list[_Asked] = []
        self._exchanges: set[asyncio.Task[None]] = set()
        self._given_up = "the caller's event loop ends"

    def ask(self, prompt_ids: list[int], sampling: Sampling) -> asyncio.Future[Completion]:
        """Send a request; the future holds its completion, or the error of the request or of the replica.

        A ReplicaLost has what had arrived of the completion.
        """
        loop = asyncio.get_running_loop()
        if not self._outbox:
            loop.call_soon(self._send)
        asked = _Asked((prompt_ids, sampling), loop.create_future())
        self._outbox.append(asked)
        return asked.answer

    def give_up(self, why: str) -> None:
        """Expect no more answers: whoever waits for one gets ReplicaLost."""
        self._given_up = why
        for exchange in self._exchanges:
            exchange.cancel()

    def _send(self) -> None:
        asked, self._outbox = self._outbox, []
        exchange = asyncio.ensure_future(self._exchange(asked))
        self._exchanges.add(exchange)
        exchange.add_done_callback(lambda ended: self._ended(ended, asked))

    async def _exchange(self, asked: list[_Asked]) -> None:
        from monarch.actor import Channel

        port, receiver = Channel[list[Answer]].open()
        # The call ends with the last request, or with the error that keeps the rest from being answered.
        requests = [one.request for one in asked]
        call = asyncio.ensure_future(_started(self._replica.generate.call_one(requests, port)))
        try:
            collecting = _collect(receiver, call, asked)
            await within(self._deadline_s, collecting, f"{len(requests)} requests", on=self._name)
        finally:
            call.cancel()

    def _ended(self, exchange: asyncio.Task[None], asked: list[_Asked]) -> None:
        self._exchanges.discard(exchange)
        error = None if exchange.cancelled() else exchange.exception()
        for one in asked:
            if one.answer.done():
                continue
            if isinstance(error, DeadlineExceeded):
                one.answer.set_exception(error)
            else:
                one.answer.set_exception(ReplicaLost(self._given_up if error is None else str(error), one.drawn))


async def _collect(receiver: Any, call: asyncio.Future[None], asked: list[_Asked]) -> None:
    left = len(asked)
    while left:
        arriving = asyncio.ensure_future(_started(receiver.recv()))
        try:
            # A call that ended well may be heard of before the last answers, one that failed is the end.
            ended = asyncio.FIRST_COMPLETED
            await asyncio.wait({arriving, call}, return_when=ended)  # waits: within _exchange's deadline
            if not arriving.done():
                call.result()
            came = await arriving  # waits: as above
        finally:
            arriving.cancel()
        for index, found in came:
            if isinstance(found, Completion) and found.finish_reason == UNFINISHED:
                asked[index].drawn.append(found)
                continue
            left -= 1
            answer = asked[index].answer
            if answer.done():  # given up by who asked
                continue
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)
    await call  # waits: within _exchange's deadline


async def _started(awaitable: Awaitable[Any]) -> Any:
    """Monarch's futures and tasks are no coroutines; asyncio wants one."""
    return await awaitable  # waits: as long as who calls this


class Answers:
    """The replica's end: sends what is ready at the end of the current turn of the event loop."""

    def __init__(self, port: Outlet) -> None:
        self._port = port
        self._ready: list[Answer] = []

    def add(self, index: int, found: Completion | Exception) -> None:
        """Answer request ``index``, or a part of it."""
        if not self._ready:
            asyncio.get_running_loop().call_soon(self.send)
        self._ready.append((index, found))

    def send(self) -> None:
        """Send what is ready now."""
        ready, self._ready = self._ready, []
        if ready:
            self._port.send(ready)


async def answer_all(
    requests: list[Request],
    port: Outlet,
    generate: Callable[[list[int], Sampling, OnPart], Awaitable[Completion]],
    refusal: type[Exception],
) -> None:
    """Answer every request as soon as it is done, and pass its parts on before; a ``refusal`` is an answer, any other
    error ends all."""
    answers = Answers(port)

    async def one(index: int, prompt_ids: list[int], sampling: Sampling) -> None:
        try:
            found: Completion | Exception = await generate(prompt_ids, sampling, partial(answers.add, index))
        except refusal as error:
            found = error
        answers.add(index, found)

    try:
        await asyncio.gather(*(one(index, *request) for index, request in enumerate(requests)))
    finally:
        answers.send()
