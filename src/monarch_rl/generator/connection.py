"""Requests of one caller to one replica, over a persistent channel, and their answers.

What is asked at once, such as the samples of a group's prompt, is one entry of a message and is awaited as one; each
sample is answered as soon as it is done. Requests share messages, and so do answers and partial answers: an engine
answers hundreds of requests a second. A message is sent at once if none was sent for :data:`PACE_S` or
:data:`ANSWER_PACE_S` seconds; otherwise it waits until then and collects more.

    caller: ReplicaConnection                 replica: Answering
    answer(channel, port) ------------------->           once; fails when the replica can answer no more
    generate(channel, numbered lists of requests) ---->
          <---- port: answers and partial answers, each with its list's number and its place in the list

An error of a request is its answer. Any other error ends the channel, and is the loss of the replica
(:class:`ReplicaLost`) to all its requests: another replica can continue each of them from the parts that have arrived.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import RequestLost
from monarch_rl.generator.parts import UNFINISHED, OnPart
from monarch_rl.runtime.endpoint import concurrent_endpoint, one_way_endpoint
from monarch_rl.runtime.persistent_channel import AnswerPort, AnswerSender, Callers, PersistentChannel, caller_of

PACE_S = 0.01
"""Minimum seconds between two messages of requests: about a decoding step, for which requests wait anyway."""
ANSWER_PACE_S = 0.02
"""Minimum seconds between two messages of answers to one caller."""
Request = tuple[list[int], Sampling]
"""Prompt ids and sampling settings."""
Answer = tuple[int, int, "Completion | Exception"]
"""Number of a list of requests within its channel, place in the list, and answer or partial answer (``UNFINISHED``)."""


class ReplicaLost(RequestLost):
    """A replica cannot answer its requests because it or its engine ended. Another replica can be asked."""

    def __init__(self, why: str, parts: Sequence[Sequence[Completion]] = ()) -> None:
        super().__init__(why)
        self.parts = list(parts)
        """For each request: the parts of its answer that have arrived, in order."""


class ReplicaHandle(Protocol):
    """The endpoints of a replica that callers use: a handle of :class:`~monarch_rl.generator.actor.Generator`, or a
    test double."""

    @concurrent_endpoint
    async def answer(self, connection: str, port: AnswerPort) -> None: ...

    @one_way_endpoint
    async def generate(self, connection: str, requests: bytes) -> None: ...


# -- the caller's side ------------------------------------------------------------------------------------------------


OnAnswer = Callable[[int, "Completion | Exception"], None]
"""Receives the place of a request in its list, and its completion or error, as soon as it arrives."""


class _PendingRequests:
    """Requests that were sent together."""

    def __init__(self, requests: Sequence[Request], on_answer: OnAnswer) -> None:
        self.requests, self._on_answer = requests, on_answer
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parts: list[list[Completion]] = [[] for _ in requests]
        self._unanswered = len(requests)

    def receive(self, answer: Answer) -> None:
        _, place, content = answer
        if isinstance(content, Completion) and content.finish_reason == UNFINISHED:
            self._parts[place].append(content)
            return
        self._on_answer(place, content)
        self._unanswered -= 1
        if not self._unanswered:
            self.answer.set_result(None)

    def lose(self, error: BaseException) -> None:
        self.answer.set_exception(ReplicaLost(str(error), self._parts))


class ReplicaConnection:
    """Sends requests to the replica behind ``handle``. Use from one event loop.

    The first request opens a channel, as does the first request after it was lost.
    """

    def __init__(self, handle: ReplicaHandle) -> None:
        self._handle = handle
        self._channel: PersistentChannel | None = None

    def ask(self, requests: Sequence[Request], on_answer: OnAnswer) -> asyncio.Future[None]:
        """Send requests together. The future is done when all are answered, or has the error of the replica, or of
        requests that cannot be sent.

        A ReplicaLost carries the parts that have arrived. The caller enforces the deadline.
        """
        if self._channel is None or self._channel.closed:
            self._channel = PersistentChannel(self._attend, self._send, deserialize_answers, PACE_S)
        pending = _PendingRequests(requests, on_answer)
        self._channel.ask(pending, pending)
        return pending.answer

    def cancel_requests(self, why: str) -> None:
        """Close the channel: all unanswered requests fail with ReplicaLost."""
        if self._channel is not None:
            self._channel.close(ReplicaLost(why))

    async def _attend(self, channel: str, port: AnswerPort) -> None:
        await self._handle.answer.call_one(channel, port)  # waits: as long as the replica lives

    def _send(self, channel: str, asked: list[tuple[int, _PendingRequests]]) -> None:
        wanted = [(number, pending.requests) for number, pending in asked if not pending.answer.done()]
        if not wanted:  # all were cancelled
            return
        content = _serialized(wanted)  # an error is the requests' own fault, whichever replica is asked
        try:
            self._handle.generate.broadcast(channel, content)
        except Exception as error:
            self.cancel_requests(f"the replica cannot be reached: {error}")


# -- the replica's side -----------------------------------------------------------------------------------------------

GenerateCall = Callable[[list[int], Sampling, OnPart], Awaitable[Completion]]
"""Generates after a prompt; passes partial completions to the callback, and returns the whole one."""


class Answering:
    """Answers every request to a replica as soon as it is done, after its partial answers.

    Args:
        generate: answers a request.
        refusal: type of errors that are the answer to a request; any other error ends the channel.
    """

    def __init__(self, generate: GenerateCall, refusal: type[Exception]) -> None:
        self._generate, self._refusal = generate, refusal
        self._callers: Callers[Answer] = Callers(serialize_answers, ANSWER_PACE_S)

    async def answer(self, connection: str, port: AnswerPort) -> None:
        """Send answers to ``port``. Never returns; raises the error that ends the channel ``connection``."""
        await self._callers.attend(connection, port)  # waits: as long as the caller lives
        raise ReplicaLost(f"another process is {caller_of(connection)[0]} now")

    def start(self, connection: str, requests: bytes) -> None:
        """Start answering requests, which may arrive before the port."""
        sender = self._callers.sender(connection)
        if sender is None:
            return
        try:
            received: list[tuple[int, list[Request]]] = pickle.loads(requests)
        except Exception as error:
            sender.end(error)
            return
        for number, together in received:
            for place, request in enumerate(together):
                sender.start(self._answer(sender, number, place, *request))

    async def _answer(
        self, sender: AnswerSender[Answer], number: int, place: int, prompt_ids: list[int], sampling: Sampling
    ) -> None:
        def send_part(part: Completion) -> None:
            sender.add((number, place, part))

        try:
            # waits: the caller keeps the deadline
            content: Completion | Exception = await self._generate(prompt_ids, sampling, send_part)
        except self._refusal as error:
            content = error
        except Exception as error:
            sender.end(error)
            return
        sender.add((number, place, content))


# -- encoding of messages ---------------------------------------------------------------------------------------------
# Monarch pickles with cloudpickle, which calls Python code for every object, and an answer has four arrays and more. So
# a message of answers is three arrays that concatenate those of all answers, and a list of plain values.


def _serialized(asked: list[tuple[int, Sequence[Request]]]) -> bytes:
    """Pickle numbered lists of requests, with one list object for equal prompts, which pickle writes only once."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    shared = [
        (number, [(prompts.setdefault(tuple(ids), ids), sampling) for ids, sampling in requests])
        for number, requests in asked
    ]
    return pickle.dumps(shared, pickle.HIGHEST_PROTOCOL)


def serialize_answers(answers: Sequence[Answer]) -> bytes:
    """Encode answers for :func:`deserialize_answers`."""
    rows, errors, completions = [], [], []
    for number, place, content in answers:
        if isinstance(content, Exception):
            errors.append((number, place, content))
            continue
        plain = content.sampling_masks is None and content.expert_routes is None
        extra = () if plain else (content.sampling_masks, content.expert_routes)
        rows.append((number, place, len(content.token_ids), content.finish_reason, extra))
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


def deserialize_answers(message: bytes) -> list[Answer]:
    """Decode answers. They keep their order, except that errors come last: an error is the last answer to a request."""
    rows, arrays, errors = pickle.loads(message)
    answers: list[Answer] = []
    if rows:
        ids, logprobs, versions = (
            np.frombuffer(data, dtype).copy() for data, dtype in zip(arrays, ("<i4", "<f4", "<i4"), strict=True)
        )
    first = 0
    for number, place, tokens, reason, extra in rows:
        part = slice(first, first + tokens)
        first += tokens
        answers.append((number, place, Completion(ids[part], logprobs[part], versions[part], reason, *extra)))
    return answers + errors
