"""The connection from one caller to one replica: many requests a message, many answers a message.

A message costs some 0.1 ms of CPU on each side, and an engine answers hundreds of requests a second. So requests that
are made in one turn of the caller's event loop, such as the episodes of a group, travel together, and so do answers,
and parts of answers, that are ready in one turn of the replica's. Either travels at once if nothing has for
:data:`PACE_S` or :data:`ANSWER_PACE_S` seconds; else together with all that comes until then.

    caller                                    replica
    answer(connection, port) ---------------------->     once; fails when the replica can answer no more
    generate(connection, requests with numbers) --->
          <---- port: answers with their numbers, of any message of requests

A port for each message of requests would be simpler, but Monarch never frees all of it.

A connection's name begins with the caller's in the run, and its pid: a replica is not told when a caller is lost, and
forgets its connections when another process of that name opens one.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import pickle
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from monarch_rl.episode.sampling import Completion, RequestLost, Sampling
from monarch_rl.generator.parts import UNFINISHED, OnPart
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.endpoint import concurrent_endpoint, one_way_endpoint
from monarch_rl.runtime.lasting_calls import next_message

T = TypeVar("T")
PACE_S = 0.01
"""Seconds between two messages of requests, at least: about a decoding step, which requests wait for anyhow."""
ANSWER_PACE_S = 0.02
"""Seconds between two messages of answers to one caller, at least."""
_REMEMBERED = 256
"""Connections that have ended: requests that were on their way then come within a second."""


class ReplicaLost(RequestLost):
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
    async def answer(self, connection: str, port: AnswerPort) -> None: ...

    @one_way_endpoint
    async def generate(self, connection: str, requests: bytes) -> None: ...


@dataclass(eq=False, slots=True)
class _PendingRequest:
    request: Request
    answer: asyncio.Future[Completion]
    parts: list[Completion] = field(default_factory=list)
    """Those that have arrived."""


class ReplicaConnection:
    """The caller's end of a connection to the replica behind ``handle``. Use from one event loop.

    It is opened by the first request, and again by the first one after it was lost.
    """

    def __init__(self, handle: ReplicaHandle) -> None:
        self._handle = handle
        self._outbox: list[int] = []
        """Numbers of the requests that are not sent yet."""
        self._pending: dict[int, _PendingRequest] = {}
        """By number: those without an answer."""
        self._numbers = itertools.count()
        self._next_at = -math.inf
        """When the next message may be sent, by the event loop's clock."""
        self._name = ""
        """By which the replica knows it; empty while it is not open."""
        self._tasks: list[asyncio.Future[None]] = []

    def ask(self, prompt_ids: list[int], sampling: Sampling) -> asyncio.Future[Completion]:
        """Send a request; the future holds its completion, or the error of the request or of the replica.

        A ReplicaLost has the parts of the completion that had arrived. The caller keeps the deadline.
        """
        loop = asyncio.get_running_loop()
        if not self._outbox:
            if loop.time() >= self._next_at:
                loop.call_soon(self._send)
            else:
                loop.call_at(self._next_at, self._send)
        number, pending = next(self._numbers), _PendingRequest((prompt_ids, sampling), loop.create_future())
        self._pending[number] = pending
        self._outbox.append(number)
        return pending.answer

    def cancel_requests(self, why: str) -> None:
        """Expect no more answers: whoever waits for one gets ReplicaLost."""
        self._name = ""
        for task in self._tasks:
            task.cancel()
        unanswered, self._pending, self._outbox = self._pending, {}, []
        for pending in unanswered.values():
            if not pending.answer.done():
                pending.answer.set_exception(ReplicaLost(why, pending.parts))

    def _send(self) -> None:
        """Send what is to be sent. An error is told to who waits: the event loop, its caller, would only log it."""
        numbers, self._outbox = self._outbox, []
        for number in numbers:
            if self._pending[number].answer.done():  # it was cancelled
                del self._pending[number]
        wanted = [(number, self._pending[number].request) for number in numbers if number in self._pending]
        if not wanted:
            return
        self._next_at = asyncio.get_running_loop().time() + PACE_S
        try:
            content = _packed(wanted)
        except Exception as error:  # it is theirs, whichever replica is asked
            for number, _ in wanted:
                self._pending.pop(number).answer.set_exception(error)
            return
        try:
            if not self._name:
                self._open()
            self._handle.generate.broadcast(self._name, content)
        except Exception as error:
            self.cancel_requests(f"the replica cannot be asked: {error}")

    def _open(self) -> None:
        from monarch.actor import Channel

        self._name = f"{wait_registry.registered_name()}/{os.getpid()}/{uuid.uuid4().hex}"
        port, receiver = Channel[bytes].open()
        answering = asyncio.ensure_future(_as_coroutine(self._handle.answer.call_one(self._name, port)))
        answering.add_done_callback(self._ended)
        self._tasks = [answering, asyncio.ensure_future(self._receive(receiver))]
        self._tasks[1].add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and task in self._tasks:
            self.cancel_requests(str(task.exception() or "the replica answers no more"))

    async def _receive(self, receiver: Any) -> None:
        while True:
            message: bytes = await next_message(receiver)  # waits: callers of ask keep the deadlines
            for number, content in unpack_answers(message):
                self._take(number, content)

    def _take(self, number: int, content: Completion | Exception) -> None:
        pending = self._pending[number]
        if isinstance(content, Completion) and content.finish_reason == UNFINISHED:
            pending.parts.append(content)
            return
        del self._pending[number]
        if pending.answer.done():  # cancelled by the caller
            return
        if isinstance(content, Exception):
            pending.answer.set_exception(content)
        else:
            pending.answer.set_result(content)


def _packed(requests: list[tuple[int, Request]]) -> bytes:
    """Requests and their numbers, with one list for equal prompts, which pickle writes once."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    shared = [(number, prompts.setdefault(tuple(ids), ids), sampling) for number, (ids, sampling) in requests]
    return pickle.dumps(shared, pickle.HIGHEST_PROTOCOL)


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    """Monarch's futures and tasks are no coroutines; asyncio wants one."""
    return await awaitable  # waits: as long as the caller


class AnswerSender:
    """Sends one caller what is ready, not more often than once in :data:`ANSWER_PACE_S` seconds."""

    def __init__(self) -> None:
        self._port: AnswerPort | None = None
        self._ready: list[Answer] = []
        self._loop = asyncio.get_running_loop()
        self._next_at = self._loop.time()
        """When the next message may be sent."""
        self.failed: asyncio.Future[Exception] = self._loop.create_future()
        """Done when nothing more will be answered: with the error."""

    def use(self, port: AnswerPort) -> None:
        """Send to ``port``, also what is ready already."""
        self._port = port
        self._send()

    def add(self, number: int, content: Completion | Exception) -> None:
        """Answer request ``number``, or a part of it."""
        if self.failed.done():
            return
        if not self._ready:
            if self._loop.time() >= self._next_at:
                self._loop.call_soon(self._send)
            else:
                self._loop.call_at(self._next_at, self._send)
        self._ready.append((number, content))

    def fail(self, error: Exception) -> None:
        """Send what is ready, and end with an error; the first one counts."""
        self._send()
        if not self.failed.done():
            self.failed.set_result(error)

    def _send(self) -> None:
        """Send what is ready now. An error is kept: this is called by the event loop, which would only log it."""
        if not self._ready or self._port is None:
            return
        ready, self._ready = self._ready, []
        try:
            self._port.send(pack_answers(ready))
        except Exception as error:
            if not self.failed.done():
                self.failed.set_result(error)
        self._next_at = self._loop.time() + ANSWER_PACE_S


GenerateCall = Callable[[list[int], Sampling, OnPart], Awaitable[Completion]]
"""Draws after a prompt, and passes on parts."""


class Answering:
    """The replica's end of its connections: answers every request as soon as it is done, after its parts.

    Args:
        draw: answers a request.
        refusal: errors that are the answer to a request; any other error ends the connection.
    """

    def __init__(self, draw: GenerateCall, refusal: type[Exception]) -> None:
        self._draw, self._refusal = draw, refusal
        self._senders: dict[str, AnswerSender] = {}
        """By the name of the connection."""
        self._drawing: set[asyncio.Task[None]] = set()
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        """Connections of which requests may still come."""

    async def answer(self, connection: str, port: AnswerPort) -> None:
        """Answer to ``port``. Never return; raise the error that ends the connection."""
        sender = self._sender(connection)
        sender.use(port)
        try:
            raise await sender.failed  # waits: as long as the caller lives
        finally:
            self._senders.pop(connection, None)
            self._ended.append(connection)

    def start(self, connection: str, requests: bytes) -> None:
        """Start to answer requests, which may come before the port."""
        if connection in self._ended:
            return
        sender = self._sender(connection)
        try:
            unpacked: list[tuple[int, list[int], Sampling]] = pickle.loads(requests)
        except Exception as error:
            sender.fail(error)
            return
        for number, prompt_ids, sampling in unpacked:
            task = asyncio.ensure_future(self._answer(sender, number, prompt_ids, sampling))
            self._drawing.add(task)
            task.add_done_callback(self._drawing.discard)

    async def _answer(self, sender: AnswerSender, number: int, prompt_ids: list[int], sampling: Sampling) -> None:
        try:
            # waits: the caller keeps the deadline
            content: Completion | Exception = await self._draw(prompt_ids, sampling, partial(sender.add, number))
        except self._refusal as error:
            content = error
        except Exception as error:
            sender.fail(error)
            return
        sender.add(number, content)

    def _sender(self, connection: str) -> AnswerSender:
        if connection not in self._senders:
            self._end_those_before(connection)
            self._senders[connection] = AnswerSender()
        return self._senders[connection]

    def _end_those_before(self, connection: str) -> None:
        """Those of a lost process whose name another one has now."""
        name, process = _caller_of(connection)
        for other in list(self._senders):
            its_name, its_process = _caller_of(other)
            if name and its_name == name and its_process != process:
                self._senders[other].fail(ReplicaLost(f"another process is {name} now"))


def _caller_of(connection: str) -> tuple[str, str]:
    """Name and pid of the caller; the name is empty if it has none."""
    name, _, process = connection.rpartition("/")[0].rpartition("/")
    return name, process


# -- messages: requests and answers between a caller and a replica, and the bytes of answers --------------------------
# Monarch pickles with cloudpickle, which calls Python for every object; an answer has four arrays and more. So a
# message of answers is three arrays over all of them and a list of plain values.

Request = tuple[list[int], Sampling]
"""Prompt ids and how to draw after them."""
Answer = tuple[int, "Completion | Exception"]
"""The number of a request in its connection, and its answer, or a part of that (``UNFINISHED``)."""


def pack_answers(answers: Sequence[Answer]) -> bytes:
    """The bytes of :func:`unpack_answers`."""
    rows, errors, drawn = [], [], []
    for index, content in answers:
        if isinstance(content, Exception):
            errors.append((index, content))
            continue
        plain = content.sampling_masks is None and content.expert_routes is None
        beside = () if plain else (content.sampling_masks, content.expert_routes)
        rows.append((index, len(content.token_ids), content.finish_reason, beside))
        drawn.append(content)
    arrays = []
    if drawn:
        arrays = [
            np.concatenate([each.token_ids for each in drawn], dtype=np.int32, casting="same_kind").tobytes(),
            np.concatenate([each.logprobs for each in drawn], dtype=np.float32, casting="same_kind").tobytes(),
            np.concatenate([each.policy_versions for each in drawn], dtype=np.int32, casting="same_kind").tobytes(),
        ]
    return pickle.dumps((rows, arrays, errors), pickle.HIGHEST_PROTOCOL)


def unpack_answers(message: bytes) -> list[Answer]:
    """Answers in their order, but errors last: an error is the last answer to its request."""
    rows, arrays, errors = pickle.loads(message)
    answers: list[Answer] = []
    if rows:
        ids, logprobs, versions = (
            np.frombuffer(data, dtype).copy() for data, dtype in zip(arrays, ("<i4", "<f4", "<i4"), strict=True)
        )
    first = 0
    for index, tokens, reason, beside in rows:
        part = slice(first, first + tokens)
        first += tokens
        answers.append((index, Completion(ids[part], logprobs[part], versions[part], reason, *beside)))
    return answers + errors
