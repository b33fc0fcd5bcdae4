"""A connection to a replica, over real channels: each request gets its own answer, or fails with its parts."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.connection import Answering, ReplicaConnection, ReplicaLost
from monarch_rl.generator.parts import UNFINISHED, OnPart
from tests.patience import patiently


class Refused(ValueError):
    """The answer to a request that is refused."""


class Replica:
    """Answers a prompt ``[n, parts, turns]`` with ``n``, after so many parts and turns of the event loop. Refuses where
    ``n`` is negative, and fails where it is 0."""

    def __init__(self) -> None:
        self.answering = Answering(self.sample, Refused)
        self.answer = self.generate = self
        self.opened = 0
        """Connections."""

    async def call_one(self, connection: str, port: Any) -> None:
        self.opened += 1
        await self.answering.answer(connection, port)

    def broadcast(self, connection: str, requests: bytes) -> None:
        self.answering.start(connection, requests)

    async def sample(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        value, parts, turns = prompt_ids
        for _ in range(parts):
            on_part(completion(value, UNFINISHED))
        for _ in range(turns):
            await asyncio.sleep(0)
        if value < 0:
            raise Refused(str(value))
        if not value:
            raise RuntimeError("the engine is gone")
        return completion(value)


def completion(value: int, reason: str = "stop") -> Completion:
    return Completion(np.array([value], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), reason)


def ask(connection: ReplicaConnection, *prompts: list[int]) -> tuple[asyncio.Future[None], dict[int, Any]]:
    """Ask requests together; returns their end, and their answers by place."""
    answers: dict[int, Any] = {}
    return connection.ask([(prompt, Sampling()) for prompt in prompts], answers.__setitem__), answers


async def one(connection: ReplicaConnection, prompt_ids: list[int]) -> Completion:
    """The completion of a single request."""
    end, answers = ask(connection, prompt_ids)
    await patiently(end)
    completion: Completion = answers[0]
    return completion


def connect() -> tuple[ReplicaConnection, Any]:
    replica: Any = Replica()
    return ReplicaConnection(replica), replica


def test_many_messages_share_one_connection() -> None:
    async def scenario() -> None:
        connection, replica = connect()
        for value in range(1, 20):
            answer = await one(connection, [value, 2, 0])
            assert answer.token_ids.tolist() == [value] and answer.finish_reason == "stop"
        assert replica.opened == 1

    asyncio.run(scenario())


def test_a_failure_ends_all_requests_and_the_next_one_reconnects() -> None:
    async def scenario() -> None:
        connection, replica = connect()
        slow, fatal = ask(connection, [1, 3, 10**6])[0], ask(connection, [0, 1, 30])[0]
        for request, parts in ((slow, 3), (fatal, 1)):
            with pytest.raises(ReplicaLost, match="the engine is gone") as lost:
                await patiently(request)
            (arrived,) = lost.value.parts
            assert len(arrived) in (0, parts), "they may arrive after the loss"
        assert (await one(connection, [7, 0, 0])).token_ids.tolist() == [7]
        assert replica.opened == 2

    asyncio.run(scenario())


def test_requests_that_cannot_be_read_end_the_connection() -> None:
    """Not the replica's process: Monarch ends an actor that cannot read its arguments."""

    async def scenario() -> None:
        _, replica = connect()
        replica.broadcast("here", b"no requests")
        with pytest.raises(pickle.UnpicklingError):
            await patiently(replica.call_one("here", None))

    asyncio.run(scenario())


def test_a_send_error_reaches_the_waiting_caller() -> None:
    """It is raised in a callback of the event loop, which would log it and leave the callers waiting."""

    async def scenario() -> None:
        connection, replica = connect()
        slow = ask(connection, [1, 0, 10**6])[0]
        assert (await one(connection, [2, 0, 0])).token_ids.tolist() == [2]
        unreadable: Any = [threading.Lock()]
        with pytest.raises(TypeError, match="cannot pickle"):
            await patiently(ask(connection, unreadable)[0])
        assert not slow.done() and replica.opened == 1
        replica.generate = Unsendable()
        for request in (ask(connection, [3, 0, 0])[0], slow):
            with pytest.raises(ReplicaLost, match="nothing can be sent"):
                await patiently(request)
        replica.answer, replica.generate = Unsendable(), replica
        with pytest.raises(ReplicaLost, match="nothing can be sent"):
            await one(connection, [4, 0, 0])
        replica.answer = replica
        assert (await one(connection, [5, 0, 0])).token_ids.tolist() == [5]

    asyncio.run(scenario())


class Unsendable:
    """An endpoint to which nothing can be sent."""

    def call_one(self, *_: object) -> None:
        raise OSError("nothing can be sent")

    broadcast = call_one


def test_a_replica_forgets_the_connections_of_a_process_that_was_replaced() -> None:
    """And connections that have failed; others of the same process stay."""

    async def scenario() -> None:
        replica: Any = Replica()
        senders = replica.answering._callers.senders
        names = ["worker 0/11/a", "worker 0/11/b", "worker 1/12/a", "/13/a", "/14/a"]
        opened = {name: asyncio.ensure_future(replica.call_one(name, None)) for name in names}
        await asyncio.sleep(0)
        assert set(senders) == set(names)
        opened["worker 0/15/a"] = asyncio.ensure_future(replica.call_one("worker 0/15/a", None))
        for name in names[:2]:
            with pytest.raises(ReplicaLost, match="worker 0"):
                await patiently(opened[name])
        replica.broadcast("worker 1/12/a", b"no requests")
        with pytest.raises(pickle.UnpicklingError):
            await patiently(opened["worker 1/12/a"])
        replica.broadcast("worker 1/12/a", b"late")
        assert set(senders) == {"/13/a", "/14/a", "worker 0/15/a"}
        for task in opened.values():
            task.cancel()

    asyncio.run(scenario())


REQUEST = st.tuples(st.integers(-3, 50), st.integers(0, 3), st.integers(0, 20))
"""Value (mostly there is one), parts, turns."""
ASKED = st.tuples(st.lists(REQUEST, min_size=1, max_size=8), st.integers(0, 4), st.booleans())
"""Requests that are asked at once; turns before they are; whether the caller gives them up."""


@given(st.lists(ASKED, max_size=20))
def test_in_any_order_every_request_gets_its_own_answer_or_is_lost(
    asked: list[tuple[list[tuple[int, int, int]], int, bool]],
) -> None:
    """A replica fails at most once for all, so it may be lost when others of the same call have been answered."""

    async def scenario() -> None:
        connection, _ = connect()
        pending = []
        for requests, pause, given_up in asked:
            for _ in range(pause):
                await asyncio.sleep(0)
            pending.append((requests, *ask(connection, *map(list, requests))))
            if given_up:
                pending.pop()[1].cancel()
        for requests, end, answers in pending:
            try:
                await patiently(end)
                assert sorted(answers) == list(range(len(requests)))
            except ReplicaLost as lost:
                assert any(not value for others, _, _ in asked for value, _, _ in others)
                for (value, parts, _), arrived in zip(requests, lost.parts, strict=True):
                    assert [part.token_ids.tolist() for part in arrived] == [[value]] * len(arrived)
                    assert len(arrived) <= parts
            for place, answer in answers.items():
                check(requests[place][0], answer)

    def check(value: int, answer: Completion | Exception) -> None:
        if isinstance(answer, Refused):
            assert str(answer) == str(value) and value < 0
        else:
            assert isinstance(answer, Completion) and answer.token_ids.tolist() == [value] and value > 0

    asyncio.run(scenario())
