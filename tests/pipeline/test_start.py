from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from monarch_rl.errors import DeadlineExceeded
from monarch_rl.generator.gpu import ON_SHARED_DEVICES
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.pipeline import start
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.start import replica_updates, start_generators
from monarch_rl.runtime.devices import Devices
from monarch_rl.runtime.forking.preloading import ForkServer
from tests.recipe.running import random_model


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


def test_replicas_that_have_no_memory_together_are_refused_before_any_is_spawned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each for itself would find enough, because all ask before any has taken its own."""
    model, settings = random_model(tmp_path / "model"), GeneratorSettings(replicas=4, max_total_tokens=1000)
    free: list[int] = []
    monkeypatch.setattr(start, "free_memory", lambda: free[-1])

    def spawn(*_: Any, **__: Any) -> None:
        raise InterruptedError("spawned")

    def started(free_bytes: int, devices: Devices) -> str:
        free.append(free_bytes)
        cluster = SimpleNamespace(devices=devices, num_hosts=devices.num_hosts, spawn=spawn, fork_server=ForkServer())
        with pytest.raises((RuntimeError, InterruptedError)) as ended:
            asyncio.run(start_generators(cast(Any, cluster), model, settings, first_device=1))
        return str(ended.value)

    host = Devices("cpu", 1, 8)
    needed = next(nbytes for nbytes in range(0, 2**30, 2**18) if started(nbytes, host) == "spawned")
    assert "an engine needs" in (said := started(needed // 2, host)) and "4 of them" in said
    assert started(needed // 2, Devices("cpu", 2, 8)) == started(0, Devices("cuda", 1, 8)) == "spawned"


@pytest.mark.parametrize("shared", [False, True])
def test_engines_that_share_devices_do_not_ask_whether_as_much_is_free_on_each(shared: bool, tmp_path: Path) -> None:
    """SGLang would refuse to start several ranks, if a trainer rank has taken more on the device of one. They are
    spawned when what they need is imported."""
    spawned, imported = list[Any](), list[str]()

    class Importing(ForkServer):
        async def imported(self, preload: str) -> None:
            imported.append(preload)

    def spawn(*_: Any, env: Any, **__: Any) -> None:
        assert imported == [ENGINE_PRELOAD]
        spawned.append(env)
        raise InterruptedError("spawned")

    cluster = SimpleNamespace(devices=Devices("cuda", 1, 4), num_hosts=1, spawn=spawn, fork_server=Importing())
    settings = GeneratorSettings(replicas=1, tp=2)
    with pytest.raises(InterruptedError, match="spawned"):
        asyncio.run(start_generators(cast(Any, cluster), tmp_path, settings, first_device=0, shared=shared))
    assert spawned == [ON_SHARED_DEVICES if shared else None]


def test_sglang_still_reads_what_engines_on_shared_devices_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not, either the check is gone or its name is another one."""
    from sglang.srt.environ import envs

    ((name, value),) = ON_SHARED_DEVICES.items()
    monkeypatch.delenv(name, raising=False)
    assert getattr(envs, name).get() is True
    monkeypatch.setenv(name, value)
    assert getattr(envs, name).get() is False
