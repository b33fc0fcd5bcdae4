from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from monarch.actor import Port

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import DeadlineExceeded
from monarch_rl.generator import dispatcher as module
from monarch_rl.generator.connection import Answering, OnAnswer, ReplicaLost, Request
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.parts import UNFINISHED, OnPart, finish_reason_of
from monarch_rl.runtime.deadlines import lose, now
from monarch_rl.simulate.clock import run_virtual
from tests.patience import LIMIT_S, until

COMPLETION = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")


class Lost(RuntimeError):
    """The error of a call to a replica that ended."""


class Replica:
    """The endpoints of an actor that the dispatcher uses: ``answer.call_one`` and ``generate.broadcast``.

    It answers on a real port, once it is ``open``.
    """

    def __init__(self) -> None:
        self.messages: list[list[int]] = []
        """The groups asked for in each message."""
        self.open = asyncio.Event()
        self.error: Exception | None = None
        self.sent = 0
        """Messages with answers."""
        self.ports: list[Port[Any]] = []
        """One entry each time that a connection was opened."""
        self.answering = Answering(lambda *asked: self.sample(*asked), ValueError)

    @property
    def answer(self) -> Any:
        return self

    @property
    def generate(self) -> Any:
        return self

    def send(self, obj: Any, /) -> None:
        self.sent += 1
        self.ports[-1].send(obj)

    async def call_one(self, connection: str, port: Port[Any]) -> None:
        self.ports.append(port)
        await self.answering.answer(connection, self)

    def broadcast(self, connection: str, requests: bytes) -> None:
        self.messages.append([prompt[0] for _, together in pickle.loads(requests) for prompt, _ in together])
        self.answering.start(connection, requests)

    async def sample(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        await self.open.wait()
        if self.error:
            raise self.error
        if prompt_ids[0] < 0:
            raise ValueError(f"no such token: {prompt_ids[0]}")
        return COMPLETION


def start(dispatcher: Dispatcher, group: int) -> asyncio.Task[Completion]:
    return asyncio.ensure_future(dispatcher.generate([group], Sampling(), group))


def test_groups_go_to_the_replica_with_fewest_requests_in_flight_and_stay_there() -> None:
    async def scenario() -> None:
        replicas = [Replica(), Replica()]
        dispatcher = Dispatcher(replicas, LIMIT_S)
        tasks = [start(dispatcher, group) for group in (0, 0, 0, 1, 2, 0, 1)]
        await until(lambda: all(replica.messages for replica in replicas), "requests at both replicas")
        assert [replica.messages for replica in replicas] == [[[0, 0, 0, 0]], [[1, 1, 2]]], "group by group"
        assert dispatcher.in_flight == (4, 3)
        for replica in replicas:
            replica.open.set()
        await asyncio.gather(*tasks)
        assert dispatcher.in_flight == (0, 0)
        assert [replica.sent for replica in replicas] == [1, 1], (
            "requests that are ready together are sent in one message"
        )
        await dispatcher.generate([1], Sampling(), 1)
        assert replicas[1].messages[-1] == [1]

    asyncio.run(scenario())


async def round_trip() -> None:
    """Another dispatcher's request is sent and answered: all messages that were ready before have been sent."""
    replica = Replica()
    replica.open.set()
    assert await Dispatcher([replica], LIMIT_S).generate([0], Sampling(), 0) == COMPLETION


def test_an_answer_waits_for_no_other() -> None:
    """Requests of one message: one is answered, one refused, while the last one is still generated."""

    async def scenario() -> None:
        replica = Replica()
        slow = asyncio.Event()
        sample = replica.sample

        async def sample_slowly(prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
            if prompt_ids == [2]:
                await slow.wait()
            return await sample(prompt_ids, sampling, on_part)

        replica.sample = sample_slowly  # type: ignore[method-assign]
        replica.open.set()
        dispatcher = Dispatcher([replica], LIMIT_S)
        first, refused, last = (start(dispatcher, group) for group in (1, -1, 2))
        assert await first == COMPLETION
        with pytest.raises(ValueError, match="-1"):
            await refused
        assert not last.done() and dispatcher.in_flight == (1,)
        slow.set()
        assert await last == COMPLETION

    asyncio.run(scenario())


def test_a_request_past_its_deadline_names_the_replica() -> None:
    async def scenario() -> None:
        dispatcher = Dispatcher([Replica(), Replica()], 0.05)
        with pytest.raises(DeadlineExceeded, match="generator 0 .*group 7"):
            await dispatcher.generate([1, 2], Sampling(), 7)
        assert dispatcher.in_flight == (0, 0)

    asyncio.run(scenario())


class SlowConnection:
    """Replaces a connection: after some seconds of virtual time its replica is lost, or never."""

    def __init__(self, lost_after_s: float | None = None) -> None:
        self._lost_after_s = lost_after_s

    async def ask(self, *_: object) -> Completion:
        if self._lost_after_s is None:
            await asyncio.get_running_loop().create_future()
        else:
            await asyncio.sleep(self._lost_after_s)
        raise ReplicaLost("it was killed")


@pytest.mark.parametrize(
    ("connections", "late"),
    [
        ([SlowConnection(), SlowConnection()], "generator 0 .*group 7"),
        ([SlowConnection(20.0), SlowConnection(20.0), SlowConnection()], "generator 2 .*group 7"),
        ([SlowConnection(20.0), SlowConnection(60.0)], "generator 1 .*group 7"),
        ([SlowConnection(20.0)], "group 7.*generator 0 .*it was killed"),
    ],
)
def test_a_request_has_one_deadline_however_many_replicas_are_lost(connections: list[Any], late: str) -> None:
    """In virtual time; also for answers of other endpoints."""

    async def scenario() -> None:
        for request in ("generate", "call"):
            dispatcher = Dispatcher(connections, 60.0)
            dispatcher._connections = connections
            if request == "generate":
                asking: Any = dispatcher.generate([1, 2], Sampling(), 7)
            else:
                asking = dispatcher.call(7, "answer a request of group 7", lambda connection: connection.ask())
            began = now()
            with pytest.raises(DeadlineExceeded, match=rf"\b60 s\b.*{late}"):
                await asking
            assert 60.0 <= now() - began < 61.0

    run_virtual(scenario())


def test_a_caller_notified_of_a_loss_before_its_call_fails_asks_another_replica() -> None:
    """As in the controller: its own waits end as soon as a process is reported lost."""

    async def scenario() -> None:
        hangs, asked = asyncio.Event(), list[int]()
        dispatcher = Dispatcher([Replica(), Replica()], LIMIT_S, "frozen judge")

        async def ask(replica: Any) -> str:
            asked.append(dispatcher._replicas.index(replica))
            if len(asked) == 1:
                await hangs.wait()
            return "answer"

        asking = asyncio.ensure_future(dispatcher.call(7, "judge", ask))
        await until(lambda: bool(asked), "the first call")
        lose("frozen judge 0", "killed")
        assert await asking == "answer" and asked == [0, 1] and dispatcher.in_flight == (0, 0)

    asyncio.run(scenario())


def test_requests_of_a_lost_replica_are_answered_by_another_one() -> None:
    async def scenario() -> None:
        replicas = [Replica(), Replica()]
        replicas[0].error = Lost("the process this actor was running on failed")
        dispatcher = Dispatcher(replicas, LIMIT_S)
        tasks = [start(dispatcher, group) for group in (0, 1, 0)]
        for replica in replicas:
            replica.open.set()
        assert await asyncio.gather(*tasks) == [COMPLETION] * 3
        assert await dispatcher.generate([0], Sampling(), 0) == COMPLETION
        assert replicas[0].messages == [[0, 0]] and replicas[1].messages == [[1], [0, 0], [0]]
        assert dispatcher.in_flight == (0, 0)

    asyncio.run(scenario())


STOPS = (0,)


def sample(prompt_ids: list[int], sampling: Sampling, version: int) -> Completion:
    """A policy: each token, and its log-prob, follows from all tokens before it."""
    ids = list(prompt_ids)
    logprobs: list[float] = []
    while not (reason := finish_reason_of(ids[len(prompt_ids) :], sampling, sampling.stop_token_ids)):
        noise = random.Random(str(ids))
        ids.append(noise.randrange(20))
        logprobs.append(-noise.random())
    sampled = np.asarray(ids[len(prompt_ids) :], np.int32)
    return Completion(sampled, np.asarray(logprobs, np.float32), np.full(len(sampled), version, np.int32), reason)


def part_of(whole: Completion, start: int, end: int) -> Completion:
    """One part of the completion."""
    span = slice(start, end)
    return Completion(whole.token_ids[span], whole.logprobs[span], whole.policy_versions[span], UNFINISHED)


class LosingConnection:
    """Replaces a connection: its replica samples by ``sample`` and is lost when parts of given lengths have arrived."""

    def __init__(self, version: int, parts: list[int] | None) -> None:
        self._version = version
        self._parts = parts
        self.asked: list[tuple[list[int], int]] = []
        """Prompts, and numbers of tokens requested."""
        self.arrived: list[int] = []
        """Ids in the parts."""

    def ask(self, requests: list[Request], on_answer: OnAnswer) -> asyncio.Future[None]:
        ((prompt_ids, sampling),) = requests
        self.asked.append((prompt_ids, sampling.max_new_tokens))
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        whole = sample(prompt_ids, sampling, self._version)
        if self._parts is None:
            on_answer(0, whole)
            answer.set_result(None)
            return answer
        ends = np.cumsum([0, *self._parts]).tolist()
        parts = [part_of(whole, start, end) for start, end in zip(ends[:-1], ends[1:], strict=True)]
        self.arrived = [int(token) for part in parts for token in part.token_ids]
        answer.set_exception(ReplicaLost("it was killed", [parts]))
        return answer


def expert_routes_of(ids: Sequence[int], start: int) -> np.ndarray:
    """How any replica reads a sequence: each token but the last, from the tokens up to it."""
    read = [[[sum(ids[: place + 1]) % 251, place]] for place in range(start, len(ids) - 1)]
    return np.asarray(read, np.uint8).reshape(-1, 1, 2)


class RouteReportingConnection(LosingConnection):
    """Sends routes with its answer, and never with parts of it."""

    def ask(self, requests: list[Request], on_answer: OnAnswer) -> asyncio.Future[None]:
        ((prompt_ids, sampling),) = requests
        start = sampling.expert_routes_from
        assert start is not None

        def with_routes(place: int, whole: Completion | Exception) -> None:
            assert isinstance(whole, Completion)
            routes = expert_routes_of(prompt_ids + whole.token_ids.tolist(), start)
            on_answer(place, replace(whole, expert_routes=routes))

        return super().ask(requests, with_routes)


@given(
    prompt=st.lists(st.integers(1, 19), min_size=1, max_size=3),
    count=st.integers(1, 40),
    stops=st.sampled_from([(), STOPS]),
    losses=st.lists(st.lists(st.integers(1, 15), max_size=4), max_size=4),
    skipped=st.integers(0, 2),
)
def test_wherever_replicas_are_lost_each_token_that_was_read_has_a_route(
    prompt: list[int], count: int, stops: tuple[int, ...], losses: list[list[int]], skipped: int
) -> None:
    """Also where all tokens had arrived, but not the answer with their routes."""
    start = min(skipped, len(prompt) - 1)
    wanted = Sampling(max_new_tokens=count, stop_token_ids=stops, expert_routes_from=start)
    whole = sample(prompt, wanted, 0)
    found, _ = generate_through(losses, prompt, wanted, RouteReportingConnection)
    assert found.token_ids.tolist() == whole.token_ids.tolist()
    assert found.finish_reason == whole.finish_reason
    expected = expert_routes_of(prompt + whole.token_ids.tolist(), start)
    assert found.expert_routes is not None and found.expert_routes.tolist() == expected.tolist()


def generate_through(
    losses: list[list[int]], prompt: list[int], wanted: Sampling, connection: type[LosingConnection] = LosingConnection
) -> tuple[Completion, list[LosingConnection]]:
    """The dispatcher's completion when replicas are lost in turn after ``losses``, and a last one survives."""
    connections = [connection(9 - index, parts) for index, parts in enumerate([*losses, None])]

    async def scenario() -> Completion:
        stand_ins: Any = connections
        dispatcher = Dispatcher(stand_ins, LIMIT_S)
        dispatcher._connections = stand_ins
        return await dispatcher.generate(prompt, wanted, 0)

    return asyncio.run(scenario()), connections


@given(
    prompt=st.lists(st.integers(1, 19), min_size=1, max_size=3),
    count=st.integers(1, 40),
    stops=st.sampled_from([(), STOPS]),
    losses=st.lists(st.lists(st.integers(1, 15), max_size=4), max_size=4),
)
def test_wherever_replicas_are_lost_the_tokens_equal_those_of_a_single_replica(
    prompt: list[int], count: int, stops: tuple[int, ...], losses: list[list[int]]
) -> None:
    """Also where the last part that arrived ends with a stop token, or has all the requested tokens."""
    wanted = Sampling(max_new_tokens=count, stop_token_ids=stops)
    whole = sample(prompt, wanted, 0)
    found, connections = generate_through(losses, prompt, wanted)
    assert found.token_ids.tolist() == whole.token_ids.tolist()
    assert found.logprobs.tolist() == whole.logprobs.tolist()
    assert found.finish_reason == whole.finish_reason
    assert [str(x.dtype) for x in (found.token_ids, found.logprobs, found.policy_versions)] == [
        "int32",
        "float32",
        "int32",
    ]
    arrived: list[int] = []
    versions: list[int] = []
    for index, connection in enumerate(connections):
        ended = bool(arrived) and len(arrived) == len(whole.token_ids)
        assert connection.asked == ([] if ended else [(prompt + arrived, count - len(arrived))]), "it was sampled again"
        arrived += connection.arrived
        versions += [9 - index] * len(connection.arrived)
    versions += [9 - len(losses)] * (len(whole.token_ids) - len(arrived))
    assert found.policy_versions.tolist() == versions


class GroupConnection:
    """Replaces a connection: its replica is lost when the given numbers of tokens of each request have arrived, or, at
    -1, its whole answer."""

    def __init__(self, version: int, arrived: list[int] | None) -> None:
        self._version, self._arrived = version, arrived

    def ask(self, requests: list[Request], on_answer: OnAnswer) -> asyncio.Future[None]:
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wholes = [sample(prompt_ids, sampling, self._version) for prompt_ids, sampling in requests]
        arrived = self._arrived or [-1] * len(wholes)
        for place, (whole, count) in enumerate(zip(wholes, arrived, strict=False)):
            if count < 0:
                on_answer(place, whole)
        if self._arrived is None:
            end.set_result(None)
        else:
            parts = [[part_of(whole, 0, max(count, 0))] for whole, count in zip(wholes, arrived, strict=False)]
            end.set_exception(ReplicaLost("it was killed", parts))
        return end


@given(
    prompt=st.lists(st.integers(1, 19), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    losses=st.lists(st.lists(st.integers(-1, 12), min_size=5, max_size=5), max_size=3),
)
def test_wherever_replicas_are_lost_each_sample_of_a_group_is_whole(
    prompt: list[int], counts: list[int], losses: list[list[int]]
) -> None:
    """Some samples may have been answered when a replica is lost, others only in part."""
    wanted = [Sampling(max_new_tokens=count, stop_token_ids=STOPS) for count in counts]
    connections: Any = [GroupConnection(9 - i, arrived) for i, arrived in enumerate([*losses, None])]

    async def scenario() -> list[Completion | Exception]:
        dispatcher = Dispatcher(connections, LIMIT_S)
        dispatcher._connections = connections
        return await dispatcher.generate_group(prompt, wanted, 0)

    for found, sampling in zip(asyncio.run(scenario()), wanted, strict=True):
        whole = sample(prompt, sampling, 0)
        assert isinstance(found, Completion) and found.finish_reason == whole.finish_reason
        assert found.token_ids.tolist() == whole.token_ids.tolist()
        assert found.logprobs.tolist() == whole.logprobs.tolist()
        assert sorted(found.policy_versions, reverse=True) == found.policy_versions.tolist()


def test_a_refused_sample_of_a_group_leaves_the_others() -> None:
    async def scenario() -> None:
        replica = PartSendingReplica(5, 0)
        sample = replica.sample

        async def refuse_some(prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
            if sampling.seed == 1:
                raise ValueError("no such seed")
            return await sample(prompt_ids, sampling, on_part)

        replica.sample = refuse_some  # type: ignore[method-assign]
        dispatcher = Dispatcher([replica], LIMIT_S)
        asked = [Sampling(max_new_tokens=3, seed=seed) for seed in range(3)]
        first, refused, last = await dispatcher.generate_group([4], asked, 0)
        assert isinstance(first, Completion) and isinstance(last, Completion) and isinstance(refused, ValueError)
        assert replica.messages == [[4, 4, 4]] and dispatcher.in_flight == (0,)

    asyncio.run(scenario())


def test_a_part_that_ends_with_a_stop_token_is_the_answer() -> None:
    wanted = Sampling(max_new_tokens=1000, stop_token_ids=STOPS)
    whole = sample([4], wanted, 9)
    found, (lost, other) = generate_through([[len(whole.token_ids)]], [4], wanted)
    assert whole.token_ids[-1] == 0 and found.token_ids.tolist() == whole.token_ids.tolist()
    assert found.finish_reason == "stop" and lost.asked and not other.asked


def test_parts_with_all_tokens_are_the_answer() -> None:
    found, (lost, other) = generate_through([[5, 5]], [4], Sampling(max_new_tokens=10))
    assert len(found.token_ids) == 10
    assert found.finish_reason == "length" and lost.asked and not other.asked


class PartSendingReplica(Replica):
    """Samples by ``sample``: sends this many tokens in parts of four, then answers, except prompts in ``holds``."""

    def __init__(self, version: int, tokens: int, holds: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._version = version
        self._tokens = tokens
        self._holds = holds
        self.asked: list[tuple[list[int], int]] = []

    async def sample(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        self.asked.append((prompt_ids, sampling.max_new_tokens))
        whole = sample(prompt_ids, sampling, self._version)
        for start in range(0, self._tokens, 4):
            on_part(part_of(whole, start, start + 4))
        if prompt_ids[0] in self._holds:
            await self.open.wait()
        return whole


def test_tokens_that_a_lost_replica_had_sent_are_not_sampled_again() -> None:
    """Over real channels. The parts of one request have arrived when another one of its message is answered."""

    async def scenario() -> None:
        replicas = [
            PartSendingReplica(5, 8, holds=(3, 4)),
            PartSendingReplica(4, 4, holds=(3,)),
            PartSendingReplica(3, 4),
        ]
        dispatcher = Dispatcher(replicas, LIMIT_S)
        wanted = Sampling(max_new_tokens=20)
        thrice, twice, once = (asyncio.ensure_future(dispatcher.generate([i], wanted, 0)) for i in (3, 4, 5))
        whole = sample([3], wanted, 0)
        ids = whole.token_ids.tolist()
        assert (await once).policy_versions.tolist() == [5] * 20
        dispatcher.update_replicas(paused=[], lost=[0])
        assert (await twice).policy_versions.tolist() == [5] * 8 + [4] * 12
        dispatcher.update_replicas(paused=[], lost=[0, 1])
        found = await thrice
        assert found.policy_versions.tolist() == [5] * 8 + [4] * 4 + [3] * 8
        assert found.token_ids.tolist() == ids
        assert found.logprobs.tolist() == whole.logprobs.tolist()
        assert replicas[1].asked[0] == ([3, *ids[:8]], 12)
        assert replicas[2].asked == [([3, *ids[:12]], 8)]
        assert dispatcher.in_flight == (0, 0, 0)

    asyncio.run(scenario())


def test_an_answer_that_cannot_be_sent_counts_as_the_loss_of_its_replica() -> None:
    """Not only a line in the replica's log while the request waits for its deadline."""

    class Mute(Replica):
        def send(self, obj: Any, /) -> None:
            raise BrokenPipeError("no such port")

    async def scenario() -> None:
        mute, other = Mute(), Replica()
        mute.open.set()
        dispatcher = Dispatcher([mute, other], LIMIT_S)
        answer = start(dispatcher, 5)
        await until(lambda: bool(other.messages), "the request at the other replica")
        other.open.set()
        assert (await answer).token_ids.tolist() == [0] and mute.messages == [[5]]

        alone, asked = Mute(), asyncio.get_running_loop().create_future()
        alone.sample = lambda *_: asked  # type: ignore[method-assign,assignment]
        both = asyncio.ensure_future(alone.answering.answer("here", alone))
        alone.broadcast("here", pickle.dumps([(0, [([1], Sampling())]), (1, [([2], Sampling())])]))
        await asyncio.sleep(0)
        assert not both.done()
        asked.set_result(COMPLETION)
        with pytest.raises(BrokenPipeError, match="no such port"):
            await both

    asyncio.run(scenario())


def test_without_replicas_left_requests_wait_for_a_new_one() -> None:
    async def scenario() -> None:
        lost, new = Replica(), Replica()
        lost.error = Lost("gone")
        lost.open.set()
        new.open.set()
        dispatcher = Dispatcher([lost], LIMIT_S)
        waiting = start(dispatcher, 0)
        await until(lambda: bool(dispatcher._lost), "the loss to be noticed")
        dispatcher.replace(0, new)
        await round_trip()
        assert not waiting.done() and not new.messages, "it was asked before it took requests"
        dispatcher.update_replicas(paused=[], lost=[])
        assert await waiting == COMPLETION
        assert new.messages == [[0]] and dispatcher.in_flight == (0,)

    asyncio.run(scenario())


def test_without_a_new_replica_the_deadline_names_the_losses() -> None:
    async def scenario() -> None:
        replica = Replica()
        replica.error = Lost("gone")
        replica.open.set()
        dispatcher = Dispatcher([replica], 0.05)
        with pytest.raises(DeadlineExceeded, match="group 3.*generator 0 .*gone"):
            await dispatcher.generate([1], Sampling(), 3)
        assert dispatcher.in_flight == (0,)

    run_virtual(scenario())  # on a busy machine the deadline could pass before the loss is noticed


def test_the_loss_of_a_replaced_replica_does_not_affect_its_replacement() -> None:
    """The old replica hangs and is replaced, and only then do its requests fail."""

    async def scenario() -> None:
        old, new = Replica(), Replica()
        new.open.set()
        dispatcher = Dispatcher([old], LIMIT_S)
        waiting = start(dispatcher, 0)
        await until(lambda: bool(old.messages), "the request at the old replica")
        dispatcher.replace(0, new)  # the dispatcher is not notified of its loss
        assert await waiting == COMPLETION
        assert not dispatcher._lost and new.messages == [[0]]

    asyncio.run(scenario())


def test_requests_of_a_removed_replica_are_cancelled_even_if_its_loss_was_noted_before() -> None:
    """One request has failed there; another one hangs there until the controller also removes the replica."""

    async def scenario() -> None:
        replicas = [Replica(), Replica()]
        dispatcher = Dispatcher(replicas, LIMIT_S)
        hanging = start(dispatcher, 0)
        await until(lambda: bool(replicas[0].messages), "the request at replica 0")
        dispatcher._lost[0] = "another request failed there"
        replicas[1].open.set()
        dispatcher.update_replicas(paused=[], lost=[0])
        assert await hanging == COMPLETION

    asyncio.run(scenario())


def test_requests_of_a_hanging_replica_that_is_removed_are_answered_by_another_one() -> None:
    """It never answers; the other replica answers its request."""

    async def scenario() -> None:
        replicas = [Replica(), Replica()]
        dispatcher = Dispatcher(replicas, LIMIT_S)
        task = start(dispatcher, 0)
        await until(lambda: bool(replicas[0].messages), "the request at replica 0")
        replicas[1].open.set()
        dispatcher.update_replicas(paused=[], lost=[0])
        answer = await task
        assert answer == COMPLETION and answer.replica == 1 and answer.seconds > 0
        dispatcher.update_replicas(paused=[], lost=[])  # it is back
        assert dispatcher._replica_of(1) == 0

    asyncio.run(scenario())


def test_a_paused_replica_gets_no_new_requests_and_finishes_its_own() -> None:
    async def scenario() -> None:
        replicas = [Replica(), Replica()]
        dispatcher = Dispatcher(replicas, LIMIT_S)
        first = start(dispatcher, 0)
        await until(lambda: bool(replicas[0].messages), "the request at replica 0")
        dispatcher.update_replicas(paused=[0], lost=[])
        replicas[1].open.set()
        assert await dispatcher.generate([0], Sampling(), 0) == COMPLETION
        assert not first.done() and replicas[0].messages == [[0]]
        dispatcher.update_replicas(paused=[0, 1], lost=[])
        waits = start(dispatcher, 5)
        await round_trip()
        assert not waits.done() and replicas[1].messages == [[0]]
        dispatcher.update_replicas(paused=[0], lost=[])
        assert await waits == COMPLETION
        replicas[0].open.set()
        assert await first == COMPLETION

    asyncio.run(scenario())


def test_the_number_of_remembered_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED_GROUPS", 3)

    async def scenario() -> None:
        replica = Replica()
        replica.open.set()
        dispatcher = Dispatcher([replica], LIMIT_S)
        for group in (0, 1, 2, 0, 3):
            await dispatcher.generate([1], Sampling(), group)
        assert list(dispatcher._groups) == [2, 0, 3]

    asyncio.run(scenario())


def test_a_copy_counts_its_own_requests() -> None:
    handles: Any = ["handle a", "handle b"]
    dispatcher = Dispatcher(handles, 3.0)
    dispatcher._in_flight[0] = 5
    copy: Any = pickle.loads(pickle.dumps(dispatcher))
    assert copy.in_flight == (0, 0)
    assert copy._replicas == ["handle a", "handle b"]


def test_a_dispatcher_needs_replicas() -> None:
    with pytest.raises(ValueError):
        Dispatcher([], 1.0)
