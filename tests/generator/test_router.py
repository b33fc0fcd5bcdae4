from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode import Completion, Sampling
from monarch_rl.generator import router as module
from monarch_rl.generator.router import Router
from monarch_rl.runtime.deadlines import DeadlineExceeded

COMPLETION = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")


class Replica:
    """What the router sees of an actor: ``generate.call_one``. Answers when told to."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.open = asyncio.Event()
        self.error: Exception | None = None

    @property
    def generate(self) -> Replica:
        return self

    async def call_one(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.asked.append(prompt_ids)
        await self.open.wait()
        if self.error:
            raise self.error
        return COMPLETION


def start(router: Router, group: int) -> asyncio.Task[Completion]:
    return asyncio.ensure_future(router.generate([group], Sampling(), group))


def test_groups_go_where_least_is_in_flight_and_stay_there() -> None:
    async def play() -> None:
        replicas = [Replica(), Replica()]
        router = Router(replicas, 10)
        tasks = [start(router, group) for group in (0, 0, 0, 1, 2, 0, 1)]
        for _ in range(3):
            await asyncio.sleep(0)  # the router's task, the deadline's, the replica's
        assert [x[0] for x in replicas[0].asked] == [0, 0, 0, 0]
        assert [x[0] for x in replicas[1].asked] == [1, 2, 1]
        assert router.in_flight == (4, 3)
        for replica in replicas:
            replica.open.set()
        await asyncio.gather(*tasks)
        assert router.in_flight == (0, 0)
        await router.generate([1], Sampling(), 1)
        assert replicas[1].asked[-1] == [1]

    asyncio.run(play())


def test_a_request_past_its_deadline_names_the_replica() -> None:
    async def play() -> None:
        router = Router([Replica(), Replica()], 0.05)
        with pytest.raises(DeadlineExceeded, match="generator 0 to answer a request of group 7"):
            await router.generate([1, 2], Sampling(), 7)
        assert router.in_flight == (0, 0)

    asyncio.run(play())


def test_an_error_passes_and_is_no_longer_in_flight() -> None:
    async def play() -> None:
        replica = Replica()
        replica.error = RuntimeError("lost")
        replica.open.set()
        router = Router([replica], 10)
        with pytest.raises(RuntimeError, match="lost"):
            await router.generate([1], Sampling(), 0)
        assert router.in_flight == (0,)

    asyncio.run(play())


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED_GROUPS", 3)

    async def play() -> None:
        replica = Replica()
        replica.open.set()
        router = Router([replica], 10)
        for group in (0, 1, 2, 0, 3):
            await router.generate([1], Sampling(), group)
        assert list(router._groups) == [2, 0, 3]

    asyncio.run(play())


def test_a_copy_counts_its_own_requests() -> None:
    router = Router(["handle a", "handle b"], 3.0)
    router._in_flight[0] = 5
    copy: Any = pickle.loads(pickle.dumps(router))
    assert copy.in_flight == (0, 0)
    assert copy._replicas == ["handle a", "handle b"]


def test_a_router_needs_replicas() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Router([], 1.0)
