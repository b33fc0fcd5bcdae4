"""Transport ``collective``: every trainer rank broadcasts what it owns to all generator replicas, in buckets.

There is one process group for each trainer rank, of that rank (0) and all replicas (1, 2, ...), beside
and independent of the trainers' own world: gloo on CPUs, NCCL on GPUs. No rank ever holds more of the model
than its own shards' snapshots and, on the receiving side, the version that arrives and two buckets. Large shards
arrive where they belong, small ones share buckets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from monarch_rl.weights.area import Area
from monarch_rl.weights.endpoint import SNAPSHOTS, TransferError, TransferSettings
from monarch_rl.weights.manifest import Manifest, Piece, plan_buckets, shard_bytes

T = TypeVar("T")

ALONE_BYTES = 1 << 20
"""A shard of so many bytes travels by itself and arrives where it belongs, without a copy; a broadcast costs about as
much as a copy of half a MiB."""
_HEADER = 2
"""int64 values sent ahead of the buckets: the version and the number of bytes."""


class _Group:
    """A process group outside torch.distributed's world: rank 0 broadcasts to the others."""

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
        """Give up whatever is under way. Gloo cannot: there it ends when the deadline passes or a peer is gone."""
        if self._device.type == "cuda":
            self._group.abort()


class CollectiveSender:
    """A trainer rank's end: see :class:`monarch_rl.weights.endpoint.Sender`."""

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None:
        self._rank = rank
        self._host = host
        self._device = device
        plan = plan_buckets(manifest, rank, settings.bucket_bytes, ALONE_BYTES)
        self._buckets = [sum(piece.nbytes for piece in pieces) for pieces in plan]
        self._timeout = timedelta(seconds=settings.deadline_s)
        # Buckets are runs of a snapshot: nothing is copied on this side.
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
        # Port 0 lets the operating system choose a free one, without a race.
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return f"{self._host}:{self._store.port}".encode()

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        def meet() -> _Group:
            assert self._store is not None, "open() must come first"
            return _Group(self._store, f"weights/{self._rank}", 0, receivers + 1, self._device, self._timeout)

        self._group = await self._on_thread(meet)

    def views(self, slot: int) -> list[torch.Tensor]:
        return list(self._snapshots[slot].split(self._sizes))

    async def send(self, version: int, slot: int, nbytes: int | None = None) -> None:
        if self._group is None:
            raise TransferError(f"trainer rank {self._rank} sends version {version} before connect()")
        failure = ""
        try:
            await self._on_thread(self._send, self._group, version, self._snapshots[slot], nbytes)
        except RuntimeError as error:
            failure = str(error)
        if failure:
            # Not inside the handler: the error's frames hold the group, and its connections tell the others.
            self._leave()
            raise TransferError(f"trainer rank {self._rank} could not send version {version}: {failure}")

    def _send(self, group: _Group, version: int, snapshot: torch.Tensor, nbytes: int | None) -> None:
        left = snapshot.numel() if nbytes is None else nbytes
        group.broadcast(torch.tensor([version, left], device=snapshot.device))()
        pending = None
        for bucket in snapshot.split(self._buckets):
            if left <= 0:
                break
            started = group.broadcast(bucket[:left])
            left -= bucket.numel()
            if pending is not None:
                pending()
            pending = started
        if pending is not None:
            pending()

    async def close(self) -> None:
        self._leave()
        self._thread.shutdown(wait=False)

    def _leave(self) -> None:
        """Give up the group, so that whoever waits in it hears of it at once.

        A transfer of our own that hangs in it ends by its own deadline, on a thread nobody waits for.
        """
        if self._group is not None:
            self._group.abort()
            self._group = None
            self._thread.shutdown(wait=False)
            self._thread = ThreadPoolExecutor(1, "weights")

    async def _on_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


class CollectiveReceiver:
    """A generator replica's end: see :class:`monarch_rl.weights.endpoint.Receiver`."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None:
        self._manifest = manifest
        self._device = device
        self._settings = settings
        self._timeout = timedelta(seconds=settings.deadline_s)
        # One for both slots: a version is committed before the next one is received.
        self._area = Area(manifest.nbytes, device)
        self._addresses: list[str] = []
        self._position = 0
        self._thread = ThreadPoolExecutor(1, "weights")
        self._groups: list[_Group] = []
        self._plans: list[list[list[Piece]]] = []
        self._buckets: list[torch.Tensor] = []

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        self._leave()
        self._addresses, self._position = [address.decode() for address in addresses], position
        await self._on_thread(self._meet, receivers)

    def _meet(self, receivers: int) -> None:
        for rank, address in enumerate(self._addresses):
            host, port = address.rsplit(":", 1)
            store = dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
            group = _Group(store, f"weights/{rank}", 1 + self._position, receivers + 1, self._device, self._timeout)
            self._groups.append(group)
        if not self._plans:
            ranks, size = range(len(self._addresses)), self._settings.bucket_bytes
            self._plans = [plan_buckets(self._manifest, rank, size, ALONE_BYTES) for rank in ranks]
            shared = [pieces for plan in self._plans for pieces in plan if len(pieces) > 1]
            largest = max((sum(piece.nbytes for piece in pieces) for pieces in shared), default=0)
            self._buckets = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def area(self, slot: int) -> bytes:
        return self._area.handle

    async def receive(self, version: int, slot: int) -> list[int]:
        if not self._groups:
            raise TransferError(f"a generator receives version {version} before connect()")
        failure = ""
        try:
            return await self._on_thread(self._receive, version)
        except RuntimeError as error:
            failure = str(error)
        self._leave()  # as the sender
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

    def _receive_from(self, group: _Group, plan: list[list[Piece]], version: int, staging: torch.Tensor) -> int:
        header = torch.zeros(_HEADER, dtype=torch.int64, device=staging.device)
        group.broadcast(header)()
        sent, nbytes = header.tolist()
        most = sum(piece.nbytes for pieces in plan for piece in pieces)
        if sent != version or nbytes > most:
            raise TransferError(f"it sent {nbytes} bytes of version {sent}, expected {most} of version {version}")
        arriving: list[tuple[list[Piece], torch.Tensor, Callable[[], None]]] = []
        left, shared = nbytes, 0
        for pieces in plan:
            if left <= 0:
                break
            size = sum(piece.nbytes for piece in pieces)
            if len(pieces) == 1:
                bucket, pieces = staging[pieces[0].staging :][: min(left, size)], []
            else:
                bucket, shared = self._buckets[shared % 2][: min(left, size)], shared + 1
            left -= size
            # One bucket is unpacked while the next is on its way.
            arriving.append((pieces, bucket, group.broadcast(bucket)))
            if len(arriving) == 2:
                _unpack(*arriving.pop(0), staging)
        for entry in arriving:
            _unpack(*entry, staging)
        if self._device.type != "cpu":  # the engine's processes read it
            torch.accelerator.synchronize(self._device)
        return int(nbytes)

    async def close(self) -> None:
        self._leave()
        self._thread.shutdown(wait=False)

    def _leave(self) -> None:
        """As the sender's."""
        if self._groups:
            for group in self._groups:
                group.abort()
            self._groups = []
            self._thread.shutdown(wait=False)
            self._thread = ThreadPoolExecutor(1, "weights")

    async def _on_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def _unpack(pieces: list[Piece], bucket: torch.Tensor, wait: Callable[[], None], staging: torch.Tensor) -> None:
    wait()
    for piece in pieces:
        run = bucket[piece.bucket : piece.bucket + piece.nbytes]  # shorter, if what is sent ends within
        staging[piece.staging : piece.staging + run.numel()].copy_(run)
