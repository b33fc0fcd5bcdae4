"""Transport ``shared_memory``, for one host: trainer ranks write snapshots to memory from which the engines load.

Trainer rank 0 makes two areas, each for a whole version. All ranks write their shards into them, so sending moves no
data: the snapshot copies from shard to area, and the engine's commit copies from area to parameter. On GPUs the areas
are in rank 0's memory, which the other ranks reach by CUDA IPC.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from monarch_rl.errors import TransferError
from monarch_rl.runtime.streams import SideThread
from monarch_rl.weights.area import Area, attach
from monarch_rl.weights.manifest import Manifest, shard_bytes
from monarch_rl.weights.transport import SNAPSHOTS, TransferSettings

POLL_S = 0.0005
"""Seconds between two checks whether a trainer rank has sent. Short, because the rank's ``send`` runs concurrently."""
BEING_WRITTEN = -1
"""Stored in place of a version while the rank's shards are being written."""
HEADER_BYTES = 16
"""Bytes per trainer rank at the end of an area: version and number of bytes, int64 each."""


def this_host() -> str:
    """An id that is equal for processes that can share memory: same boot of the same machine, same container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}, boot {boot}, {os.readlink('/proc/self/ns/pid')}"


class _Areas:
    """The two areas as mapped by one process. The end of each area holds, for each trainer rank, the version of its
    shards in the area, and the number of valid bytes."""

    def __init__(self, address: bytes, ranks: int) -> None:
        host, self.handles = pickle.loads(address)
        if host != this_host():
            raise TransferError(
                f"weights.transport shared_memory works on one host only: trainer rank 0 is on {host}, this process on "
                f"{this_host()}. Set weights.transport collective or rdma."
            )
        self.buffers = [attach(handle) for handle in self.handles]
        headers = [buffer[-HEADER_BYTES * ranks :].view(torch.int64).view(2, ranks) for buffer in self.buffers]
        self.versions = [header[0] for header in headers]
        self.sizes = [header[1] for header in headers]


class SharedMemorySender:
    """The trainer rank's endpoint: see :class:`monarch_rl.weights.transport.Sender`."""

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None:
        self._manifest = manifest
        self._rank = rank
        self._device = device
        self._own_areas: list[Area] = []
        self._areas: _Areas | None = None
        self._views: list[list[torch.Tensor]] = []
        """Views of this rank's shards, by snapshot."""
        self._thread = SideThread("weights", device)

    async def open(self) -> bytes:
        """Returns this rank's address. Rank 0's has the handles of the areas, which are the same in all later calls."""
        if self._rank == 0 and not self._own_areas:
            self._own_areas = await self._thread.run(self._make_areas)
        return pickle.dumps((this_host(), [area.handle for area in self._own_areas]))

    def _make_areas(self) -> list[Area]:
        headers = HEADER_BYTES * len(self._manifest.shards)
        areas = [Area(self._manifest.nbytes + headers, self._device) for _ in range(SNAPSHOTS)]
        for area in areas:
            area.buffer[-headers:].view(torch.int64).fill_(BEING_WRITTEN)
        return areas

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        if self._areas is None:
            self._areas = _Areas(addresses[0], len(addresses))
            self._views = [list(self._shards_of(buffer)) for buffer in self._areas.buffers]

    def _shards_of(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Views of this rank's shards in an area."""
        for shard in self._manifest.shards[self._rank]:
            spec = self._manifest.tensors[shard.tensor]
            start = spec.offset + shard.start * spec.dtype.itemsize
            yield buffer[start : start + shard.numel * spec.dtype.itemsize]

    def views(self, snapshot: int) -> list[torch.Tensor]:
        areas = self._connected()
        with self._thread.stream.use():  # done before the caller writes to the snapshot
            areas.versions[snapshot][self._rank] = BEING_WRITTEN
        return self._views[snapshot]

    async def send(self, version: int, snapshot: int, nbytes: int | None = None) -> None:
        areas = self._connected()
        size = shard_bytes(self._manifest, self._rank) if nbytes is None else nbytes
        await self._thread.run(self._mark, areas.sizes[snapshot], areas.versions[snapshot], size, version)

    def _mark(self, sizes: torch.Tensor, versions: torch.Tensor, size: int, version: int) -> None:
        sizes[self._rank] = size
        versions[self._rank] = version

    def abort(self, why: str) -> None:
        """Nothing to do: the sender never waits for others."""

    async def close(self) -> None:
        self._thread.close()
        self._areas, self._views = None, []

    def _connected(self) -> _Areas:
        if self._areas is None:
            raise TransferError(f"trainer rank {self._rank} has no shared memory before connect()")
        return self._areas


class SharedMemoryReceiver:
    """The generator replica's endpoint: see :class:`monarch_rl.weights.transport.Receiver`."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None:
        self._deadline_s = settings.deadline_s
        self._areas: _Areas | None = None
        self._thread = SideThread("weights", device)

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        self._areas = _Areas(addresses[0], len(addresses))

    def area(self, snapshot: int) -> bytes:
        return self._connected().handles[snapshot]

    async def receive(self, version: int, snapshot: int) -> list[int]:
        """Wait until every trainer rank has marked its shards as ``version``."""
        areas = self._connected()
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        while late := {r: v for r, v in enumerate(await self._read(areas.versions[snapshot])) if v != version}:
            if asyncio.get_running_loop().time() > deadline:
                raise TransferError(
                    f"version {version} is incomplete after {self._deadline_s:g} s: the shards of trainer ranks "
                    f"{list(late)} are of versions {list(late.values())}"
                )
            await asyncio.sleep(POLL_S)
        return await self._read(areas.sizes[snapshot])

    async def _read(self, numbers: torch.Tensor) -> list[int]:
        return await self._thread.run(numbers.tolist)

    def abort(self, why: str) -> None:
        """Nothing to do: the receiver waits only for trainer ranks, and is closed when one of them is lost."""

    async def close(self) -> None:
        self._thread.close()
        self._areas = None

    def _connected(self) -> _Areas:
        if self._areas is None:
            raise TransferError("a generator has no shared memory before connect()")
        return self._areas
