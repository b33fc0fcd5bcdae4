"""Each transport between real processes: two senders, two receivers."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from monarch_rl.errors import TransferError
from monarch_rl.weights.area import attach
from monarch_rl.weights.checksum import ShardChecksums, tensor_checksum
from monarch_rl.weights.manifest import Manifest, make_manifest
from monarch_rl.weights.transport import SNAPSHOTS, TransferSettings, TransportName, make_receiver, make_sender
from tests.patience import wait_until

CPU = torch.device("cpu")
TENSORS = [("wide", (1000, 700), torch.float32), ("odd", (7, 3), torch.float32), ("norm", (5,), torch.float32)]
TENSORS += [(f"small {i}", (100_000,), torch.float32) for i in range(8)]
ALL_BYTES = 4 * (700_000 + 21 + 5 + 8 * 100_000)
JOIN_S = 300
"""Seconds for an answer, the first of which waits for imports: some 4 when nothing else runs, over 40 were observed."""
FAR_S = 600.0
"""A deadline that does not pass: transfers then end for another reason."""
BOTH: tuple[TransportName, ...] = ("collective", "shared_memory")


def settings(transport: TransportName, deadline_s: float = FAR_S, delta: bool = False) -> TransferSettings:
    return TransferSettings(transport, bucket_mib=1, deadline_s=deadline_s, delta=delta)


def manifest() -> Manifest:
    """`wide` is split in two, `odd` unevenly, and only the second sender has `norm`. The small ones, which only the
    first sender has, are in another order in the areas, so that they share four of the buckets that broadcasts use in
    turn."""
    first = [*((f"small {i}", 0, 100_000) for i in reversed(range(8))), ("wide", 0, 350_000), ("odd", 0, 12)]
    return make_manifest(TENSORS, [first, [("wide", 350_000, 350_000), ("odd", 12, 9), ("norm", 0, 5)]])


def values(version: int) -> list[torch.Tensor]:
    """All values differ in each version; from 10 on, only a few elements differ from version 10."""
    generator = torch.Generator().manual_seed(min(version, 10))
    tensors = [torch.randn(shape, generator=generator) for _, shape, _ in TENSORS]
    for changed in range(11, version + 1):
        tensors[0][changed::97, changed] += 1
        tensors[2][changed % 5] = -0.0
    return tensors


def write(version: int, rank: int, views: list[torch.Tensor]) -> None:
    """Write a version, as a trainer's snapshot does."""
    whole, plan = values(version), manifest()
    for shard, view in zip(plan.shards[rank], views, strict=True):
        run = whole[shard.tensor].flatten()[shard.start : shard.start + shard.numel]
        view.copy_(run.view(torch.uint8))


def send(rank: int, pipe: Connection, chosen: TransferSettings) -> None:
    """Serve the commands ``open``, ``("connect", addresses, receivers)``, ``("send", version)``."""

    async def serve() -> None:
        sender = make_sender(manifest(), rank, chosen, "127.0.0.1", CPU)
        while True:
            match await asyncio.to_thread(pipe.recv):
                case "open":
                    pipe.send(await sender.open())
                case "connect", addresses, receivers:
                    await sender.connect(addresses, receivers)
                    pipe.send("connected")
                case "send", version:
                    views = sender.views(version % SNAPSHOTS)
                    write(version, rank, views)
                    sums = ShardChecksums(manifest(), rank, views).take().tolist()
                    try:
                        await sender.send(version, version % SNAPSHOTS)
                        pipe.send(sums)
                    except TransferError as error:
                        pipe.send(str(error))

    torch.set_num_threads(1)
    asyncio.run(serve())


def receive(pipe: Connection, chosen: TransferSettings) -> None:
    """Serve the commands ``("connect", addresses, position, receivers)``, ``("receive", version)``."""

    async def serve() -> None:
        plan = manifest()
        receiver = make_receiver(plan, chosen, CPU)
        while True:
            match await asyncio.to_thread(pipe.recv):
                case "connect", addresses, position, receivers:
                    await receiver.connect(addresses, position, receivers)
                    pipe.send("connected")
                case "receive", version:
                    try:
                        nbytes = await receiver.receive(version, version % SNAPSHOTS)
                    except TransferError as error:
                        pipe.send(str(error))
                        continue
                    held = attach(receiver.area(version % SNAPSHOTS))
                    received = [spec.view(held) for spec in plan.tensors]
                    pipe.send(sum(nbytes) if all(map(torch.equal, received, values(version))) else "other values")

    torch.set_num_threads(1)
    asyncio.run(serve())


class Processes:
    """Starts the four processes, and ends them in any case."""

    def __init__(self, chosen: TransferSettings) -> None:
        self._context = multiprocessing.get_context("forkserver")  # it imports torch once
        self._context.set_forkserver_preload([__name__])
        self.processes: list[BaseProcess] = []
        self.senders = [self.start(send, rank, chosen) for rank in range(2)]
        self.receivers = [self.start(receive, chosen) for _ in range(2)]

    def start(self, target: Any, *arguments: Any) -> Connection:
        here, there = self._context.Pipe()
        rank, chosen = arguments[:-1], arguments[-1]
        self.processes.append(self._context.Process(target=target, args=(*rank, there, chosen), daemon=True))
        self.processes[-1].start()
        return here

    def connect(self, receivers: list[Connection]) -> None:
        for pipe in self.senders:
            pipe.send("open")
        addresses = [self.answer(pipe) for pipe in self.senders]
        for pipe in self.senders:
            pipe.send(("connect", addresses, len(receivers)))
        for position, pipe in enumerate(receivers):
            pipe.send(("connect", addresses, position, len(receivers)))
        assert {self.answer(pipe) for pipe in (*self.senders, *receivers)} == {"connected"}

    def transfer(self, version: int, receivers: list[Connection]) -> tuple[list[Any], list[Any]]:
        """The answers of the senders, and of the receivers."""
        for pipe in self.senders:
            pipe.send(("send", version))
        for pipe in receivers:
            pipe.send(("receive", version))
        return [self.answer(pipe) for pipe in self.senders], [self.answer(pipe) for pipe in receivers]

    @staticmethod
    def answer(pipe: Connection) -> Any:
        wait_until(pipe.poll, "an answer of a process", JOIN_S)
        return pipe.recv()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            wait_until(lambda process=process: not process.is_alive(), "the end of a process")  # type: ignore[misc]


@pytest.mark.parametrize("transport", BOTH)
def test_versions_arrive_whole_and_members_may_change(transport: TransportName) -> None:
    """Three versions to two receivers; one of these is killed, another one joins; two more versions."""
    chosen = settings(transport)
    with Processes(chosen) as running:
        running.connect(running.receivers)
        for version in (1, 2, 3):
            sums, arrived = running.transfer(version, running.receivers)
            assert arrived == [ALL_BYTES, ALL_BYTES]
            whole = [int(tensor_checksum(value)) for value in values(version)]
            assert [(a + b - c) % 2**64 for a, b, c in zip(*sums, whole, strict=True)] == [0] * len(TENSORS)
        running.processes[-1].kill()
        remaining = [running.receivers[0], running.start(receive, chosen)]
        running.connect(remaining)
        assert [running.transfer(version, remaining)[1] for version in (3, 4)] == [[ALL_BYTES, ALL_BYTES]] * 2


@pytest.mark.parametrize("transport", BOTH)
def test_only_changed_elements_are_sent_except_to_new_members(transport: TransportName) -> None:
    """Versions 10, 11, ... differ in few elements; a new member gets the next one whole."""
    chosen = settings(transport, delta=True)
    with Processes(chosen) as running:
        running.connect(running.receivers)
        sent = [running.transfer(version, running.receivers)[1] for version in (10, 11, 12)]
        print(f"{transport}: sent share of the version's bytes {max(map(max, sent[1:])) / ALL_BYTES:.2%}")
        assert sent[0][0] > ALL_BYTES and max(map(max, sent[1:])) < ALL_BYTES / 100
        remaining = [running.receivers[1], running.start(receive, chosen)]
        running.connect(remaining)
        whole, after = running.transfer(12, remaining)[1], running.transfer(13, remaining)[1]
        assert min(whole) > ALL_BYTES and max(after) < ALL_BYTES / 100


@pytest.mark.parametrize("transport", BOTH)
def test_another_version_than_expected_is_refused(transport: TransportName) -> None:
    """The receiver of a broadcast finds another version; through shared memory the expected one is late."""
    with Processes(settings(transport, FAR_S if transport == "collective" else 1.0)) as running:
        running.connect(running.receivers)
        for pipe in running.senders:
            pipe.send(("send", 5))
            if transport == "shared_memory":
                running.answer(pipe)
        for pipe in running.receivers:
            pipe.send(("receive", 7))  # in the same snapshot
        for pipe in running.receivers:
            message = running.answer(pipe)
            assert "version 7" in message and "5" in message and "trainer rank" in message


def test_a_killed_sender_is_an_error_before_the_deadline() -> None:
    with Processes(settings("collective")) as running:
        running.connect(running.receivers)
        assert running.transfer(1, running.receivers)[1] == [ALL_BYTES] * 2
        running.processes[1].kill()
        running.senders[0].send(("send", 2))
        for pipe in running.receivers:
            pipe.send(("receive", 2))
        for pipe in running.receivers:
            message = running.answer(pipe)
            assert "version 2 from trainer rank" in message and "deadline" not in message


def test_the_loss_of_one_receiver_is_noticed_immediately_by_the_others() -> None:
    """Not at the deadline: a member that fails closes its connections, which the others notice."""
    with Processes(settings("collective")) as running:
        running.connect(running.receivers)
        assert running.transfer(1, running.receivers)[1] == [ALL_BYTES] * 2
        for pipe in (*running.senders, running.receivers[0]):
            pipe.send(("receive" if pipe is running.receivers[0] else "send", 2))
        running.processes[-1].kill()
        for pipe in (*running.senders, running.receivers[0]):
            message = running.answer(pipe)
            assert "version 2" in message and "deadline" not in message


def test_areas_that_were_never_written_are_not_taken_for_version_0() -> None:
    """New areas hold zeros, which no trainer rank has marked as a version."""
    with Processes(settings("shared_memory", deadline_s=1.0, delta=True)) as running:
        running.connect(running.receivers)
        for pipe in running.receivers:
            pipe.send(("receive", 0))
        for pipe in running.receivers:
            assert "version 0 is incomplete" in running.answer(pipe)
        for pipe in running.senders:
            pipe.send(("send", 0))
            running.answer(pipe)
        for pipe in running.receivers:
            pipe.send(("receive", 0))
        assert min(running.answer(pipe) for pipe in running.receivers) > ALL_BYTES


def test_a_late_sender_is_named() -> None:
    """Nothing moves through shared memory: what is missing is a rank's mark that its shard is written."""
    with Processes(settings("shared_memory", deadline_s=1.0)) as running:
        running.connect(running.receivers)
        running.senders[0].send(("send", 2))
        running.answer(running.senders[0])
        running.receivers[0].send(("receive", 2))
        message = running.answer(running.receivers[0])
        assert "version 2" in message and "trainer ranks [1]" in message


@pytest.mark.parametrize("setting", ["bucket_mib", "deadline_s", "attempts"])
def test_settings_must_be_positive(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"TransferSettings\.{setting} "):
        TransferSettings(**{setting: 0})  # type: ignore[arg-type]


def test_a_shard_that_is_being_written_is_no_version() -> None:
    """Version numbers are reused after a rollback: a receiver must not take the old version while it is replaced."""

    async def receive_twice() -> None:
        plan, chosen = make_manifest(TENSORS[2:3], [[("norm", 0, 5)]]), settings("shared_memory", deadline_s=0.5)
        sender, receiver = make_sender(plan, 0, chosen, "127.0.0.1", CPU), make_receiver(plan, chosen, CPU)
        address = await sender.open()
        await sender.connect([address], 1)
        await receiver.connect([address], 0, 1)
        sender.views(0)
        await sender.send(2, 0)
        assert await receiver.receive(2, 0) == [20]
        sender.views(0)
        with pytest.raises(TransferError, match=r"version 2 .* trainer ranks \[0\]"):
            await receiver.receive(2, 0)
        await sender.send(2, 0)
        assert await receiver.receive(2, 0) == [20]
        await sender.close()
        await receiver.close()

    asyncio.run(receive_twice())
