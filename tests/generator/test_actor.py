"""Two replicas as Monarch actors in processes of their own, new weights by a collective, and their ends.

The model is a tied Llama: its output layer is its embedding, sent once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
from monarch.actor import ActorError

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import GenerationError
from monarch_rl.generator.connection import PACE_S, ReplicaConnection, ReplicaLost
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.runtime import actor_process
from monarch_rl.runtime.cluster import configure_monarch
from monarch_rl.runtime.forking import fork_client
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.weights.collective import CollectiveSender
from monarch_rl.weights.transport import SNAPSHOTS, TransferSettings
from tests.generator.conftest import SETTINGS
from tests.generator.helpers import (
    LOGPROB_BOUND,
    LoopThread,
    expected_of,
    gone,
    manifest_of,
    next_version,
    reference_logprobs,
    weights_in,
)
from tests.patience import patiently, until, wait_until

pytestmark = pytest.mark.core

DEADLINE_S = 300.0
"""Seconds for calls that succeed, or fail for a reason of their own: no test waits for it."""
TRANSFER = TransferSettings(bucket_mib=1, deadline_s=DEADLINE_S)
CPU = torch.device("cpu")


@dataclass
class Replicas:
    """Two generators and the sender that stands in for a trainer of one rank."""

    meshes: list[Any]
    actors: list[Any]
    sender: CollectiveSender
    base: dict[str, torch.Tensor]
    setup_seconds: list[float]

    async def publish(self, version: int, weights: dict[str, torch.Tensor]) -> list[Any]:
        """Transfer during decoding, then commit; returns the reports."""
        await self.transfer(version, weights)
        slot, checksums = version % SNAPSHOTS, expected_of(weights)
        return await asyncio.gather(*[wait(actor.commit.call_one(version, slot, checksums)) for actor in self.actors])

    async def transfer(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        slot = version % SNAPSHOTS
        for view, tensor in zip(self.sender.views(slot), weights.values(), strict=True):
            view.copy_(tensor.reshape(-1).view(torch.uint8))
        await asyncio.gather(
            self.sender.send(version, slot), *[wait(actor.receive.call_one(version, slot)) for actor in self.actors]
        )


async def wait(future: Any) -> Any:
    return await future


async def ask(actor: Any, prompt: list[int], sampling: Sampling) -> Completion:
    return await Dispatcher([actor], DEADLINE_S, max_losses=0).generate(prompt, sampling, 0)


def forked(_: Any) -> Any:
    """Monarch's command for a process that the fork server of these tests forks, as on a host of a run."""
    from monarch.actor import default_bootstrap_cmd

    command = default_bootstrap_cmd()
    command.args = ["-IS", fork_client.__file__, ENGINE_PRELOAD, actor_process.__name__]
    return command


@pytest.fixture(scope="module")
def replicas(models: dict[str, Path], run: LoopThread, fork_server: subprocess.Popen[bytes]) -> Iterator[Replicas]:
    import monarch.actor
    from monarch.actor import this_host

    from monarch_rl.generator.actor import Generator

    monarch.actor.unhandled_fault_hook = lambda failure: None  # the default interrupts pytest
    configure_monarch()
    base = weights_in(models["llama"])
    manifest = manifest_of(base)

    async def start() -> Replicas:
        host, one = this_host(), {"gpus": 1}
        meshes = [host.spawn_procs(per_host=one, name=f"generator_{i}", bootstrap_command=forked) for i in range(2)]
        actors = [mesh.spawn("generator", Generator) for mesh in meshes]
        seconds = await asyncio.gather(
            *[wait(a.setup.call_one(str(models["llama"]), SETTINGS, i)) for i, a in enumerate(actors)]
        )
        sender = CollectiveSender(manifest, 0, TRANSFER, "127.0.0.1", CPU)
        for actor in actors:
            await actor.weights_setup.call_one(manifest, TRANSFER)
        addresses = [await sender.open()]
        await asyncio.gather(
            sender.connect(addresses, 2),
            *[wait(a.weights_connect.call_one(addresses, i, 2)) for i, a in enumerate(actors)],
        )
        return Replicas(meshes, actors, sender, base, list(seconds))

    started = run(start())
    family = {process.pid for process in psutil.Process(fork_server.pid).children(recursive=True)}
    for actor in started.actors:
        stats = run(wait(actor.stats.call_one()))
        assert {stats["pid"], *stats["child_pids"]} <= family
    yield started

    async def stop() -> None:
        for mesh in started.meshes:
            await wait(mesh.stop())

    run(stop())


async def generate_groups(dispatcher: Dispatcher, groups: int, tokens: int) -> list[Completion]:
    wanted = Sampling(max_new_tokens=tokens)
    return await asyncio.gather(*[dispatcher.generate([5, 6, 7 + i // 4], wanted, i // 4) for i in range(4 * groups)])


def test_two_replicas_generate_while_they_receive_new_weights(
    replicas: Replicas, run: LoopThread, models: dict[str, Path]
) -> None:
    """Every commit is bit-exact on both, no request is lost, and both replicas generate."""
    dispatcher = Dispatcher(replicas.actors, DEADLINE_S)

    async def rounds() -> tuple[list[Completion], list[Any]]:
        generating, reports = asyncio.ensure_future(generate_groups(dispatcher, 4, 500)), []
        for version in range(1, 4):
            reports += await replicas.publish(version, next_version(replicas.base, version))
        return await generating, reports

    completions, reports = run(rounds())
    assert [len(c.token_ids) for c in completions] == [500] * 16
    assert [r.version for r in reports] == [1, 1, 2, 2, 3, 3]
    assert all(r.nbytes == sum(x.nbytes for x in replicas.base.values()) for r in reports)
    for completion in completions:
        assert (np.diff(completion.policy_versions) >= 0).all()

    async def stats() -> list[dict[str, Any]]:
        return await asyncio.gather(*[wait(actor.stats.call_one()) for actor in replicas.actors])

    for numbers in run(stats()):
        assert numbers["version"] == 3
        assert numbers["generated_tokens"] == 8 * 500
        assert numbers["finished_requests"] == 8
        assert numbers["requests_in_flight"] == 0
        assert numbers["busy_seconds"] > 0
        assert numbers["last_commit"]["version"] == 3

    fresh = run(generate_groups(dispatcher, 1, 30))
    weights = next_version(replicas.base, 3)
    asked = [([5, 6, 7], completion) for completion in fresh]
    for completion, reference in zip(fresh, reference_logprobs(models["llama"], asked, weights), strict=True):
        assert set(completion.policy_versions.tolist()) == {3}
        assert np.abs(completion.logprobs - reference).max() < LOGPROB_BOUND


def test_only_a_received_version_is_committed(replicas: Replicas, run: LoopThread) -> None:
    with pytest.raises(Exception, match="version 3"):
        run(wait(replicas.actors[0].commit.call_one(9, 1, np.zeros(0, np.int64))))


def test_a_wrong_checksum_stops_only_that_replica(replicas: Replicas, run: LoopThread) -> None:
    """The last commit of these tests but one: replica 0 gets the right checksum, replica 1 another one."""
    weights = next_version(replicas.base, 4)
    checksums, name = expected_of(weights), "model.layers.0.mlp.up_proj.weight"
    wrong = np.where(np.array(list(weights)) == name, 1, checksums)

    async def publish() -> None:
        await replicas.transfer(4, weights)
        await replicas.actors[0].commit.call_one(4, 0, checksums)
        with pytest.raises(Exception, match=f"WeightMismatch.*{name}"):
            await replicas.actors[1].commit.call_one(4, 0, wrong)
        assert set((await ask(replicas.actors[0], [1], Sampling())).policy_versions.tolist()) == {4}
        await replicas.actors[1].commit.call_one(4, 0, checksums)
        assert set((await ask(replicas.actors[1], [1], Sampling())).policy_versions.tolist()) == {4}

    run(publish())


def test_a_refused_request_does_not_affect_others(replicas: Replicas, run: LoopThread) -> None:
    """They are sent in one message."""

    async def scenario() -> list[Any]:
        dispatcher = Dispatcher(replicas.actors[:1], DEADLINE_S)
        prompts = [[5, 6], [5] * 5000, [5, 7]]
        asked = (dispatcher.generate(prompt, Sampling(max_new_tokens=3), 0) for prompt in prompts)
        return await asyncio.gather(*asked, return_exceptions=True)

    first, refused, last = run(scenario())
    assert len(first.token_ids) == len(last.token_ids) == 3
    assert isinstance(refused, GenerationError) and "5000" in str(refused)


def ignore(place: int, answer: Completion | Exception) -> None:
    """An answer that no test looks at."""


LONG = Sampling(max_new_tokens=1000, seed=17)
BEGINNING = replace(LONG, max_new_tokens=200)
"""Submitted in one message with ``LONG``: when it is answered, as many tokens of ``LONG`` have arrived, in parts."""


def test_cancelled_requests_leave_the_replica_as_it_was(replicas: Replicas, run: LoopThread) -> None:
    """Parts are still sent to a channel whose other end is closed."""
    actor = replicas.actors[0]

    async def cancel() -> ReplicaLost:
        connection = ReplicaConnection(actor)
        request, beginning = connection.ask([([5], LONG)], ignore), connection.ask([([5], BEGINNING)], ignore)
        await beginning
        connection.cancel_requests("enough")
        with pytest.raises(ReplicaLost, match="enough") as caught:
            await request

        async def finished() -> bool:
            return not (await actor.stats.call_one())["requests_in_flight"]

        await until(finished, "the rest to be generated")
        return caught.value

    lost = run(cancel())
    arrived = sum(len(part.token_ids) for part in lost.parts[0])
    assert BEGINNING.max_new_tokens - SETTINGS.part_tokens < arrived < LONG.max_new_tokens
    assert len(run(ask(actor, [5], Sampling(max_new_tokens=3))).token_ids) == 3


def test_unsent_requests_are_cancelled_too() -> None:
    """They wait for the pace of messages, and would be sent to a replica that is given up."""

    class Silent:
        """A replica that never answers."""

        def __init__(self) -> None:
            self.messages = 0
            self.answer = self.generate = self

        async def call_one(self, channel: str, port: Any) -> None:
            await asyncio.Event().wait()

        def broadcast(self, channel: str, requests: bytes) -> None:
            self.messages += 1

    async def cancel() -> None:
        silent = Silent()
        connection = ReplicaConnection(cast(Any, silent))
        requests = [connection.ask([([5], LONG)], ignore)]
        await asyncio.sleep(PACE_S / 2)
        requests.append(connection.ask([([5], LONG)], ignore))
        connection.cancel_requests("enough")
        for request in requests:
            with pytest.raises(ReplicaLost, match="enough"):
                await request
        await asyncio.sleep(2 * PACE_S)  # past the moment at which it would have been sent
        assert silent.messages == 1

    run_virtual(cancel())


def test_a_failure_that_no_request_caused_ends_the_replica(replicas: Replicas, run: LoopThread) -> None:
    """Callers that wait for the replica's end are notified; a request that is refused is no such failure."""

    async def scenario() -> None:
        actor = replicas.actors[0]
        life = asyncio.ensure_future(wait(actor.block_until_lost.call_one()))
        with pytest.raises(GenerationError):
            await ask(actor, [5] * 5000, Sampling(max_new_tokens=3))
        assert not life.done()
        nothing: Any = None
        with pytest.raises(ReplicaLost, match="AttributeError"):
            await ReplicaConnection(actor).ask([([5], nothing)], ignore)
        with pytest.raises(ActorError, match="AttributeError"):
            await patiently(life, "the end of the replica")

    run(scenario())


def test_a_killed_replica_ends_its_engine_and_another_one_continues_its_requests(
    replicas: Replicas, run: LoopThread
) -> None:
    """The last test on replica 0: the tokens it had sent are not sampled again."""
    scheduler = run(scheduler_of(replicas.actors[0]))
    actor = run(wait(replicas.actors[0].stats.call_one()))["pid"]

    async def tokens() -> int:
        return int((await replicas.actors[1].stats.call_one())["generated_tokens"])

    async def lose() -> tuple[Completion, Completion, int]:
        alone = await ask(replicas.actors[1], [5], LONG)
        before, dispatcher = await tokens(), Dispatcher(replicas.actors, DEADLINE_S)
        request = ReplicaConnection(replicas.actors[0]).ask([([5], LONG)], ignore)
        running = asyncio.ensure_future(dispatcher.generate([5], LONG, 0))
        await dispatcher.generate([5], BEGINNING, 0)
        os.kill(actor, signal.SIGKILL)
        # A process killed while Monarch asks it for its state is noticed later, with another message.
        lost = r"(?s)generator\.answer\(\) failed.*(sig=9|process likely crashed)"
        with pytest.raises(ReplicaLost, match=lost):
            await request
        return alone, await running, await tokens() - before

    alone, across, resampled = run(lose())
    assert across.token_ids.tolist() == alone.token_ids.tolist()
    assert np.abs(across.logprobs - alone.logprobs).max() < LOGPROB_BOUND
    assert across.policy_versions.tolist() == alone.policy_versions.tolist()
    assert across.finish_reason == "length"
    arrived = LONG.max_new_tokens - resampled
    assert BEGINNING.max_new_tokens - SETTINGS.part_tokens < arrived < LONG.max_new_tokens
    assert arrived % SETTINGS.part_tokens == 0
    wait_until(lambda: gone(actor) and gone(scheduler), f"the end of {actor} and {scheduler}")
    completion = run(ask(replicas.actors[1], [5], Sampling(max_new_tokens=3)))
    assert len(completion.token_ids) == 3


def test_a_lost_engine_fails_its_requests(replicas: Replicas, run: LoopThread) -> None:
    """The last test on replica 1, which then ends in order and leaves nothing."""
    actor, mesh = replicas.actors[1], replicas.meshes[1]
    scheduler = run(scheduler_of(actor))

    async def lose() -> None:
        life = asyncio.ensure_future(wait(actor.block_until_lost.call_one()))
        connection = ReplicaConnection(actor)
        request = connection.ask([([5], Sampling(max_new_tokens=1000))], ignore)

        async def started() -> bool:
            return bool((await actor.stats.call_one())["requests_in_flight"])

        await until(started, "the request to start")
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(ReplicaLost, match=rf"\b{scheduler}\b.* -9\b"):
            await request
        with pytest.raises(ReplicaLost, match=str(scheduler)):
            await connection.ask([([5], Sampling())], ignore)
        with pytest.raises(ActorError, match=str(scheduler)):
            await patiently(life, "the end of the replica")

    run(lose())
    pid = run(wait(actor.stats.call_one()))["pid"]
    run(wait(mesh.stop()))
    wait_until(lambda: gone(pid), f"the end of {pid}")


async def scheduler_of(actor: Any) -> int:
    (pid,) = (await actor.stats.call_one())["child_pids"]
    return pid
