"""Transfers, checksums and compression stay off the stream of training; a lost member ends no process.

A recording device replaces CUDA, and :class:`Network` NCCL: broadcasts are enqueued, and hang if a member does.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from monarch_rl.errors import TransferError
from monarch_rl.runtime.streams import finish_current
from monarch_rl.trainer.snapshots import Snapshots
from monarch_rl.weights import area, broadcast_group, rdma
from monarch_rl.weights.area import Area, attach
from monarch_rl.weights.broadcast_group import BroadcastGroup
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.collective import CollectiveReceiver, CollectiveSender
from monarch_rl.weights.manifest import Manifest, make_manifest
from monarch_rl.weights.transport import SNAPSHOTS, TransferSettings, TransportName, make_receiver, make_sender
from tests.patience import happened, item_of, join, patiently, until
from tests.recorded_streams import DEFAULT, Record, RecordedDevice

CPU = torch.device("cpu")
ROWS = 600_000


class Network:
    """Transfers broadcasts of one sender to one receiver, like NCCL: it returns before they have ended."""

    def __init__(self, device: RecordedDevice) -> None:
        self.device = device
        self.sent: queue.Queue[torch.Tensor] = queue.Queue()
        self.hanging, self.release = threading.Event(), threading.Event()
        """Set while an enqueued broadcast does not end; aborts may proceed."""
        self.release.set()
        self.aborts: list[tuple[str, str]] = []
        """``begun`` and ``ended``, each with the thread."""

    def make_group(self, store: Any, rank: int, *_: Any) -> Network.Group:
        return Network.Group(self, rank)

    class Group:
        def __init__(self, network: Network, rank: int) -> None:
            self._network, self._rank = network, rank

        def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
            assert not options.asyncOp, "NCCL would use a stream of its own, and have this one wait for it"
            network = self._network
            network.device.record("broadcast")
            if network.device.hangs.is_set():
                network.hanging.set()
            elif self._rank == 0:
                network.sent.put(tensors[0].clone())
            else:
                tensors[0].copy_(item_of(network.sent, "a broadcast"))

        def abort(self) -> None:
            network, name = self._network, threading.current_thread().name
            network.aborts.append(("begun", name))
            happened(network.release, "permission to abort")
            network.aborts.append(("ended", name))


@pytest.fixture
def device() -> Iterator[RecordedDevice]:
    recorded = RecordedDevice()
    with recorded.in_place_of_cuda():
        yield recorded


@pytest.fixture
def network(device: RecordedDevice, monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network(device)
    monkeypatch.setattr(broadcast_group, "make_group", made.make_group)
    return made


def manifest() -> Manifest:
    return make_manifest(
        [("large", (ROWS,), torch.float32), ("a", (5,), torch.float32), ("b", (3, 2), torch.float32)],
        [[("large", 0, ROWS), ("a", 0, 5), ("b", 0, 6)]],
    )


def train(views: list[torch.Tensor], version: int) -> None:
    """A snapshot, as the training thread takes it."""
    for view in views:
        view.view(torch.float32).fill_(version)
    finish_current(CPU)


async def publish(transport: TransportName, delta: bool, device: RecordedDevice) -> list[tuple[list[int], list[float]]]:
    """Three versions from a trainer rank to a replica: the rank's checksums, and the received values of each tensor."""
    settings = TransferSettings(transport, bucket_mib=1, deadline_s=60, delta=delta)
    compute = ThreadPoolExecutor(1, "compute")
    plan, arrived = manifest(), list[tuple[list[int], list[float]]]()
    with device.recording():
        sender = make_sender(plan, 0, settings, "127.0.0.1", CPU)
        receiver = make_receiver(plan, settings, CPU)
        snapshots = Snapshots(sender, plan, 0, CPU)
        address = await sender.open()
        await asyncio.gather(sender.connect([address], 1), receiver.connect([address], 0, 1))
        for version in (1, 2, 3):
            index = version % SNAPSHOTS
            views = snapshots.prepare(version, index)
            await asyncio.get_running_loop().run_in_executor(compute, train, views, version)
            sums, _, _ = await asyncio.gather(
                snapshots.checksums(version, index), sender.send(version, index), receiver.receive(version, index)
            )
            with _disable_current_modes():  # the test itself reads
                held = attach(receiver.area(index))
                arrived.append((sums.tolist(), [float(spec.view(held).flatten()[-1]) for spec in plan.tensors]))
        await snapshots.close()
        await receiver.close()
    compute.shutdown()
    return arrived


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_no_stream_is_shared_with_training(
    transport: TransportName, delta: bool, device: RecordedDevice, network: Network
) -> None:
    """Only the training thread uses the default stream; every other thread has its own, and waits for it alone."""
    plan = manifest()
    for version, (sums, values) in enumerate(asyncio.run(publish(transport, delta, device)), 1):
        assert values == [version] * 3
        whole = [torch.full(spec.shape, float(version)) for spec in plan.tensors]
        assert sums == [int(tensor_checksum(tensor)) for tensor in whole]
    assert {r.thread for r in device.records if r.stream == DEFAULT} == {"compute_0"}
    assert {r.stream for r in device.records if r.thread == "compute_0"} == {DEFAULT}
    assert [r for r in device.records if r.waits_for not in ("", r.stream)] == []
    threads: dict[str, set[str]] = {}
    for record in device.records:
        threads.setdefault(record.stream, set()).add(record.thread.split("_")[0])
    kinds = {"compute", "verify", "weights", *(["delta"] if delta else [])}
    assert kinds <= set().union(*threads.values())
    for stream, users in threads.items():
        # The event loop marks the start of writing an area on the stream of the thread that marks its end.
        assert len(users & kinds) <= 1, f"{stream} is used by {users}"
    broadcasts = {record.thread.split("_")[0] for record in device.records if record.op == "broadcast"}
    assert broadcasts == ({"weights"} if transport == "collective" else set())


class Registered:
    """Replaces Monarch's ``RDMABuffer``: both ends are in one process, and a read is on no stream."""

    memory: ClassVar[list[torch.Tensor]] = []

    def __init__(self, tensor: torch.Tensor) -> None:
        self._number = len(self.memory)
        self.memory.append(tensor.view(torch.uint8))

    def size(self) -> int:
        return self.memory[self._number].numel()

    async def read_into(self, into: torch.Tensor, timeout: int) -> None:
        assert timeout > 0
        with _disable_current_modes():
            into.copy_(self.memory[self._number])

    async def drop(self) -> None: ...


def test_ranges_that_rdma_read_together_are_unpacked_off_the_training_stream(
    device: RecordedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    import monarch.rdma

    monkeypatch.setattr(monarch.rdma, "RDMABuffer", Registered)
    monkeypatch.setattr(Registered, "memory", [])
    monkeypatch.setattr(rdma, "usable", lambda: None)
    # Each rank's shards have another rank's between them, so that they are read in one range and then copied.
    plan = make_manifest(
        [(name, (8,), torch.float32) for name in "abcd"],
        [[(name, 0, 8) for name in names] for names in ("ac", "bd")],
    )

    async def scenario() -> None:
        settings = TransferSettings("rdma", deadline_s=60)
        senders = [make_sender(plan, rank, settings, "127.0.0.1", CPU) for rank in range(2)]
        receiver = make_receiver(plan, settings, CPU)
        await receiver.connect([await sender.open() for sender in senders], 0, 1)
        for rank, sender in enumerate(senders):
            train(sender.views(1), 3 + rank)
            await sender.send(3, 1)
        with device.recording():
            await receiver.receive(3, 1)
        held = attach(receiver.area(1))
        assert [float(spec.view(held)[-1]) for spec in plan.tensors] == [3, 4, 3, 4]
        for sender in senders:
            await sender.close()
        await receiver.close()

    asyncio.run(scenario())
    copies = [record for record in device.records if record.op.startswith("copy_")]
    assert len(copies) == 4
    assert {record.thread.split("_")[0] for record in copies} == {"weights"}
    assert DEFAULT not in {record.stream for record in copies}
    assert [r for r in device.records if r.waits_for not in ("", r.stream)] == []


class Pair:
    """A sender and a receiver that are connected, and have transferred version 1."""

    def __init__(self, deadline_s: float) -> None:
        settings = TransferSettings("collective", bucket_mib=1, deadline_s=deadline_s)
        self.sender = CollectiveSender(manifest(), 0, settings, "127.0.0.1", CPU)
        self.receiver = CollectiveReceiver(manifest(), settings, CPU)

    async def connect(self) -> None:
        address = await self.sender.open()
        await asyncio.gather(self.sender.connect([address], 1), self.receiver.connect([address], 0, 1))

    async def transfer(self, version: int) -> None:
        train(self.sender.views(version % SNAPSHOTS), version)
        index = version % SNAPSHOTS
        await asyncio.gather(self.sender.send(version, index), self.receiver.receive(version, index))

    def set_deadline(self, seconds: float) -> None:
        self.sender._transfers._deadline_s = self.receiver._transfers._deadline_s = seconds

    def held(self) -> float:
        return float(manifest().tensors[0].view(attach(self.receiver.area(0)))[-1])

    async def close(self) -> None:
        await asyncio.gather(self.sender.close(), self.receiver.close())


def broadcasts(device: RecordedDevice) -> list[Record]:
    return [record for record in device.records if record.op == "broadcast"]


def watch_questions(group: BroadcastGroup) -> threading.Semaphore:
    """A semaphore that is released whenever a member asks whether the others have joined."""
    asked, store = threading.Semaphore(0), group._store

    class Store:
        def check(self, keys: list[str]) -> bool:
            joined = store.check(keys)
            asked.release()
            return joined

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    group._store = Store()  # type: ignore[assignment]
    return asked


async def failure(awaitable: Any) -> str:
    with pytest.raises(TransferError) as caught:
        await awaitable
    return str(caught.value)


def test_a_broadcast_that_never_ends_fails_by_our_own_clock_and_the_next_one_waits_for_its_abort(
    device: RecordedDevice, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort blocks, as NCCL's may. The event loop continues; nothing is received into its memory before its end."""

    async def scenario() -> None:
        pair = Pair(deadline_s=60)
        await pair.connect()
        await pair.transfer(1)
        device.hangs.set()
        network.release.clear()
        pair.set_deadline(0.5)
        late = await asyncio.gather(failure(pair.sender.send(2, 0)), failure(pair.receiver.receive(2, 0)))
        assert "trainer rank 0 could not send version 2" in late[0]
        assert "could not receive version 2 from trainer rank 0 (127.0.0.1:" in late[1]
        await until(lambda: [what for what, _ in network.aborts] == ["begun"] * 2, "both aborts to begin")
        assert {name for _, name in network.aborts} == {"abort"}
        pair.set_deadline(60)
        device.hangs.clear()
        (left,) = pair.receiver._transfers._aborted
        waits, wait = threading.Event(), left.wait

        def seen_wait(timeout: float) -> bool:
            waits.set()
            return wait(timeout)

        monkeypatch.setattr(left, "wait", seen_wait)
        connecting = asyncio.ensure_future(pair.connect())
        await asyncio.to_thread(happened, waits, "connect() to wait for the abort")
        assert pair.receiver._transfers._running is None, "a broadcast may still write to the receiver's memory"
        network.release.set()
        await connecting
        await pair.transfer(3)
        assert pair.held() == 3
        await pair.close()

    asyncio.run(scenario())


def test_a_transfer_is_aborted_immediately_when_a_member_is_lost(device: RecordedDevice, network: Network) -> None:
    """Not at the deadline of ten minutes; tensors received by then do not count."""

    async def scenario() -> None:
        pair = Pair(deadline_s=600)
        await pair.connect()
        device.hangs.set()
        sending = asyncio.ensure_future(failure(pair.sender.send(1, 1)))
        receiving = asyncio.ensure_future(failure(pair.receiver.receive(1, 1)))
        await asyncio.to_thread(happened, network.hanging, "a broadcast that hangs")
        pair.sender.abort("generator 1 is lost")
        pair.receiver.abort("generator 1 is lost")
        for message in await patiently(asyncio.gather(sending, receiving), "both ends to fail"):
            assert message.endswith("the transfer was aborted: generator 1 is lost")
        device.hangs.clear()
        await pair.connect()
        await pair.transfer(2)
        assert pair.held() == 2
        await pair.close()

    asyncio.run(scenario())


def test_an_abort_that_comes_before_its_transfer_is_not_lost(device: RecordedDevice, network: Network) -> None:
    """An end prepares a version before it sends it. Connecting starts anew: earlier aborts no longer count."""

    async def scenario() -> None:
        pair = Pair(deadline_s=600)
        await pair.connect()
        pair.sender.abort("generator 1 is lost")
        begun = len(broadcasts(device))
        assert (await failure(pair.sender.send(1, 1))).endswith("the transfer was aborted: generator 1 is lost")
        assert len(broadcasts(device)) == begun
        assert "before connect()" in await failure(pair.sender.send(1, 1))
        pair.sender.abort("it was lost, as reported before")
        await pair.connect()
        await pair.transfer(2)
        pair.receiver.abort("generator 1 is lost")
        assert "generator 1 is lost" in await failure(pair.receiver.receive(3, 1))
        await pair.connect()
        await pair.transfer(4)
        assert pair.held() == 4
        await pair.close()

    asyncio.run(scenario())


def test_a_member_that_has_not_joined_is_named_and_a_thread_that_waits_for_it_ends(
    device: RecordedDevice, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the deadline, by the thread itself; and immediately once the group is abandoned."""

    async def scenario() -> None:
        pair = Pair(deadline_s=60)
        for end, alone in (("sender", "generator 0 of 1"), ("receiver", "the trainer rank")):
            await pair.connect()
            with monkeypatch.context() as patch:
                patch.setattr(broadcast_group, "_GIVES_UP", 0.01)
                call = pair.sender.send(1, 1) if end == "sender" else pair.receiver.receive(1, 1)
                assert (await failure(call)).endswith(f"{alone} did not join the transfer")
        pair.set_deadline(600)
        await pair.connect()
        (group,) = pair.sender._transfers.groups
        asked = watch_questions(group)
        thread = pair.sender._transfers._thread
        sending = asyncio.ensure_future(failure(pair.sender.send(2, 0)))
        await until(lambda: asked.acquire(blocking=False), "the sender to ask for its members")
        pair.sender.abort("generator 0 is lost")
        assert "generator 0 is lost" in await sending
        await patiently(asyncio.to_thread(thread._executor.shutdown), "the call to end long before its deadline")
        await pair.close()

    asyncio.run(scenario())


def test_a_hanging_connect_is_abandoned_with_its_thread_and_the_next_one_has_another(
    device: RecordedDevice, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group that the hung call creates in the end affects nothing."""

    async def scenario() -> None:
        entered, released, hung = threading.Event(), threading.Event(), list[threading.Thread]()

        def hang(*arguments: Any) -> Any:
            hung.append(threading.current_thread())
            entered.set()
            happened(released, "permission to continue")
            return network.make_group(*arguments)

        pair = Pair(deadline_s=60)
        address = await pair.sender.open()
        with monkeypatch.context() as patch:
            patch.setattr(broadcast_group, "make_group", hang)
            connecting = asyncio.ensure_future(failure(pair.sender.connect([address], 1)))
            await asyncio.to_thread(happened, entered, "connect() to hang")
            pair.sender.abort("generator 0 is lost")
            assert "generator 0 is lost" in await patiently(connecting, "connect() to be abandoned")
        await pair.connect()
        pair.set_deadline(0.1)  # the late group waits for members
        released.set()
        await asyncio.to_thread(join, hung[0])
        pair.set_deadline(60)
        await pair.transfer(1)
        await pair.transfer(2)
        assert pair.held() == 2
        await pair.close()

    asyncio.run(scenario())


def test_a_sender_enqueues_nothing_before_all_receivers_have_joined(device: RecordedDevice, network: Network) -> None:
    """A broadcast that waits for a receiver would be a spinning kernel, and delay others on its device."""

    async def scenario() -> None:
        pair = Pair(deadline_s=60)
        await pair.connect()
        enqueued = len(broadcasts(device))
        train(pair.sender.views(1), 1)
        (group,) = pair.sender._transfers.groups
        asked = watch_questions(group)
        sending = asyncio.ensure_future(pair.sender.send(1, 1))
        for _ in range(3):
            await until(lambda: asked.acquire(blocking=False), "the sender to ask for its members")
            assert len(broadcasts(device)) == enqueued
        await asyncio.gather(sending, pair.receiver.receive(1, 1))
        assert pair.held() == 1
        await pair.close()

    asyncio.run(scenario())


def test_a_group_for_weights_is_made_with_nccls_timeout_out_of_reach_and_its_watchdog_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variables are unchanged for all other groups. NCCL's use of them needs GPUs to test."""
    seen: dict[str, Any] = {}

    class Options:
        def __init__(self) -> None:
            self.config = type("Config", (), {})()

    def make(store: Any, rank: int, size: int, options: Any) -> None:
        seen.update(timeout=options._timeout, ctas=options.config.max_ctas, variables=variables())

    off = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    }

    def variables() -> dict[str, str | None]:
        return {name: broadcast_group.os.environ.get(name) for name in off}

    make.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(broadcast_group.dist, "ProcessGroupNCCL", make, raising=False)
    for before in (None, "7"):
        for name in off:
            if before is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, before)
        store: Any = None
        broadcast_group.make_group(store, 0, 2, torch.device("cuda", 0), broadcast_group.timedelta(seconds=1))
        assert seen["timeout"].days > 30 and seen["variables"] == off
        assert set(variables().values()) == {before}
        assert 1 <= seen["ctas"] <= 8


def map_shared(size: int) -> torch.Tensor:
    """Map the memory as another process does to attach."""
    return torch.ones(size)


def test_device_memory_is_shared_only_on_request_and_not_on_the_training_stream(
    device: RecordedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch retains memory that was shared and never attached; both ends wait for their current stream."""
    from torch.multiprocessing import reductions

    shared: list[int] = []

    def share(tensor: torch.Tensor) -> tuple[Any, tuple[int]]:
        shared.append(tensor.numel())
        device.record("share")
        return map_shared, (tensor.numel(),)

    monkeypatch.setattr(reductions, "reduce_tensor", share)
    held = Area(64, torch.device("meta"))
    assert not shared
    assert held.handle == held.handle and shared == [64]
    assert attach(held.handle) is held.buffer
    monkeypatch.setattr(area, "_made", {})  # as in another process
    with device.recording():
        assert attach(held.handle).sum() == 64
    assert [(r.stream, r.op) for r in device.records[:4]] == [
        ("stream 1", "share"),
        ("stream 1", "synchronize"),
        ("stream 1", "ones"),
        ("stream 1", "synchronize"),
    ]
