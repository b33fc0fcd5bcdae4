"""Transport ``shared_memory``, for one host: trainer ranks write a snapshot where the engines load it from.

Trainer rank 0 makes two areas, each for a whole version. All ranks write their shards into them, so "sending" moves
nothing: the snapshot copies from shard to area, and the engine's commit copies from area to parameter. On GPUs the
areas are in rank 0's memory, which the other ranks reach by CUDA IPC.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from monarch_rl.runtime.streams import SideThread
from monarch_rl.weights.area import Area, attach
from monarch_rl.weights.endpoint import SNAPSHOTS, TransferError, TransferSettings
from monarch_rl.weights.manifest import Manifest, shard_bytes

POLL_S = 0.0005
"""Seconds between two checks whether a trainer rank has sent. Short: its call is under way at the same time."""
BEING_WRITTEN = -1
"""In place of a version: this rank's shards are being written."""
HEADER_BYTES = 16
"""At the end of an area, for each trainer rank: version and bytes, int64 each."""


def this_host() -> str:
    """An id that is equal for processes that can share memory: one boot of one machine, one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}, boot {boot}, {os.readlink('/proc/self/ns/pid')}"


class _Areas:
    """The two areas as one process maps them. The end of each area says, by trainer rank, which version the rank's part
    holds and how many of its bytes."""

    def __init__(self, address: bytes, ranks: int) -> None:
        host, self.handles = pickle.loads(address)
        if host != this_host():
            raise TransferError(
                f"transport shared_memory works on one host only: trainer rank 0 is on {host}, this process on "
                f"{this_host()}. Use transport collective or rdma."
            )
        self.buffers = [attach(handle) for handle in self.handles]
        headers = [buffer[-HEADER_BYTES * ranks :].view(torch.int64).view(2, ranks) for buffer in self.buffers]
        self.versions = [header[0] for header in headers]
        self.sizes = [header[1] for header in headers]


class SharedMemorySender:
    """The trainer rank's end: see :class:`monarch_rl.weights.endpoint.Sender`."""

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None:
        self._manifest = manifest
        self._rank = rank
        self._device = device
        self._own_areas: list[Area] = []
        self._areas: _Areas | None = None
        self._views: list[list[torch.Tensor]] = []
        """By snapshot."""
        self._thread = SideThread("weights", device)

    async def open(self) -> bytes:
        """Rank 0's address holds the handles of the areas, which stay the same for all later calls."""
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
        """This rank's, in an area."""
        for shard in self._manifest.shards[self._rank]:
            spec = self._manifest.tensors[shard.tensor]
            start = spec.offset + shard.start * spec.dtype.itemsize
            yield buffer[start : start + shard.numel * spec.dtype.itemsize]

    def views(self, snapshot: int) -> list[torch.Tensor]:
        areas = self._connected()
        with self._thread.stream.use():  # before anything else is written
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
        """Nothing to do: this end waits for nobody."""

    async def close(self) -> None:
        self._thread.close()
        self._areas, self._views = None, []

    def _connected(self) -> _Areas:
        if self._areas is None:
            raise TransferError(f"trainer rank {self._rank} has no areas before connect()")
        return self._areas


class SharedMemoryReceiver:
    """The generator replica's end: see :class:`monarch_rl.weights.endpoint.Receiver`."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None:
        self._deadline_s = settings.deadline_s
        self._areas: _Areas | None = None
        self._thread = SideThread("weights", device)

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        self._areas = _Areas(addresses[0], len(addresses))

    def area(self, snapshot: int) -> bytes:
        return self._connected().handles[snapshot]

    async def receive(self, version: int, snapshot: int) -> list[int]:
        """Wait until every trainer rank has marked its part as ``version``."""
        areas = self._connected()
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        while late := {r: v for r, v in enumerate(await self._read(areas.versions[snapshot])) if v != version}:
            if asyncio.get_running_loop().time() > deadline:
                raise TransferError(
                    f"version {version} is not whole after {self._deadline_s:g} s: the parts of trainer ranks "
                    f"{list(late)} are of versions {list(late.values())}"
                )
            await asyncio.sleep(POLL_S)
        return await self._read(areas.sizes[snapshot])

    async def _read(self, numbers: torch.Tensor) -> list[int]:
        return await self._thread.run(numbers.tolist)

    def abort(self, why: str) -> None:
        """Nothing to do: only trainer ranks are waited for, and ``close`` comes when they are lost."""

    async def close(self) -> None:
        self._thread.close()
        self._areas = None

    def _connected(self) -> _Areas:
        if self._areas is None:
            raise TransferError("a generator has no areas before connect()")
        return self._areas
