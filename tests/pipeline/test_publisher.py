"""A version that cannot be published ends the recipe's wait, and the right member is blamed for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monarch.actor import ActorError

from monarch_rl.errors import DeadlineExceeded, NotFinite, PublishError, StillServing
from monarch_rl.pipeline import publishing
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.publishing import BaseWeights, Publication, Publisher, Replicas, TransferGroup
from monarch_rl.weights.checksum import add_checksums, signed
from monarch_rl.weights.manifest import Manifest, lay_out
from monarch_rl.weights.transport import TransferSettings
from tests.patience import patiently


def publisher() -> Publisher:
    absent: Any = None
    return Publisher(TransferGroup(absent, [], Manifest((), 0, ()), TransferSettings()), absent, Replicas())


async def fails() -> None:
    raise RuntimeError("generator 1: 2 of 21 tensors differ from the trainer's")


def test_a_failed_publication_ends_the_wait_for_a_batch_at_once() -> None:
    async def go() -> None:
        waiting = publisher()
        waiting._unfinished.append(asyncio.create_task(fails()))
        batch = asyncio.get_running_loop().create_future()
        with pytest.raises(RuntimeError, match="generator 1: 2 of 21"):
            await patiently(waiting.unless_publishing_fails(batch), "a publication that has failed")
        assert batch.cancelled()

    asyncio.run(go())


def test_a_successful_publication_does_not_disturb_the_wait_for_a_batch() -> None:
    async def go() -> None:
        waiting = publisher()
        waiting._unfinished.append(asyncio.create_task(asyncio.sleep(0)))
        assert await waiting.unless_publishing_fails(asyncio.sleep(0.01, "metrics")) == "metrics"
        await waiting.wait_until_served()

    asyncio.run(go())


@given(st.data())
def test_a_changed_base_weight_changes_the_checksum_of_its_layer_alone(data: st.DataObject) -> None:
    layers = ["model.embed_tokens.weight", *(f"model.layers.{i}" for i in (0, 1, 10))]
    names = [layers[0], *(f"{layer}.mlp.experts.{j}.up.weight" for layer in layers[1:] for j in (0, 1))]
    specs, nbytes = lay_out([(name, (2, 2), torch.bfloat16) for name in names])
    checksums = np.arange(len(names))

    def by_layer() -> dict[str, int]:
        return BaseWeights(Manifest(specs, nbytes, ()), checksums).by_layer

    before, place = by_layer(), data.draw(st.integers(0, len(names) - 1))
    checksums[place] ^= 1 << data.draw(st.integers(0, 62))
    changed = [name for name, checksum in by_layer().items() if checksum != before[name]]
    assert changed == [f"{layers[(place + 1) // 2]} (bfloat16)"] and len(before) == 4


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
def test_checksums_of_shards_add_up_as_int64_do(sums: list[int]) -> None:
    total = torch.tensor(sums, dtype=torch.int64).sum()
    assert signed(sum(sums)) == int(total)
    if sums:
        assert add_checksums([np.array([part]) for part in sums]).tolist() == [int(total)]


# -- which member is blamed: handles with prepared answers, no processes -----------------------------------------------


class Handle:
    """A handle of an actor; its endpoints are coroutine functions."""

    def __init__(self, **endpoints: Callable[..., Any]) -> None:
        for name, endpoint in endpoints.items():
            setattr(self, name, SimpleNamespace(call_one=endpoint, call=endpoint))


def returns(answer: Any = None) -> Callable[..., Any]:
    async def endpoint(*_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return endpoint


@dataclass
class Report:
    paused_seconds: float = 0.1
    verification_share: float = 0.2


class Replica(Handle):
    """A replica that accepts every version unless an endpoint is given. ``received`` counts its calls of receive."""

    def __init__(self, **endpoints: Callable[..., Any]) -> None:
        self.received = 0

        async def receive(*_: Any) -> int:
            self.received += 1
            return 1

        defaults: dict[str, Callable[..., Any]] = {
            "ready": returns(),
            "weights_setup": returns(0.0),
            "weights_connect": returns(),
            "weights_abort": returns(),
            "receive": receive,
            "commit": returns(Report()),
        }
        super().__init__(**defaults | endpoints)


class Harness:
    """A publisher with one trainer rank, whose endpoints may be given."""

    def __init__(self, *replicas: Handle, attempts: int = 3, **endpoints: Callable[..., Any]) -> None:
        defaults: dict[str, Callable[..., Any]] = {"ready": returns(), "send": returns([]), "weights_abort": returns()}
        rank: Any = Handle(**defaults | endpoints)
        connect = endpoints.get("weights_connect", returns())
        trainer: Any = Handle(weights_open=returns({0: (0, b"")}), weights_connect=connect, snapshot=returns({0: 0.01}))
        self.served: list[int] = []
        self.dispatch: list[tuple[list[int], list[int]]] = []

        async def published(version: int) -> None:
            self.served.append(version)

        async def update_replicas(paused: list[int], lost: list[int]) -> None:
            self.dispatch.append((paused, lost))

        transfer_group = TransferGroup(trainer, [rank], Manifest((), 0, ()), TransferSettings(attempts=attempts))
        buffer: Any = Handle(published=published)
        worker: Any = Handle(update_replicas=update_replicas)
        self.replicas = Replicas(ActorPool("rollout worker", "rollout", {0: worker}))
        self.publisher = Publisher(transfer_group, buffer, self.replicas)
        self.handles = replicas

    async def set_up(self, index: int, replica: Any) -> None:
        self.replicas.add(await self.publisher.transfer_group.set_up_replica(index, replica))

    async def publish(self, *versions: int) -> None:
        if not self.replicas.handles:
            for index, replica in enumerate(self.handles):
                await self.set_up(index, replica)
        for version in versions:
            await self.publisher.publish(version)
        await self.publisher.wait_until_served()


def test_a_publication_serves_a_version_to_the_replicas_that_are_behind() -> None:
    """It uses the transfer group and the replicas, without a publisher."""

    async def go() -> None:
        behind, current = Replica(), Replica()
        harness = Harness(behind, current)
        transfer_group, replicas = harness.publisher.transfer_group, harness.replicas
        for index, handle in enumerate(harness.handles):
            await harness.set_up(index, handle)
        next(replica for replica in replicas if replica.index == 1).version = 7
        publication = Publication(7, transfer_group, replicas)
        await publication.run()
        assert not replicas.behind(7) and (behind.received, current.received) == (1, 0)
        assert (publication.max_received_bytes, publication.paused_s, publication.verify_share) == (1, 0.1, 0.2)
        assert not harness.served, "only the publisher notifies the buffer"

    asyncio.run(go())


def test_only_the_replica_that_never_receives_is_removed() -> None:
    """A collective fails for all members, and all of them answer: the last attempt sends to each replica alone."""
    sick = Replica(receive=returns(RuntimeError("no route to host")))
    together: list[int] = []

    async def send(*_: Any) -> list[int]:
        if len(harness.publisher.transfer_group.connected or []) > 1:
            together.append(1)
            raise RuntimeError("connection closed by peer")
        return []

    harness = Harness(Replica(), sick, Replica(), send=send)
    asyncio.run(harness.publish(1))
    assert list(harness.replicas.lost) == [1] and "load version 1 in 3 attempts" in harness.replicas.lost[1]
    assert list(harness.replicas.handles) == [0, 2] and len(together) == 2
    assert harness.served == [1] and harness.dispatch[-1] == ([], [1])


def test_a_lost_replica_is_blamed_even_at_the_only_attempt() -> None:
    answers = iter([None, RuntimeError("Killed(sig=9)")])

    async def ready() -> None:
        if (error := next(answers)) is not None:
            raise error

    async def send(*_: Any) -> list[int]:
        if len(harness.replicas.handles) > 1:
            raise RuntimeError("connection closed by peer")
        return []

    harness = Harness(Replica(), Replica(ready=ready), send=send, attempts=1)
    asyncio.run(harness.publish(1))
    assert "Killed(sig=9)" in harness.replicas.lost[1] and list(harness.replicas.handles) == [0]
    assert harness.served == [1]


def test_the_error_names_all_replicas_when_none_is_left() -> None:
    harness = Harness(*[Replica(commit=returns(RuntimeError(f"broken {i}"))) for i in range(2)], attempts=1)
    with pytest.raises(PublishError, match=r"version 1 .*generator 0: .*broken 0; generator 1: .*broken 1"):
        asyncio.run(harness.publish(1))


@pytest.mark.parametrize("wrapped", [False, True], ids=["local", "from another process"])
def test_no_replica_commits_or_is_blamed_for_a_version_that_is_not_finite(wrapped: bool) -> None:
    async def go() -> None:
        problem = NotFinite("norm.weight holds 1 values that are not finite, the first at [3]")
        sent = [ActorError(problem) if wrapped else problem]

        async def send(*_: Any) -> list[int]:
            if len(committed) == 2:
                raise sent[0]
            return []

        committed: list[int] = []

        async def commit(version: int, *_: Any) -> Report:
            committed.append(version)
            return Report()

        harness = Harness(Replica(commit=commit), Replica(commit=commit), send=send)
        await harness.publish(1)
        with pytest.raises(PublishError, match=r"version 2, .*step 2, .*: norm\.weight .*\[3\]"):
            await harness.publish(2)
        assert committed == [1, 1] and not harness.replicas.lost and harness.served == [1]
        assert [replica.version for replica in harness.replicas] == [1, 1]

    asyncio.run(go())


def test_a_replica_removed_while_it_is_probed_does_not_disturb_the_publication() -> None:
    async def go() -> None:
        probed, answer = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def ready() -> None:
            probed.set()
            await answer

        harness = Harness(Replica(), Replica(ready=ready))
        publishing = asyncio.create_task(harness.publish(1))
        await probed.wait()
        await harness.publisher.remove_replica(1, "it is stopped")
        answer.set_exception(RuntimeError("Killed(sig=9)"))
        await publishing
        assert list(harness.replicas.lost) == [1] and harness.served == [1]

    asyncio.run(go())


def test_a_replica_that_cannot_commit_yet_keeps_its_requests_and_a_broken_one_does_not() -> None:
    def once(error: Exception) -> Callable[..., Any]:
        """Commit the first version at the first attempt, the second version at the second attempt."""
        answers = iter([None, error])

        async def commit(*_: Any) -> Report:
            if (failure := next(answers, None)) is not None:
                raise failure
            return Report()

        return commit

    harness = Harness(Replica(commit=once(StillServing("requests run"))), Replica(commit=once(RuntimeError("bits"))))
    asyncio.run(harness.publish(1, 2))
    assert harness.dispatch == [([], []), ([1], []), ([], [])]
    last = harness.publisher.last
    assert last is not None and (last.version, last.snapshot_s, last.paused_s) == (2, 0.01, 0.1)
    assert last.verify_share == pytest.approx(0.2)


async def some_turns() -> None:
    """Let every task run that is not blocked."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_two_versions_are_in_flight_and_a_third_waits() -> None:
    async def go() -> None:
        gate = asyncio.Event()

        async def receive(*_: Any) -> int:
            await gate.wait()
            return 1

        harness = Harness(Replica(receive=receive))
        await harness.set_up(0, harness.handles[0])
        await harness.publisher.publish(1)
        await harness.publisher.publish(2)
        third = asyncio.create_task(harness.publisher.publish(3))
        await some_turns()
        assert not third.done() and harness.publisher._newest == 2, "a snapshot was overwritten while it was read"
        gate.set()
        await third
        await harness.publisher.wait_until_served()
        assert harness.served == [1, 2, 3]

    asyncio.run(go())


def test_a_replica_added_during_a_publication_receives_the_version_after_it() -> None:
    """Two concurrent publications would use the same process groups and snapshots."""

    async def go() -> None:
        gate, in_flight, most_in_flight = asyncio.Event(), 0, 0

        async def receive(*_: Any) -> int:
            nonlocal in_flight, most_in_flight
            in_flight += 1
            most_in_flight = max(most_in_flight, in_flight)
            await gate.wait()
            in_flight -= 1
            return 1

        harness = Harness(Replica(receive=receive))
        await harness.set_up(0, harness.handles[0])
        await harness.publisher.publish(1)
        settling = asyncio.create_task(harness.publisher.wait_until_served())
        while not in_flight:
            await asyncio.sleep(0)
        harness.replicas.lost[1] = "killed"
        new: Any = Replica(receive=receive)
        adding = asyncio.create_task(harness.publisher.add(1, new))
        await some_turns()
        gate.set()
        await asyncio.gather(settling, adding)
        assert most_in_flight == 1 and list(harness.replicas.handles) == [0, 1] and not harness.replicas.lost

    asyncio.run(go())


def test_a_replacement_is_not_blamed_for_the_silence_of_its_predecessor() -> None:
    """The first replica is probed, and replaced before the probe fails."""

    async def go() -> None:
        silent, probed = asyncio.get_running_loop().create_future(), asyncio.Event()
        answers = iter([None])

        async def ready() -> None:
            if next(answers, silent) is silent:
                probed.set()
                await silent

        harness = Harness(Replica(), Replica(ready=ready, receive=returns(RuntimeError("connection lost"))))
        publishing = asyncio.create_task(harness.publish(1))
        await probed.wait()
        new: Any = Replica()
        await harness.publisher.remove_replica(1, "it is stopped")
        adding = asyncio.create_task(harness.publisher.add(1, new))
        while 1 not in harness.replicas.handles:
            await asyncio.sleep(0)
        silent.set_exception(RuntimeError("Killed(sig=9)"))
        await asyncio.gather(publishing, adding)
        assert new.received and harness.replicas.handles[1] is new and not harness.replicas.lost

    asyncio.run(go())


# -- members that are lost during a transfer --------------------------------------------------------------


def in_a_transfer(answer: Any) -> tuple[Callable[..., Any], Callable[..., Any], asyncio.Event, list[str]]:
    """A pair of endpoints: one waits for the other members, and one aborts this wait.

    Args:
        answer: what the first endpoint returns in the next transfer.

    Returns:
        Both endpoints, an event that the first one sets on entry, and the reasons of all aborts.
    """
    entered, aborted, reasons = asyncio.Event(), asyncio.Event(), list[str]()

    async def take_part(*_: Any) -> Any:
        if reasons:  # the next transfer
            return answer
        entered.set()
        await aborted.wait()
        raise RuntimeError(f"the transfer was aborted: {reasons[0]}")

    async def abort(why: str) -> None:
        reasons.append(why)
        aborted.set()

    return take_part, abort, entered, reasons


def test_a_replica_lost_during_a_transfer_aborts_it_and_the_others_receive_the_version_again() -> None:
    """The replica hangs. The trainer rank waits for it, and NCCL would not notify it."""

    async def go() -> None:
        send, abort, sending, reasons = in_a_transfer([])
        never = asyncio.get_running_loop().create_future()

        async def receive(*_: Any) -> int:
            return await never

        harness = Harness(Replica(), Replica(receive=receive), send=send, weights_abort=abort)
        publishing = asyncio.create_task(harness.publish(1))
        await sending.wait()
        await harness.publisher.remove_replica(1, "it is stopped")
        await patiently(publishing, "a version that is published")
        assert reasons == ["generator 1 is lost: it is stopped"]
        assert harness.served == [1] and list(harness.replicas.handles) == [0]
        assert list(harness.replicas.lost) == [1]

    asyncio.run(go())


def test_a_failed_member_aborts_the_transfer_for_all_others() -> None:
    """A trainer rank and a replica wait for a replica whose process has ended; it is found lost and removed."""

    async def go() -> None:
        send, abort_send, _, of_rank = in_a_transfer([])
        receive, abort_receive, receiving, of_replica = in_a_transfer(1)
        answers = iter([None])

        async def killed(*_: Any) -> int:
            await receiving.wait()
            raise RuntimeError("Killed(sig=9)")

        async def ready() -> None:
            if next(answers, "gone") == "gone":
                raise RuntimeError("Killed(sig=9)")

        gone = Replica(ready=ready, receive=killed)
        there = Replica(receive=receive, weights_abort=abort_receive)
        harness = Harness(there, gone, send=send, weights_abort=abort_send)
        await patiently(harness.publish(1), "a version that is published")
        assert of_rank == of_replica == ["Killed(sig=9)"]
        assert harness.served == [1] and list(harness.replicas.lost) == [1]

    asyncio.run(go())


def test_a_replica_lost_while_members_connect_aborts_the_connection() -> None:
    """Connecting takes NCCL seconds."""

    async def go() -> None:
        connect, abort, connecting, reasons = in_a_transfer(None)
        never = asyncio.get_running_loop().create_future()

        async def meet(*_: Any) -> None:
            await never

        harness = Harness(Replica(), Replica(weights_connect=meet), weights_abort=abort, weights_connect=connect)
        publishing = asyncio.create_task(harness.publish(1))
        await connecting.wait()
        await harness.publisher.remove_replica(1, "it is stopped")
        await patiently(publishing, "a version that is published")
        assert reasons == ["generator 1 is lost: it is stopped"] and harness.served == [1]

    asyncio.run(go())


# -- notifications of rollout workers about replicas -------------------------------------------------------------------


class Worker:
    """Records its notifications; does not answer while it is ``deaf``."""

    def __init__(self) -> None:
        self.update_replicas = self
        self.notifications: list[tuple[list[int], list[int]]] = []
        self.deaf = False

    async def call_one(self, paused: list[int], lost: list[int]) -> None:
        if self.deaf:
            raise DeadlineExceeded("a worker that does not answer")
        self.notifications.append((paused, lost))


def test_workers_are_notified_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a worker that wrongly considers a replica lost would never send it requests again."""

    async def test() -> None:
        worker = Worker()
        replicas = Replicas(ActorPool("rollout worker", "rollout", {0: cast(Any, worker)}))
        await replicas.notify_workers()
        await replicas.notify_workers()
        assert worker.notifications == [([], [])]
        monkeypatch.setattr(publishing, "REPEAT_S", 0.0)
        await asyncio.sleep(0)
        await replicas.notify_workers()
        assert worker.notifications == [([], [])] * 2

    asyncio.run(test())


def test_each_worker_is_notified_of_each_change_once() -> None:
    """This includes a worker that did not answer the last notification, and a replacement worker."""

    async def test() -> None:
        first, second, third = Worker(), Worker(), Worker()
        workers: ActorPool[Any] = ActorPool("rollout worker", "rollout", {0: first, 1: second})
        replicas = Replicas(workers)
        second.deaf = True
        await replicas.notify_workers()
        second.deaf = False
        await replicas.notify_workers()
        await replicas.notify_workers()
        assert first.notifications == second.notifications == [([], [])]
        replicas.add(publishing.Replica(1, cast(Any, None), 0.0))
        replicas.lost[2] = "killed"
        await replicas.notify_workers()
        workers.handles[1] = third
        await replicas.notify_workers()
        assert first.notifications == second.notifications == [([], []), ([1], [2])]
        assert third.notifications == [([1], [2])]

    asyncio.run(test())
