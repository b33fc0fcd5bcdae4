"""Transport ``collective``: every trainer rank broadcasts its shards to all generator replicas, in buckets.

Each trainer rank has one process group: that rank (0) and all replicas (1, 2, ...), independent of the trainers' own
world; gloo on CPUs, NCCL on GPUs. A sender holds no more of the model than the snapshots of its own shards; a receiver
holds the arriving version and two buckets. Large shards are received in place, small ones share buckets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from monarch_rl.runtime.store import serve_store
from monarch_rl.weights.area import Area
from monarch_rl.weights.endpoint import SNAPSHOTS, TransferError, TransferSettings
from monarch_rl.weights.manifest import BucketEntry, Manifest, plan_buckets, shard_bytes

T = TypeVar("T")

ALONE_BYTES = 1 << 20
"""A shard of at least this many bytes has a broadcast of its own and is received in place, without a copy. A broadcast
costs about as much as a copy of half a MiB."""
_HEADER = 2
"""int64 values sent before the buckets: version and number of bytes."""


class _Group:
    """A process group outside torch.distributed's world, in which rank 0 broadcasts."""

    def __init__(
        self, store: dist.TCPStore, name: str, rank: int, size: int, device: torch.device, timeout: timedelta
    ) -> None:
        prefixed = dist.PrefixStore(name, store)
        self._store = store
        self._device = device
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, timeout)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0

    def broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start a broadcast; the returned function waits until it is done."""
        work = self._group.broadcast([tensor], self._options)

        def wait() -> None:
            work.wait()  # waits: until the group's timeout
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

        return wait

    def abort(self) -> None:
        """Abort what is under way. Gloo cannot: there it ends when the deadline passes or a peer has gone."""
        if self._device.type == "cuda":
            self._group.abort()


class CollectiveSender:
    """The trainer rank's end: see :class:`monarch_rl.weights.endpoint.Sender`."""

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None:
        self._rank = rank
        self._host = host
        self._device = device
        plan = plan_buckets(manifest, rank, settings.bucket_bytes, ALONE_BYTES)
        self._buckets = [sum(entry.nbytes for entry in bucket) for bucket in plan]
        self._timeout = timedelta(seconds=settings.deadline_s)
        # Buckets are slices of a snapshot: nothing is copied on this side.
        self._snapshots = [
            torch.zeros(shard_bytes(manifest, rank), dtype=torch.uint8, device=device) for _ in range(SNAPSHOTS)
        ]
        self._sizes = [shard.numel * manifest.tensors[shard.tensor].dtype.itemsize for shard in manifest.shards[rank]]
        self._thread = ThreadPoolExecutor(1, "weights")
        self._store: dist.TCPStore | None = None
        self._group: _Group | None = None

    async def open(self) -> bytes:
        self._leave()
        return await self._on_thread(self._open)

    def _open(self) -> bytes:
        self._store = serve_store(self._host, timeout=self._timeout)
        return f"{self._host}:{self._store.port}".encode()

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        def join() -> _Group:
            assert self._store is not None, "open() must come first"
            return _Group(self._store, f"weights/{self._rank}", 0, receivers + 1, self._device, self._timeout)

        self._group = await self._on_thread(join)

    def views(self, snapshot: int) -> list[torch.Tensor]:
        return list(self._snapshots[snapshot].split(self._sizes))

    async def send(self, version: int, snapshot: int, nbytes: int | None = None) -> None:
        if self._group is None:
            raise TransferError(f"trainer rank {self._rank} sends version {version} before connect()")
        failure = ""
        try:
            await self._on_thread(self._send, self._group, version, self._snapshots[snapshot], nbytes)
        except RuntimeError as error:
            failure = str(error)
        if failure:
            # Outside the handler: the error's frames hold the group, and closing its connections informs the others.
            self._leave()
            raise TransferError(f"trainer rank {self._rank} could not send version {version}: {failure}")

    def _send(self, group: _Group, version: int, snapshot: torch.Tensor, nbytes: int | None) -> None:
        remaining = snapshot.numel() if nbytes is None else nbytes
        group.broadcast(torch.tensor([version, remaining], device=snapshot.device))()
        wait_for_previous = None
        for bucket in snapshot.split(self._buckets):
            if remaining <= 0:
                break
            wait = group.broadcast(bucket[:remaining])
            remaining -= bucket.numel()
            if wait_for_previous is not None:
                wait_for_previous()
            wait_for_previous = wait
        if wait_for_previous is not None:
            wait_for_previous()

    async def close(self) -> None:
        self._leave()
        self._thread.shutdown(wait=False)

    def _leave(self) -> None:
        """Close the group, so that its other members fail at once instead of at their deadline.

        A transfer of this rank that hangs in the group ends by its own deadline, on a thread that nobody awaits.
        """
        if self._group is not None:
            self._group.abort()
            self._group = None
            self._thread.shutdown(wait=False)
            self._thread = ThreadPoolExecutor(1, "weights")

    async def _on_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


class CollectiveReceiver:
    """The generator replica's end: see :class:`monarch_rl.weights.endpoint.Receiver`."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None:
        self._manifest = manifest
        self._device = device
        self._settings = settings
        self._timeout = timedelta(seconds=settings.deadline_s)
        # One area for both snapshots: a version is committed before the next one is received.
        self._area = Area(manifest.nbytes, device)
        self._addresses: list[str] = []
        self._position = 0
        self._thread = ThreadPoolExecutor(1, "weights")
        self._groups: list[_Group] = []
        self._plans: list[list[list[BucketEntry]]] = []
        """By trainer rank: its buckets."""
        self._buckets: list[torch.Tensor] = []

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        self._leave()
        self._addresses, self._position = [address.decode() for address in addresses], position
        await self._on_thread(self._join, receivers)

    def _join(self, receivers: int) -> None:
        for rank, address in enumerate(self._addresses):
            host, port = address.rsplit(":", 1)
            store = dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
            group = _Group(store, f"weights/{rank}", 1 + self._position, receivers + 1, self._device, self._timeout)
            self._groups.append(group)
        if not self._plans:
            ranks, size = range(len(self._addresses)), self._settings.bucket_bytes
            self._plans = [plan_buckets(self._manifest, rank, size, ALONE_BYTES) for rank in ranks]
            shared = [bucket for plan in self._plans for bucket in plan if len(bucket) > 1]
            largest = max((sum(entry.nbytes for entry in bucket) for bucket in shared), default=0)
            self._buckets = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def area(self, snapshot: int) -> bytes:
        return self._area.handle

    async def receive(self, version: int, snapshot: int) -> list[int]:
        if not self._groups:
            raise TransferError(f"a generator receives version {version} before connect()")
        failure = ""
        try:
            return await self._on_thread(self._receive, version)
        except RuntimeError as error:
            failure = str(error)
        self._leave()  # outside the handler, for the reason given at the sender
        raise TransferError(failure)

    def _receive(self, version: int) -> list[int]:
        received = []
        for rank, (group, plan) in enumerate(zip(self._groups, self._plans, strict=True)):
            try:
                received.append(self._receive_from(group, plan, version, self._area.buffer))
            except RuntimeError as error:
                sender = f"trainer rank {rank} ({self._addresses[rank]})"
                raise TransferError(f"could not receive version {version} from {sender}: {error}") from error
        return received

    def _receive_from(self, group: _Group, plan: list[list[BucketEntry]], version: int, staging: torch.Tensor) -> int:
        header = torch.zeros(_HEADER, dtype=torch.int64, device=staging.device)
        group.broadcast(header)()
        sent, nbytes = header.tolist()
        expected = sum(entry.nbytes for entries in plan for entry in entries)
        if sent != version or nbytes > expected:
            raise TransferError(f"it sent {nbytes} bytes of version {sent}, expected {expected} of version {version}")
        arriving: list[tuple[list[BucketEntry], torch.Tensor, Callable[[], None]]] = []
        remaining, shared = nbytes, 0
        for entries in plan:
            if remaining <= 0:
                break
            size = sum(entry.nbytes for entry in entries)
            if len(entries) == 1:
                bucket, entries = staging[entries[0].staging :][: min(remaining, size)], []
            else:
                bucket, shared = self._buckets[shared % 2][: min(remaining, size)], shared + 1
            remaining -= size
            # One bucket is unpacked while the next is under way.
            arriving.append((entries, bucket, group.broadcast(bucket)))
            if len(arriving) == 2:
                _unpack(*arriving.pop(0), staging)
        for broadcast in arriving:
            _unpack(*broadcast, staging)
        if self._device.type != "cpu":  # the engine's processes read it next
            torch.accelerator.synchronize(self._device)
        return int(nbytes)

    async def close(self) -> None:
        self._leave()
        self._thread.shutdown(wait=False)

    def _leave(self) -> None:
        """Close all groups: see the sender's."""
        if self._groups:
            for group in self._groups:
                group.abort()
            self._groups = []
            self._thread.shutdown(wait=False)
            self._thread = ThreadPoolExecutor(1, "weights")

    async def _on_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _unpack(entries: list[BucketEntry], bucket: torch.Tensor, wait: Callable[[], None], staging: torch.Tensor) -> None:
    wait()
    for entry in entries:
        run = bucket[entry.bucket : entry.bucket + entry.nbytes]  # shorter where the sent bytes end within it
        staging[entry.staging : entry.staging + run.numel()].copy_(run)
