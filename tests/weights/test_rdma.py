"""One-sided reads between the processes of real Monarch meshes: two senders, two receivers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monarch.actor import Actor
from monarch.config import configured

from monarch_rl.errors import TransferError
from monarch_rl.runtime.cluster import Cluster, launch_cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, members
from monarch_rl.weights import rdma
from monarch_rl.weights.area import attach
from monarch_rl.weights.manifest import ALIGNMENT, Manifest, make_manifest
from monarch_rl.weights.rdma import SILENCE_S, RdmaReceiver, RdmaSender, plan_snapshot, usable
from monarch_rl.weights.transport import TransferSettings

T = TypeVar("T")
CPU = torch.device("cpu")
DEADLINE_S = 180.0
PATIENT_S = 60
"""Time limit of a read that succeeds: on a machine without free cores the product's own limit would pass."""
SETTINGS = TransferSettings(bucket_mib=1, deadline_s=600)
TENSORS = [
    ("wide", (6000, 701), torch.float32),
    ("odd", (7, 3), torch.bfloat16),
    ("norm", (5,), torch.float32),
    ("embedding", (20_000, 701), torch.bfloat16),
    ("scale", (3,), torch.bfloat16),
]


def manifest() -> Manifest:
    """`wide` is split in two, `odd` unevenly; the second sender owns little, including `norm` and `scale`."""
    return make_manifest(
        TENSORS,
        [
            [("wide", 0, 3000 * 701), ("odd", 0, 12), ("embedding", 0, 20_000 * 701)],
            [("wide", 3000 * 701, 3000 * 701), ("odd", 12, 9), ("norm", 0, 5), ("scale", 0, 3)],
        ],
    )


def values(version: int) -> list[torch.Tensor]:
    """Arbitrary bits, including NaNs of all kinds; no byte of them is 0."""
    generator = torch.Generator().manual_seed(version)
    shapes = [(shape, dtype.itemsize) for _, shape, dtype in TENSORS]
    return [torch.randint(1, 256, (*shape, size), generator=generator, dtype=torch.uint8) for shape, size in shapes]


def write(views: list[torch.Tensor], plan: Manifest, rank: int, version: int) -> None:
    whole = values(version)
    for view, shard in zip(views, plan.shards[rank], strict=True):
        size = plan.tensors[shard.tensor].dtype.itemsize
        view.copy_(whole[shard.tensor].flatten()[shard.start * size : (shard.start + shard.numel) * size])
        view.view(plan.tensors[shard.tensor].dtype)  # raises unless it is aligned


class Sending(Actor):
    """A trainer rank."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        rdma.SILENCE_S = PATIENT_S
        self.sender = RdmaSender(manifest(), rank, SETTINGS, "127.0.0.1", CPU)

    @concurrent_endpoint
    async def open(self) -> tuple[bytes, int]:
        return await self.sender.open(), os.getpid()

    @concurrent_endpoint
    async def snapshot(self, version: int, snapshot: int) -> None:
        write(self.sender.views(snapshot), manifest(), self.rank, version)

    @concurrent_endpoint
    async def send(self, version: int, snapshot: int) -> None:
        await self.sender.send(version, snapshot)

    @concurrent_endpoint
    async def close(self) -> None:
        await self.sender.close()


@dataclass
class Received:
    equal: bool
    error: str


class ReadWhileWritten(RdmaReceiver):
    """Makes a sender start its next snapshot between the last data and the second check of the header."""

    writer: Sending | None = None

    async def _check_unchanged(self, rank: int, version: int, snapshot: int, deadline: float) -> None:
        if self.writer is not None:
            await self.writer.snapshot.call_one(version + 2, snapshot)
        await super()._check_unchanged(rank, version, snapshot, deadline)


class Receiving(Actor):
    """A generator replica."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        rdma.SILENCE_S = PATIENT_S
        self.receiver = ReadWhileWritten(manifest(), SETTINGS, CPU)
        self.areas = [attach(self.receiver.area(snapshot)) for snapshot in (0, 1)]

    @concurrent_endpoint
    async def connect(self, addresses: list[bytes]) -> None:
        await self.receiver.connect(addresses, 0, 2)

    @concurrent_endpoint
    async def receive(self, version: int, snapshot: int, after: tuple[int, signal.Signals] | None = None) -> Received:
        """Receive; as soon as the first bytes have arrived, send a process the signal in ``after``, if given."""
        area = self.areas[snapshot].zero_()
        rdma.SILENCE_S = PATIENT_S if after is None else SILENCE_S
        receiving = asyncio.ensure_future(self.receiver.receive(version, snapshot))
        if after is not None:
            while not area[0]:
                await asyncio.sleep(0)
            assert not area[-ALIGNMENT], "all was read before the signal"
            os.kill(*after)
        try:
            await receiving
            error = ""
        except TransferError as raised:
            error = str(raised)
        rdma.SILENCE_S = PATIENT_S
        return Received(self._holds(version, snapshot), error)

    @concurrent_endpoint
    async def set_writer(self, writer: Sending | None) -> None:
        self.receiver.writer = writer

    def _holds(self, version: int, snapshot: int) -> bool:
        pairs = zip(manifest().tensors, values(version), strict=True)
        return all(
            torch.equal(spec.view(self.areas[snapshot]).view(torch.uint8).flatten(), v.flatten()) for spec, v in pairs
        )

    @concurrent_endpoint
    async def content(self, snapshot: int) -> bytes:
        return bytes(self.areas[snapshot].numpy())


async def ask(answer: Awaitable[T], what: str) -> T:
    return await within(DEADLINE_S, answer, what)


class Sides:
    """Two senders in meshes of their own, so that one can be lost, and a mesh of two receivers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.senders = [self.sender(0), self.sender(1)]
        self.receivers: Receiving = cluster.spawn("receivers", 2).spawn("receivers", Receiving)
        self.pids: list[int] = []

    def sender(self, rank: int) -> Sending:
        actor: Sending = self.cluster.spawn(f"sender{rank}", 1).spawn(f"sender{rank}", Sending, rank)
        return actor

    async def connect(self) -> None:
        opened = await ask(asyncio.gather(*(s.open.call_one() for s in self.senders)), "addresses")
        self.pids = [pid for _, pid in opened]
        await ask(self.receivers.connect.call([address for address, _ in opened]), "the receivers to connect")

    async def publish(self, version: int, snapshot: int) -> None:
        await ask(asyncio.gather(*(s.snapshot.call_one(version, snapshot) for s in self.senders)), "snapshots")
        await ask(asyncio.gather(*(s.send.call_one(version, snapshot) for s in self.senders)), "send")

    async def receive(self, version: int, snapshot: int) -> list[Received]:
        return list((await ask(self.receivers.receive.call(version, snapshot), f"version {version}")).values())

    async def receive_and_signal(self, version: int, snapshot: int, rank: int, number: signal.Signals) -> Received:
        receiver = members(self.receivers)[0]
        return await ask(receiver.receive.call_one(version, snapshot, (self.pids[rank], number)), "an interrupted read")


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    with launch_cluster() as cluster:
        assert cluster is not None
        both = Sides(cluster)
        asyncio.run(both.connect())
        yield both


def run(steps: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(ask(steps(), "a test"))  # type: ignore[arg-type]


@pytest.mark.core
def test_versions_arrive_whole_at_every_receiver(sides: Sides) -> None:
    async def steps() -> None:
        for version in range(1, 5):
            snapshot = version % 2
            await sides.publish(version, snapshot)
            for received in await sides.receive(version, snapshot):
                assert (received.equal, received.error) == (True, "")

    run(steps)


def test_a_version_is_awaited_and_read_together(sides: Sides) -> None:
    """Receivers may start before the senders: both are called at the same time."""

    async def steps() -> None:
        await asyncio.gather(*(s.snapshot.call_one(6, 0) for s in sides.senders))
        receiving = asyncio.ensure_future(sides.receive(6, 0))
        await ask(sides.senders[0].send.call_one(6, 0), "the first sender")
        await ask(sides.senders[1].send.call_one(6, 0), "the second sender")
        assert all(received.equal for received in await receiving)

    run(steps)


def test_another_version_than_expected_is_refused(sides: Sides) -> None:
    async def steps() -> None:
        await sides.publish(9, 1)
        for received in await sides.receive(8, 1):
            assert "version 8" in received.error and "version 9" in received.error
        assert all(received.equal for received in await sides.receive(9, 1))

    run(steps)


@pytest.mark.core
def test_a_snapshot_written_to_while_it_is_read_is_refused(sides: Sides) -> None:
    async def steps() -> None:
        await sides.publish(11, 0)
        receiver = members(sides.receivers)[0]  # only one: the other may start when version 11 is already overwritten
        await ask(receiver.set_writer.call_one(sides.senders[0]), "the writer")
        received = await ask(receiver.receive.call_one(11, 0), "version 11")
        assert "version 11 of trainer rank 0 was overwritten" in received.error
        await ask(receiver.set_writer.call_one(None), "no writer")
        await sides.publish(13, 0)
        assert all(received.equal for received in await sides.receive(13, 0))

    run(steps)


@pytest.mark.core
def test_a_stopped_sender_is_an_error_in_seconds_and_writes_nothing_later(sides: Sides) -> None:
    async def steps() -> None:
        await sides.publish(20, 0)
        received = await sides.receive_and_signal(20, 0, 0, signal.SIGSTOP)
        assert f"from trainer rank 0 within {SILENCE_S} s" in received.error, "not by the transfer's deadline"
        receiver = members(sides.receivers)[0]
        before = await receiver.content.call_one(0)
        os.kill(sides.pids[0], signal.SIGCONT)
        await sides.publish(21, 1)
        assert all(received.equal for received in await sides.receive(21, 1))
        assert await receiver.content.call_one(0) == before
        assert all(received.equal for received in await sides.receive(20, 0))

    run(steps)


@pytest.mark.core
def test_a_killed_sender_is_an_error_in_seconds_and_can_be_replaced(sides: Sides) -> None:
    async def steps() -> None:
        await sides.publish(30, 0)
        received = await sides.receive_and_signal(30, 0, 0, signal.SIGKILL)
        assert f"version 30 from trainer rank 0 within {SILENCE_S} s" in received.error
        sides.senders[0] = sides.sender(0)
        await sides.connect()
        await sides.publish(31, 1)
        assert all(received.equal for received in await sides.receive(31, 1))

    run(steps)


def test_a_closed_sender_cannot_be_read(sides: Sides) -> None:
    async def steps() -> None:
        await sides.publish(40, 0)
        await ask(sides.senders[1].close.call_one(), "the sender to close")
        for received in await sides.receive(40, 0):
            assert "snapshot 0 of trainer rank 1" in received.error

    run(steps)


def test_unusable_rdma_is_reported() -> None:
    with configured(rdma_allow_tcp_fallback=True):
        assert usable() is None
    with configured(rdma_allow_tcp_fallback=False, rdma_disable_ibverbs=True):
        assert "rdma_allow_tcp_fallback" in str(usable())


DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32])
SHAPES = st.lists(st.tuples(st.integers(1, 40), DTYPES), min_size=1, max_size=8)


@settings(deadline=None)
@given(shapes=SHAPES, splits=st.lists(st.integers(0, 40), max_size=3), bucket=st.integers(16, 100), last=st.booleans())
def test_the_plan_copies_every_byte_to_its_place(
    shapes: list[tuple[int, torch.dtype]], splits: list[int], bucket: int, last: bool
) -> None:
    tensors = [(f"t{i}", (numel,), dtype) for i, (numel, dtype) in enumerate(shapes)]
    bounds = [0, *sorted(splits), 40]
    owned = [
        [(name, min(start, numel), min(end, numel) - min(start, numel)) for name, (numel,), _ in tensors]
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    plan = make_manifest(tensors, owned)
    whole = [torch.randint(1, 256, (spec.nbytes,), dtype=torch.uint8) for spec in plan.tensors]
    area = torch.zeros(plan.nbytes, dtype=torch.uint8)
    ranks = range(len(owned))
    for rank in reversed(ranks) if last else ranks:
        layout = plan_snapshot(plan, rank, bucket)
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for (start, nbytes), shard in zip(layout.shards, plan.shards[rank], strict=True):
            size = plan.tensors[shard.tensor].dtype.itemsize
            assert (start - plan.tensors[shard.tensor].offset - shard.start * size) % ALIGNMENT == 0
            memory[start : start + nbytes] = whole[shard.tensor][
                shard.start * size : (shard.start + shard.numel) * size
            ]
        for runs in layout.reads:
            assert runs[-1].snapshot_offset + runs[-1].nbytes - runs[0].snapshot_offset <= bucket
            for byte_range in runs:
                source = memory[byte_range.snapshot_offset : byte_range.snapshot_offset + byte_range.nbytes]
                area[byte_range.area_offset : byte_range.area_offset + byte_range.nbytes] = source
    for spec, value in zip(plan.tensors, whole, strict=True):
        assert torch.equal(spec.view(area).view(torch.uint8), value)


def test_a_single_sender_is_read_in_one_range() -> None:
    plan = make_manifest(TENSORS, [[(name, 0, rows * (rest[0] if rest else 1)) for name, (rows, *rest), _ in TENSORS]])
    layout = plan_snapshot(plan, 0, 1 << 30)
    assert [len(runs) for runs in layout.reads] == [1]
    assert layout.nbytes <= plan.nbytes
