"""Transport ``collective``: every trainer rank broadcasts what it owns to all generator ranks, in buckets.

There is one process group for each trainer rank, of that rank (0) and all generator ranks (1, 2, ...), beside
and independent of the trainers' own world: gloo on CPUs, NCCL on GPUs. No rank ever holds more of the model
than its own shards and, on the receiving side, staging and two buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from monarch_rl.weights.manifest import Manifest, Piece, plan_buckets, shard_bytes
from monarch_rl.weights.transport import TransferError, TransferSettings

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
            work.wait()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

        return wait


class CollectiveSender:
    """A trainer rank's end: see :class:`monarch_rl.weights.transport.Sender`."""

    def __init__(self, manifest: Manifest, rank: int, settings: TransferSettings, host: str) -> None:
        self._rank = rank
        self._settings = settings
        self._timeout = timedelta(seconds=settings.deadline_s)
        self._nbytes = shard_bytes(manifest, rank)
        # Port 0 lets the operating system choose a free one, without a race.
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self.address = f"{host}:{self._store.port}"
        self._group: _Group | None = None

    def connect(self, receivers: int, device: torch.device) -> None:
        self._group = _Group(self._store, f"weights/{self._rank}", 0, receivers + 1, device, self._timeout)

    def send(self, version: int, snapshot: torch.Tensor) -> None:
        if self._group is None:
            raise TransferError(f"trainer rank {self._rank} sends version {version} before connect()")
        if snapshot.numel() != self._nbytes:
            raise TransferError(f"the snapshot has {snapshot.numel()} bytes, the manifest says {self._nbytes}")
        try:
            self._group.broadcast(torch.tensor([version, self._nbytes], device=snapshot.device))()
            # Buckets are runs of the snapshot: nothing is copied on this side.
            pending = None
            for bucket in snapshot.split(self._settings.bucket_bytes) if self._nbytes else ():
                started = self._group.broadcast(bucket)
                if pending is not None:
                    pending()
                pending = started
            if pending is not None:
                pending()
        except RuntimeError as error:
            raise TransferError(f"trainer rank {self._rank} could not send version {version}: {error}") from error

    def close(self) -> None:
        self._group = None


class CollectiveReceiver:
    """A generator rank's end: see :class:`monarch_rl.weights.transport.Receiver`."""

    def __init__(self, manifest: Manifest, index: int, addresses: list[str], settings: TransferSettings) -> None:
        self._index = index
        self._addresses = addresses
        self._bucket_bytes = settings.bucket_bytes
        self._timeout = timedelta(seconds=settings.deadline_s)
        self._plans = [plan_buckets(manifest, rank, settings.bucket_bytes) for rank in range(len(addresses))]
        self._groups: list[_Group] = []
        self._buckets: list[torch.Tensor] = []

    def connect(self, receivers: int, device: torch.device) -> None:
        self._groups = []
        for rank, address in enumerate(self._addresses):
            host, port = address.rsplit(":", 1)
            store = dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
            name = f"weights/{rank}"
            self._groups.append(_Group(store, name, 1 + self._index, receivers + 1, device, self._timeout))
        largest = max((sum(p.nbytes for p in bucket) for plan in self._plans for bucket in plan), default=0)
        self._buckets = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]

    def receive(self, version: int, staging: torch.Tensor) -> None:
        if not self._groups:
            raise TransferError(f"generator rank {self._index} receives version {version} before connect()")
        for rank, (group, plan) in enumerate(zip(self._groups, self._plans, strict=True)):
            try:
                self._receive_from(group, plan, version, staging)
            except RuntimeError as error:
                raise TransferError(
                    f"generator rank {self._index} could not receive version {version} "
                    f"from trainer rank {rank} ({self._addresses[rank]}): {error}"
                ) from error

    def _receive_from(self, group: _Group, plan: list[list[Piece]], version: int, staging: torch.Tensor) -> None:
        header = torch.zeros(_HEADER, dtype=torch.int64, device=staging.device)
        group.broadcast(header)()
        expected = [version, sum(piece.nbytes for pieces in plan for piece in pieces)]
        if header.tolist() != expected:
            raise TransferError(f"sent [version, bytes] {header.tolist()}, expected {expected}")
        arriving: list[tuple[list[Piece], torch.Tensor, Callable[[], None]]] = []
        for k, pieces in enumerate(plan):
            bucket = self._buckets[k % 2][: sum(piece.nbytes for piece in pieces)]
            # The other bucket is unpacked while this one is on its way.
            arriving.append((pieces, bucket, group.broadcast(bucket)))
            if len(arriving) == 2:
                _unpack(*arriving.pop(0), staging)
        for entry in arriving:
            _unpack(*entry, staging)

    def close(self) -> None:
        self._groups = []


def _unpack(pieces: list[Piece], bucket: torch.Tensor, wait: Callable[[], None], staging: torch.Tensor) -> None:
    wait()
    for piece in pieces:
        staging[piece.staging : piece.staging + piece.nbytes].copy_(bucket[piece.bucket : piece.bucket + piece.nbytes])
