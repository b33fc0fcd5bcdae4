"""The connection from one caller to one replica: many requests a message, many answers a message.

A message costs about 0.5 ms of CPU on each side, and an engine answers hundreds of requests a second. So requests that
are made in one turn of the caller's event loop, such as the episodes of a group, travel together, and so do answers,
and parts of answers, that are ready in one turn of the replica's. Either travels at once if nothing has for
:data:`PACE_S` or :data:`ANSWER_PACE_S` seconds; else together with all that comes until then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.messages import Answer, Request, pack_answers, unpack_answers
from monarch_rl.generator.parts import UNFINISHED, OnPart
from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.runtime.endpoint import concurrent_endpoint

T = TypeVar("T")
PACE_S = 0.01
"""Seconds between two messages of requests, at least: about a decoding step, which requests wait for anyhow."""
ANSWER_PACE_S = 0.02
"""Seconds between two messages of answers to one message of requests, at least."""


class ReplicaLost(RuntimeError):
    """A replica cannot answer its requests: it ended, or its engine did. Another one can be asked."""

    def __init__(self, why: str, parts: Sequence[Completion] = ()) -> None:
        super().__init__(why)
        self.parts = list(parts)
        """The parts of the answer that had arrived, in order."""


class AnswerPort(Protocol):
    """Where a replica sends answers: the sending end of a Monarch channel."""

    def send(self, obj: bytes, /) -> None: ...


class ReplicaHandle(Protocol):
    """A replica as callers see it: the handle of a :class:`~monarch_rl.generator.actor.Generator`, or its stand-in."""

    @concurrent_endpoint
    async def generate(self, requests: list[Request], port: AnswerPort) -> None: ...


@dataclass(eq=False, slots=True)
class _PendingRequest:
    request: Request
    answer: asyncio.Future[Completion]
    parts: list[Completion] = field(default_factory=list)
    """Those that have arrived."""


class ReplicaConnection:
    """The caller's end of a connection to the replica behind ``handle``, called ``name``. Use from one event loop.

    A request may take ``deadline_s`` seconds.
    """

    def __init__(self, handle: ReplicaHandle, deadline_s: float, name: str) -> None:
        self._handle = handle
        self._name = name
        self._deadline_s = deadline_s
        self._outbox: list[_PendingRequest] = []
        self._exchanges: set[asyncio.Task[None]] = set()
        self._cancelled_because = "the caller's event loop ends"
        self._next_at = -math.inf
        """When the next message may be sent, by the event loop's clock."""

    def ask(self, prompt_ids: list[int], sampling: Sampling) -> asyncio.Future[Completion]:
        """Send a request; the future holds its completion, or the error of the request or of the replica.

        A ReplicaLost has the parts of the completion that had arrived.
        """
        loop = asyncio.get_running_loop()
        if not self._outbox:
            if loop.time() >= self._next_at:
                loop.call_soon(self._send)
            else:
                loop.call_at(self._next_at, self._send)
        pending = _PendingRequest((prompt_ids, sampling), loop.create_future())
        self._outbox.append(pending)
        return pending.answer

    def cancel_requests(self, why: str) -> None:
        """Expect no more answers: whoever waits for one gets ReplicaLost."""
        self._cancelled_because = why
        for exchange in self._exchanges:
            exchange.cancel()
        unsent, self._outbox = self._outbox, []
        for pending in unsent:
            if not pending.answer.done():
                pending.answer.set_exception(ReplicaLost(why, pending.parts))

    def _send(self) -> None:
        pending, self._outbox = self._outbox, []
        if not pending:  # they were cancelled
            return
        self._next_at = asyncio.get_running_loop().time() + PACE_S
        exchange = asyncio.ensure_future(self._exchange(pending))
        self._exchanges.add(exchange)
        exchange.add_done_callback(lambda ended: self._ended(ended, pending))

    async def _exchange(self, pending: list[_PendingRequest]) -> None:
        from monarch.actor import Channel

        port, receiver = Channel[bytes].open()
        # The call ends with the last request, or with the error that keeps the rest from being answered.
        requests = _with_shared_prompts(pending)
        call = asyncio.ensure_future(_as_coroutine(self._handle.generate.call_one(requests, port)))
        try:
            collecting = _collect(receiver, call, pending)
            await within(self._deadline_s, collecting, f"{len(requests)} requests", on=self._name)
        finally:
            call.cancel()

    def _ended(self, exchange: asyncio.Task[None], pending: list[_PendingRequest]) -> None:
        self._exchanges.discard(exchange)
        error = None if exchange.cancelled() else exchange.exception()
        why = self._cancelled_because if error is None else str(error)
        for each in pending:
            if each.answer.done():
                continue
            late = isinstance(error, DeadlineExceeded)
            each.answer.set_exception(error if error is not None and late else ReplicaLost(why, each.parts))


def _with_shared_prompts(pending: list[_PendingRequest]) -> list[Request]:
    """The requests, with one list for equal prompts: pickle writes it once."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    return [(prompts.setdefault(tuple(ids), ids), sampling) for ids, sampling in (each.request for each in pending)]


async def _collect(receiver: Any, call: asyncio.Future[None], pending: list[_PendingRequest]) -> None:
    unanswered = len(pending)
    while unanswered:
        arriving = asyncio.ensure_future(_as_coroutine(receiver.recv()))
        try:
            # The end of a call that went well may be noticed before the last answers; a failed one is the end.
            ended = asyncio.FIRST_COMPLETED
            await asyncio.wait({arriving, call}, return_when=ended)  # waits: within _exchange's deadline
            if not arriving.done():
                call.result()
            message: bytes = await arriving  # waits: as above
        finally:
            arriving.cancel()
        for index, content in unpack_answers(message):
            if isinstance(content, Completion) and content.finish_reason == UNFINISHED:
                pending[index].parts.append(content)
                continue
            unanswered -= 1
            answer = pending[index].answer
            if answer.done():  # cancelled by the caller
                continue
            if isinstance(content, Exception):
                answer.set_exception(content)
            else:
                answer.set_result(content)
    await call  # waits: within _exchange's deadline


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    """Monarch's futures and tasks are no coroutines; asyncio wants one."""
    return await awaitable  # waits: as long as the caller


class AnswerSender:
    """The replica's end: sends what is ready, not more often than once in :data:`ANSWER_PACE_S` seconds."""

    def __init__(self, port: AnswerPort) -> None:
        self._port = port
        self._ready: list[Answer] = []
        self._loop = asyncio.get_running_loop()
        self._next_at = self._loop.time()
        """When the next message may be sent."""
        self.failed: asyncio.Future[Exception] = self._loop.create_future()
        """Done when a message could not be sent: with the error."""

    def add(self, index: int, content: Completion | Exception) -> None:
        """Answer request ``index``, or a part of it."""
        if not self._ready:
            if self._loop.time() >= self._next_at:
                self._loop.call_soon(self.send)
            else:
                self._loop.call_at(self._next_at, self.send)
        self._ready.append((index, content))

    def send(self) -> None:
        """Send what is ready now. An error is kept: this is also called by the event loop, which would only log it."""
        ready, self._ready = self._ready, []
        if not ready:
            return
        try:
            self._port.send(pack_answers(ready))
        except Exception as error:
            if not self.failed.done():
                self.failed.set_result(error)
        self._next_at = self._loop.time() + ANSWER_PACE_S


async def answer_all(
    requests: list[Request],
    port: AnswerPort,
    generate: Callable[[list[int], Sampling, OnPart], Awaitable[Completion]],
    refusal: type[Exception],
) -> None:
    """Answer every request as soon as it is done, after its parts.

    Args:
        requests: of one message.
        port: where answers go.
        generate: draws after a prompt, and passes on parts.
        refusal: errors that are the answer to a request; any other error ends all.

    Raises what ends all: such an error, or that of answers that could not be sent, of which the caller hears so.
    """
    sender = AnswerSender(port)

    async def answer(index: int, prompt_ids: list[int], sampling: Sampling) -> None:
        try:
            content: Completion | Exception = await generate(prompt_ids, sampling, partial(sender.add, index))
        except refusal as error:
            content = error
        sender.add(index, content)

    answering = asyncio.gather(*(answer(index, *request) for index, request in enumerate(requests)))
    try:
        either: set[asyncio.Future[Any]] = {answering, sender.failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)  # waits: the caller keeps the deadline
        if answering.done():
            answering.result()
    finally:
        answering.cancel()
        sender.send()
    if sender.failed.done():
        raise sender.failed.result()
