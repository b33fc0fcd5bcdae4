from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from monarch_rl.pipeline import start
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.start import replica_updates
from monarch_rl.runtime.deadlines import DeadlineExceeded


class Worker:
    """Notes what it is told; fails to while it is ``deaf``."""

    def __init__(self) -> None:
        self.update_replicas = self
        self.told: list[tuple[list[int], list[int]]] = []
        self.deaf = False

    async def call_one(self, paused: list[int], lost: list[int]) -> None:
        if self.deaf:
            raise DeadlineExceeded("a worker that does not answer")
        self.told.append((paused, lost))


def test_workers_are_told_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes a replica for lost because of an error of its own would never ask it again."""

    async def test() -> None:
        worker = Worker()
        tell = replica_updates(ActorPool("rollout worker", "rollout", {0: cast(Any, worker)}))
        await tell([], [])
        await tell([], [])
        assert worker.told == [([], [])]
        monkeypatch.setattr(start, "REPEAT_S", 0.0)
        await asyncio.sleep(0)
        await tell([], [])
        assert worker.told == [([], [])] * 2

    asyncio.run(test())


def test_workers_are_told_what_they_do_not_know() -> None:
    """Once, but also a worker that did not answer the last time, and one that took another's place."""

    async def test() -> None:
        first, second, third = Worker(), Worker(), Worker()
        workers: ActorPool[Any] = ActorPool("rollout worker", "rollout", {0: first, 1: second})
        tell = replica_updates(workers)
        second.deaf = True
        await tell([], [])
        second.deaf = False
        await tell([], [])
        await tell([], [])
        assert first.told == second.told == [([], [])]
        await tell([1], [2])
        workers.handles[1] = third
        await tell([1], [2])
        assert first.told == second.told == [([], []), ([1], [2])]
        assert third.told == [([1], [2])]

    asyncio.run(test())
