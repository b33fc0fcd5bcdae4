"""Transport ``collective``: every trainer rank broadcasts its shards to all generator replicas, in buckets.

Each trainer rank has one process group of that rank (0) and all replicas (1, 2, ...), independent of the trainers' own
world; gloo on CPUs, NCCL on GPUs. A sender holds only snapshots of its own shards; a receiver holds the arriving
version and two buckets. Large shards are received in place, small ones share buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from monarch_rl.errors import TransferError
from monarch_rl.runtime.network import serve_store
from monarch_rl.weights.area import Area
from monarch_rl.weights.broadcast_group import BroadcastGroup, Transfers
from monarch_rl.weights.manifest import BucketEntry, Manifest, plan_buckets, shard_bytes
from monarch_rl.weights.transport import SNAPSHOTS, TransferSettings

ALONE_BYTES = 1 << 20
"""A shard of at least this many bytes has its own broadcast and is received in place, without a copy. A broadcast costs
about as much as a copy of half a MiB."""
_HEADER = 2
"""int64 values sent before the buckets: version and number of bytes. When members connect, both are 0."""


class CollectiveSender:
    """The trainer rank's endpoint: see :class:`monarch_rl.weights.transport.Sender`."""

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None:
        self._rank = rank
        self._host = host
        self._device = device
        plan = plan_buckets(manifest, rank, settings.bucket_bytes, ALONE_BYTES)
        self._buckets = [sum(entry.nbytes for entry in bucket) for bucket in plan]
        self._timeout = timedelta(seconds=settings.deadline_s)
        # Buckets are slices of a snapshot: the sender copies nothing.
        self._snapshots = [
            torch.zeros(shard_bytes(manifest, rank), dtype=torch.uint8, device=device) for _ in range(SNAPSHOTS)
        ]
        sizes = [shard.numel * manifest.tensors[shard.tensor].dtype.itemsize for shard in manifest.shards[rank]]
        self._views = [list(snapshot.split(sizes)) for snapshot in self._snapshots]
        self._transfers = Transfers(device, settings.deadline_s, "generators")
        self._store: dist.TCPStore | None = None

    async def open(self) -> bytes:
        self._transfers.leave()  # no need to wait for an abort: broadcasts only read the sender's memory
        return await self._transfers.run(self._open, what="a port for the generators")

    def _open(self) -> bytes:
        self._store = serve_store(self._host, timeout=self._timeout)
        return f"{self._host}:{self._store.port}".encode()

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        what = f"the generators to connect to trainer rank {self._rank}"
        await self._transfers.run(self._join, receivers, what=what)

    def _join(self, receivers: int) -> None:
        assert self._store is not None, "call open() before connect()"
        name, stream, groups = f"weights/{self._rank}", self._transfers.stream, self._transfers.groups
        group = BroadcastGroup(self._store, name, 0, receivers + 1, self._device, stream, self._timeout)
        groups.append(group)
        # NCCL connects at the first broadcast: do it here, not within a transfer's deadline.
        _send(group, self._transfers.until(), torch.zeros(_HEADER, dtype=torch.int64, device=self._device))

    def views(self, snapshot: int) -> list[torch.Tensor]:
        return self._views[snapshot]

    async def send(self, version: int, snapshot: int, nbytes: int | None = None) -> None:
        if not self._transfers.groups:
            raise TransferError(f"trainer rank {self._rank} sends version {version} before connect()")
        what = f"the generators to receive version {version} from trainer rank {self._rank}"
        try:
            await self._transfers.run(self._send, version, self._snapshots[snapshot], nbytes, what=what)
        except TransferError as error:
            raise TransferError(f"trainer rank {self._rank} could not send version {version}: {error}") from None

    def _send(self, version: int, snapshot: torch.Tensor, nbytes: int | None) -> None:
        (group,) = self._transfers.groups
        remaining, buckets = snapshot.numel() if nbytes is None else nbytes, []
        header = torch.tensor([version, remaining], device=snapshot.device)
        for bucket in snapshot.split(self._buckets):
            if remaining <= 0:
                break
            buckets.append(bucket[:remaining])
            remaining -= bucket.numel()
        _send(group, self._transfers.until(), header, *buckets)

    def abort(self, why: str) -> None:
        self._transfers.abort(why)

    async def close(self) -> None:
        self._transfers.close()


def _send(group: BroadcastGroup, until: float, header: torch.Tensor, *buckets: torch.Tensor) -> None:
    """Broadcast a header and the buckets after it; the next bucket is started while one is in flight."""
    group.barrier(until)
    group.broadcast(header)()
    previous: Callable[[], None] | None = None
    for bucket in buckets:
        arrived = group.broadcast(bucket)
        if previous is not None:
            previous()
        previous = arrived
    if previous is not None:
        previous()
    group.finish(until)


class CollectiveReceiver:
    """The generator replica's endpoint: see :class:`monarch_rl.weights.transport.Receiver`."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None:
        self._manifest = manifest
        self._device = device
        self._settings = settings
        self._timeout = timedelta(seconds=settings.deadline_s)
        # One area for both snapshots: a version is committed before the next one is received.
        self._area = Area(manifest.nbytes, device)
        self._addresses: list[str] = []
        self._position = 0
        self._transfers = Transfers(device, settings.deadline_s, "trainer ranks")
        self._plans: list[list[list[BucketEntry]]] = []
        """Buckets of each trainer rank."""
        self._buckets: list[torch.Tensor] = []
        """Two buckets for shards that share them, used alternately."""
        self._sender = ""
        """The trainer rank that is being received from, for messages."""

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        await self._transfers.leave_memory()
        self._addresses, self._position = [address.decode() for address in addresses], position
        what = f"the trainer ranks to connect to generator {position} of {receivers}"
        await self._transfers.run(self._join, receivers, what=what)

    def _join(self, receivers: int) -> None:
        stream, groups, until = self._transfers.stream, self._transfers.groups, self._transfers.until()
        for rank, address in enumerate(self._addresses):
            host, port = address.rsplit(":", 1)
            store = dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
            name, member = f"weights/{rank}", 1 + self._position
            group = BroadcastGroup(store, name, member, receivers + 1, self._device, stream, self._timeout)
            groups.append(group)
            self._receive_header(group, until)
        if not self._plans:
            ranks, size = range(len(self._addresses)), self._settings.bucket_bytes
            self._plans = [plan_buckets(self._manifest, rank, size, ALONE_BYTES) for rank in ranks]
            shared = [bucket for plan in self._plans for bucket in plan if len(bucket) > 1]
            largest = max((sum(entry.nbytes for entry in bucket) for bucket in shared), default=0)
            self._buckets = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def area(self, snapshot: int) -> bytes:
        return self._area.handle

    async def receive(self, version: int, snapshot: int) -> list[int]:
        if not self._transfers.groups:
            raise TransferError(f"a generator receives version {version} before connect()")
        what = f"version {version} from the trainer ranks"
        try:
            return await self._transfers.run(self._receive, version, what=what)
        except TransferError as error:
            raise TransferError(f"could not receive version {version} from {self._sender}: {error}") from None

    def _receive(self, version: int) -> list[int]:
        received, until = [], self._transfers.until()
        for rank, (group, plan) in enumerate(zip(list(self._transfers.groups), self._plans, strict=True)):
            self._sender = f"trainer rank {rank} ({self._addresses[rank]})"
            received.append(self._receive_from(group, until, plan, version))
        return received

    def _receive_header(self, group: BroadcastGroup, until: float) -> list[int]:
        group.barrier(until)
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self._device)
        group.broadcast(header)()
        group.finish(until)
        values: list[int] = header.tolist()
        return values

    def _receive_from(self, group: BroadcastGroup, until: float, plan: list[list[BucketEntry]], version: int) -> int:
        area = self._area.buffer
        sent, nbytes = self._receive_header(group, until)
        expected = sum(entry.nbytes for entries in plan for entry in entries)
        if sent != version or nbytes > expected:
            raise TransferError(
                f"it sent {nbytes} bytes of version {sent}, expected {expected} bytes of version {version}"
            )
        arriving: list[tuple[list[BucketEntry], torch.Tensor, Callable[[], None]]] = []
        remaining, shared = nbytes, 0
        for entries in plan:
            if remaining <= 0:
                break
            size = sum(entry.nbytes for entry in entries)
            if len(entries) == 1:
                bucket, entries = area[entries[0].staging :][: min(remaining, size)], []
            else:
                bucket, shared = self._buckets[shared % 2][: min(remaining, size)], shared + 1
            remaining -= size
            # One bucket is unpacked while the next one is in flight.
            arriving.append((entries, bucket, group.broadcast(bucket)))
            if len(arriving) == 2:
                _unpack(*arriving.pop(0), area)
        for broadcast in arriving:
            _unpack(*broadcast, area)
        group.finish(until)  # other processes (the engine's) read the area next
        return nbytes

    def abort(self, why: str) -> None:
        self._transfers.abort(why)

    async def close(self) -> None:
        self._transfers.close()


def _unpack(entries: list[BucketEntry], bucket: torch.Tensor, arrived: Callable[[], None], area: torch.Tensor) -> None:
    arrived()
    # Slices are shorter than their entries if the sent bytes end within them.
    sources = [bucket[entry.bucket : entry.bucket + entry.nbytes] for entry in entries]
    targets = [area[entry.staging :][: len(source)] for entry, source in zip(entries, sources, strict=True)]
    if sources:
        torch._foreach_copy_(targets, sources)
