"""Real losses while a version is published: replicas always serve one whole version, and the others continue.

One system of two trainer ranks and four replicas goes through a series of faults.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import psutil
import pytest

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import PublishError
from monarch_rl.generator.commit import CommitReport
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.weights.area import attach
from monarch_rl.weights.transport import TransferSettings
from tests.generator.helpers import make_model
from tests.patience import patiently
from tests.pipeline.conftest import SharedCluster
from tests.pipeline.system import ENGINES, InspectedGenerator, System

TRANSFER = TransferSettings(bucket_mib=1, deadline_s=15)
"""One test waits for this deadline to pass; everything else takes less than a second on an idle machine."""
STORY_S = 1500.0
"""Deadline for all losses together, by the clock of ``tests/patience.py``."""
SHORT = Sampling(max_new_tokens=4, temperature=0.0)
Fault = Literal["killed while receiving", "stopped while receiving", "engine killed in commit", "bit flipped"]


class Doomed(InspectedGenerator):
    """A generator that can be told to suffer one fault."""

    _fault: Fault | None = None

    @concurrent_endpoint
    async def doom(self, fault: Fault) -> None:
        """Suffer ``fault`` during the next version."""
        self._fault = fault

    async def _receive(self, version: int, slot: int) -> int:
        fault, self._fault = self._fault, None
        if fault == "killed while receiving":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stopped while receiving":
            os.kill(os.getpid(), signal.SIGSTOP)
        self._fault = fault
        return await super()._receive(version, slot)

    async def _commit(self, version: int, slot: int, checksums: np.ndarray) -> CommitReport:
        fault, self._fault = self._fault, None
        if fault == "bit flipped":
            attach(self._weights_ready().receiver.area(slot))[12345] ^= 16
        if fault == "engine killed in commit":
            (scheduler,) = self._running.child_pids
            psutil.Process(scheduler).suspend()  # the commit waits for it until it is killed
            asyncio.get_running_loop().call_later(0.3, os.kill, scheduler, signal.SIGKILL)
        return await super()._commit(version, slot, checksums)


class Harness:
    """The system, and the notifications that rollout workers would get."""

    def __init__(self, cluster: Cluster, model: Path) -> None:
        self.cluster, self.model = cluster, model
        self.paused: list[list[int]] = []
        self.lost: list[int] = []

    async def start(self) -> None:
        self.generators = list(await asyncio.gather(*(self.replica(index) for index in range(4))))
        self.system = await System.start(self.cluster, self.model, self.generators, 1e-3, transfer=TRANSFER)
        worker: Any = SimpleNamespace(update_replicas=SimpleNamespace(call_one=self.update_replicas))
        self.system.publisher.replicas.workers = ActorPool("rollout worker", "rollout", {0: worker})

    async def replica(self, index: int, name: str = "doomed") -> Doomed:
        mesh = self.cluster.spawn(f"{name}{index}", 1, first_device=2 + index, preload=ENGINE_PRELOAD)
        generator: Doomed = mesh.spawn(f"{name}{index}", Doomed)
        await generator.setup.call_one(str(self.model), ENGINES, index)
        return generator

    async def update_replicas(self, paused: list[int], lost: list[int]) -> None:
        self.paused.append(paused)
        self.lost = lost

    async def step(self) -> int:
        """Train on invented episodes and publish; returns the version."""
        system = self.system
        system.generators = [self.generators[index] for index in system.publisher.replicas.handles]
        await system.step(system.version)
        return system.version

    async def ask(self, index: int) -> Completion:
        return await Dispatcher([self.generators[index]], 120.0, max_losses=0).generate([7, 8, 9], SHORT, 0)

    async def serving(self, *indices: int) -> None:
        """Check that these replicas serve the newest version with equal weights and give equal answers."""
        answers = [await self.ask(index) for index in indices]
        versions = {int(version) for answer in answers for version in answer.policy_versions}
        assert versions == {self.system.version}
        assert len({tuple(answer.token_ids.tolist()) for answer in answers}) == 1
        sums = [await self.generators[index].engine_checksums.call_one() for index in indices]
        assert all(checksums == sums[0] for checksums in sums)


@pytest.fixture
def harness(tmp_path_factory: pytest.TempPathFactory, shared_cluster: SharedCluster) -> Iterator[Harness]:
    model = make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    shared_cluster.close()  # other tests must not use a cluster that loses processes here
    yield Harness(shared_cluster.get(), model)
    shared_cluster.close()


@pytest.mark.core
@pytest.mark.timeout(2 * STORY_S)
def test_replicas_serve_whole_versions_through_a_series_of_losses(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    # SGLang sets the root logger's level to errors in every process that ran an engine.
    caplog.set_level("WARNING", "monarch_rl")

    async def story() -> None:
        await harness.start()
        await harness.step()
        await harness.serving(0, 1, 2, 3)
        for chapter in (flipped, killed, engine_killed, stopped, restarted, trainer_killed):
            caplog.clear()
            await chapter(harness, caplog)

    asyncio.run(patiently(story(), "all losses", STORY_S))


async def flipped(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """The flipped bit is caught; the replica gets no requests until the version was sent again."""
    await harness.generators[3].doom.call_one("bit flipped")
    harness.paused.clear()
    version = await harness.step()
    assert harness.paused == [[3], []] and harness.lost == []
    assert f"generator 3 failed to load version {version} (attempt 1 of 3)" in caplog.text
    assert "1 of" in caplog.text and "differ from the trainer's" in caplog.text
    await harness.serving(0, 1, 2, 3)


async def killed(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    await harness.generators[3].doom.call_one("killed while receiving")
    await harness.step()
    assert harness.lost == [3]
    # On a slow machine the deadline of a ping can pass before Monarch has reported the death.
    reasons = r"Killed\(sig=9\)|process likely crashed|generator 3 does not answer"
    assert re.search(rf"generator 3 is lost(?s:.*)({reasons})", caplog.text), caplog.text
    await harness.serving(0, 1, 2)


async def engine_killed(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    await harness.generators[2].doom.call_one("engine killed in commit")
    await harness.step()
    assert harness.lost == [3, 2] and "generator 2 is lost" in caplog.text and "exit code -9" in caplog.text
    await harness.serving(0, 1)


async def stopped(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """The replica neither ends nor answers; the others get the version after the transfer's deadline."""
    await harness.generators[1].doom.call_one("stopped while receiving")
    before = harness.system.version
    step = asyncio.ensure_future(harness.step())
    while harness.lost == [3, 2]:
        served = (await harness.ask(0)).policy_versions
        assert set(served.tolist()) <= {before, before + 1}
        assert (np.diff(served) >= 0).all(), "the old version sampled tokens after the new one"
        await asyncio.sleep(1)
        assert not step.done() or not step.exception()
    await step
    assert harness.lost == [3, 2, 1] and "generator 1 is lost (generator 1 does not answer" in caplog.text
    await harness.serving(0)


async def restarted(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """The replacement of replica 3 generates nothing before it has verified the newest version."""
    harness.generators[3] = await harness.replica(3, "anew")
    early = asyncio.ensure_future(harness.ask(3))
    await harness.system.publisher.add(3, harness.generators[3])
    await harness.system.publisher.wait_until_served()
    assert harness.lost == [2, 1]
    assert set((await early).policy_versions.tolist()) == {harness.system.version}
    await harness.serving(0, 3)
    await harness.step()
    await harness.serving(0, 3)


def _title(process: psutil.Process) -> str:
    """Command line of a process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


async def trainer_killed(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody can send the version: the error names the rank, and the previous version is still served."""
    system = harness.system
    below = psutil.Process().children(recursive=True)
    (victim,) = [process for process in below if _title(process).startswith("monarch_rl::trainer-1")]
    transfer = system.publisher.transfer_group.transfer

    async def struck(*arguments: Any) -> Any:
        """Kill the rank after it has answered the probe and before it sends."""
        victim.suspend()
        sending = asyncio.ensure_future(transfer(*arguments))
        await asyncio.sleep(0)
        victim.kill()
        return await sending

    system.publisher.transfer_group.transfer = struck  # type: ignore[method-assign, assignment]
    await system.publisher.publish(system.version + 1)
    with pytest.raises(PublishError, match=rf"version {system.version + 1} .*: trainer rank 1 "):
        await system.publisher.wait_until_served()
    assert {int(v) for v in (await harness.ask(0)).policy_versions} == {system.version}
