"""The connection from one caller to one replica, which carries many requests or answers per message.

A message costs some 0.1 ms of CPU on each side, and an engine answers hundreds of requests a second. So requests made
in one iteration of the caller's event loop, such as the episodes of a group, share a message, and so do answers and
partial answers that become ready in one iteration of the replica's event loop. A message is sent at once if none was
sent for :data:`PACE_S` or :data:`ANSWER_PACE_S` seconds; otherwise it waits until then and collects more.

    caller                                    replica
    answer(connection, port) ---------------------->     once; fails when the replica can answer no more
    generate(connection, numbered requests) ------->
          <---- port: numbered answers, to requests of any message

A port for each message of requests would be simpler, but Monarch never frees all of it.

A connection's name starts with the caller's name in the run and its pid. A replica is not notified when a caller is
lost; it drops the caller's connections when another process with the same name opens one.
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

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import RequestLost
from monarch_rl.generator.parts import UNFINISHED, OnPart, settle
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.endpoint import concurrent_endpoint, one_way_endpoint
from monarch_rl.runtime.persistent_calls import next_message

T = TypeVar("T")
PACE_S = 0.01
"""Minimum seconds between two messages of requests: about a decoding step, for which requests wait anyway."""
ANSWER_PACE_S = 0.02
"""Minimum seconds between two messages of answers to one caller."""
_REMEMBERED = 256
"""Number of ended connections to remember; requests that were in transit when they ended arrive within a second."""


class ReplicaLost(RequestLost):
    """A replica cannot answer its requests because it or its engine ended. Another replica can be asked."""

    def __init__(self, why: str, parts: Sequence[Completion] = ()) -> None:
        super().__init__(why)
        self.parts = list(parts)
        """The parts of the answer that have arrived, in order."""


class AnswerPort(Protocol):
    """The sending end of a Monarch channel, to which a replica sends answers."""

    def send(self, obj: bytes, /) -> None: ...


class ReplicaHandle(Protocol):
    """The endpoints of a replica that callers use: a handle of :class:`~monarch_rl.generator.actor.Generator`, or a
    test double."""

    @concurrent_endpoint
    async def answer(self, connection: str, port: AnswerPort) -> None: ...

    @one_way_endpoint
    async def generate(self, connection: str, requests: bytes) -> None: ...


@dataclass(eq=False, slots=True)
class _PendingRequest:
    request: Request
    answer: asyncio.Future[Completion]
    parts: list[Completion] = field(default_factory=list)
    """The parts of the answer that have arrived."""


class ReplicaConnection:
    """The caller's end of a connection to the replica behind ``handle``. Use from one event loop.

    The first request opens the connection, as does the first request after it was lost.
    """

    def __init__(self, handle: ReplicaHandle) -> None:
        self._handle = handle
        self._unsent: list[int] = []
        """Numbers of the requests that are not sent yet."""
        self._pending: dict[int, _PendingRequest] = {}
        """Unanswered requests, by number."""
        self._numbers = itertools.count()
        self._next_at = -math.inf
        """Earliest time of the next message, by the event loop's clock."""
        self._name = ""
        """Name of the connection; empty while it is not open."""
        self._tasks: list[asyncio.Future[None]] = []

    def ask(self, prompt_ids: list[int], sampling: Sampling) -> asyncio.Future[Completion]:
        """Send a request. The future holds its completion, or the error of the request or of the replica.

        A ReplicaLost carries the parts of the completion that have arrived. The caller enforces the deadline.
        """
        loop = asyncio.get_running_loop()
        if not self._unsent:
            if loop.time() >= self._next_at:
                loop.call_soon(self._send)
            else:
                loop.call_at(self._next_at, self._send)
        number, pending = next(self._numbers), _PendingRequest((prompt_ids, sampling), loop.create_future())
        self._pending[number] = pending
        self._unsent.append(number)
        return pending.answer

    def cancel_requests(self, why: str) -> None:
        """Close the connection: all unanswered requests fail with ReplicaLost."""
        self._name = ""
        for task in self._tasks:
            task.cancel()
        unanswered, self._pending, self._unsent = self._pending, {}, []
        for pending in unanswered.values():
            settle(pending.answer, ReplicaLost(why, pending.parts))

    def _send(self) -> None:
        """Send the unsent requests."""
        # Errors go to the requests: the event loop, which calls this, would only log them.
        numbers, self._unsent = self._unsent, []
        for number in numbers:
            if self._pending[number].answer.done():  # it was cancelled
                del self._pending[number]
        wanted = [(number, self._pending[number].request) for number in numbers if number in self._pending]
        if not wanted:
            return
        self._next_at = asyncio.get_running_loop().time() + PACE_S
        try:
            content = _packed(wanted)
        except Exception as error:  # the requests' own fault, whichever replica is asked
            for number, _ in wanted:
                self._pending.pop(number).answer.set_exception(error)
            return
        try:
            if not self._name:
                self._open()
            self._handle.generate.broadcast(self._name, content)
        except Exception as error:
            self.cancel_requests(f"the replica cannot be reached: {error}")

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
            self.cancel_requests(str(task.exception() or "the replica closed the connection"))

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
        settle(pending.answer, content)


def _packed(requests: list[tuple[int, Request]]) -> bytes:
    """Pickle numbered requests, with one list object for equal prompts, which pickle writes only once."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    shared = [(number, prompts.setdefault(tuple(ids), ids), sampling) for number, (ids, sampling) in requests]
    return pickle.dumps(shared, pickle.HIGHEST_PROTOCOL)


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    """A coroutine for asyncio: Monarch's futures and tasks are none."""
    return await awaitable  # waits: as long as the caller


class AnswerSender:
    """Sends answers to one caller, at most one message per :data:`ANSWER_PACE_S` seconds."""

    def __init__(self) -> None:
        self._port: AnswerPort | None = None
        self._ready: list[Answer] = []
        self._loop = asyncio.get_running_loop()
        self._next_at = self._loop.time()
        """Earliest time of the next message."""
        self.failed: asyncio.Future[Exception] = self._loop.create_future()
        """Done, with the error, when no more answers will be sent."""

    def use(self, port: AnswerPort) -> None:
        """Send to ``port`` from now on, starting with answers that are ready already."""
        self._port = port
        self._send()

    def add(self, number: int, content: Completion | Exception) -> None:
        """Add the answer, or a partial answer, to request ``number``."""
        if self.failed.done():
            return
        if not self._ready:
            if self._loop.time() >= self._next_at:
                self._loop.call_soon(self._send)
            else:
                self._loop.call_at(self._next_at, self._send)
        self._ready.append((number, content))

    def fail(self, error: Exception) -> None:
        """Send the ready answers, and end with an error unless there is one already."""
        self._send()
        if not self.failed.done():
            self.failed.set_result(error)

    def _send(self) -> None:
        """Send the ready answers."""
        # Errors go to `failed`: the event loop, which calls this, would only log them.
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
"""Generates after a prompt; passes partial completions to the callback, and returns the whole one."""


class Answering:
    """The replica's end of its connections. Answers every request as soon as it is done, after its partial answers.

    Args:
        generate: answers a request.
        refusal: type of errors that are the answer to a request; any other error ends the connection.
    """

    def __init__(self, generate: GenerateCall, refusal: type[Exception]) -> None:
        self._generate, self._refusal = generate, refusal
        self._senders: dict[str, AnswerSender] = {}
        """By connection name."""
        self._generating: set[asyncio.Task[None]] = set()
        """Tasks of the running requests; the event loop itself holds no references to them."""
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        """Ended connections, whose requests may still arrive."""

    async def answer(self, connection: str, port: AnswerPort) -> None:
        """Send answers to ``port``. Never returns; raises the error that ends the connection."""
        sender = self._sender(connection)
        sender.use(port)
        try:
            raise await sender.failed  # waits: as long as the caller lives
        finally:
            self._senders.pop(connection, None)
            self._ended.append(connection)

    def start(self, connection: str, requests: bytes) -> None:
        """Start answering requests, which may arrive before the port."""
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
            self._generating.add(task)
            task.add_done_callback(self._generating.discard)

    async def _answer(self, sender: AnswerSender, number: int, prompt_ids: list[int], sampling: Sampling) -> None:
        try:
            # waits: the caller keeps the deadline
            content: Completion | Exception = await self._generate(prompt_ids, sampling, partial(sender.add, number))
        except self._refusal as error:
            content = error
        except Exception as error:
            sender.fail(error)
            return
        sender.add(number, content)

    def _sender(self, connection: str) -> AnswerSender:
        if connection not in self._senders:
            self._end_older_processes(connection)
            self._senders[connection] = AnswerSender()
        return self._senders[connection]

    def _end_older_processes(self, connection: str) -> None:
        """End the connections of a lost process whose name now belongs to the process that opens this connection."""
        name, process = _caller_of(connection)
        for other in list(self._senders):
            other_name, other_process = _caller_of(other)
            if name and other_name == name and other_process != process:
                self._senders[other].fail(ReplicaLost(f"another process is {name} now"))


def _caller_of(connection: str) -> tuple[str, str]:
    """Name and pid of the caller; the name is empty if the caller has none."""
    name, _, process = connection.rpartition("/")[0].rpartition("/")
    return name, process


# -- encoding of the messages between a caller and a replica ----------------------------------------------------------
# Monarch pickles with cloudpickle, which calls Python code for every object, and an answer has four arrays and more. So
# a message of answers is three arrays that concatenate those of all answers, and a list of plain values.

Request = tuple[list[int], Sampling]
"""Prompt ids and sampling settings."""
Answer = tuple[int, "Completion | Exception"]
"""Number of a request within its connection, and its answer or partial answer (``UNFINISHED``)."""


def pack_answers(answers: Sequence[Answer]) -> bytes:
    """Encode answers for :func:`unpack_answers`."""
    rows, errors, completions = [], [], []
    for index, content in answers:
        if isinstance(content, Exception):
            errors.append((index, content))
            continue
        plain = content.sampling_masks is None and content.expert_routes is None
        extra = () if plain else (content.sampling_masks, content.expert_routes)
        rows.append((index, len(content.token_ids), content.finish_reason, extra))
        completions.append(content)
    arrays = []
    if completions:
        arrays = [
            np.concatenate([each.token_ids for each in completions], dtype=np.int32, casting="same_kind").tobytes(),
            np.concatenate([each.logprobs for each in completions], dtype=np.float32, casting="same_kind").tobytes(),
            np.concatenate(
                [each.policy_versions for each in completions], dtype=np.int32, casting="same_kind"
            ).tobytes(),
        ]
    return pickle.dumps((rows, arrays, errors), pickle.HIGHEST_PROTOCOL)


def unpack_answers(message: bytes) -> list[Answer]:
    """Decode answers. They keep their order, except that errors come last: an error is the last answer to a request."""
    rows, arrays, errors = pickle.loads(message)
    answers: list[Answer] = []
    if rows:
        ids, logprobs, versions = (
            np.frombuffer(data, dtype).copy() for data, dtype in zip(arrays, ("<i4", "<f4", "<i4"), strict=True)
        )
    first = 0
    for index, tokens, reason, extra in rows:
        part = slice(first, first + tokens)
        first += tokens
        answers.append((index, Completion(ids[part], logprobs[part], versions[part], reason, *extra)))
    return answers + errors
