"""Transport ``shared_memory``, for one host: a snapshot is taken where the engines load it from.

Trainer rank 0 makes two areas, each for a whole version; the other ranks write their shards into them too. So
"sending" moves nothing: the trainer's snapshot is the one copy between a shard and the area, the engine's commit the
one between the area and a parameter. On GPUs the areas are in rank 0's memory, which the others reach by CUDA IPC.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from pathlib import Path

import torch

from monarch_rl.weights.area import Area, attach
from monarch_rl.weights.endpoint import SNAPSHOTS, TransferError, TransferSettings
from monarch_rl.weights.manifest import Manifest, shard_bytes

POLL_S = 0.0005
"""Between two looks at whether a trainer rank is done: the wait is for a call that is on its way to it."""
NOTHING = -1
"""Instead of a version: this rank's shards are being written."""
NOTES_BYTES = 16
"""At the end of an area, for each trainer rank."""


def this_host() -> str:
    """The same for processes that can share memory: of one boot of one machine, in one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}, boot {boot}, {os.readlink('/proc/self/ns/pid')}"


class _Areas:
    """The two areas as one process sees them. At the end of each stands, by trainer rank, which version it holds and
    how many bytes of the rank's part are of it."""

    def __init__(self, address: bytes, ranks: int) -> None:
        host, self.handles = pickle.loads(address)
        if host != this_host():
            raise TransferError(
                f"transport shared_memory works on one host only: trainer rank 0 is on {host}, this process on "
                f"{this_host()}. Use transport collective or rdma."
            )
        self.buffers = [attach(handle) for handle in self.handles]
        notes = [buffer[-NOTES_BYTES * ranks :].view(torch.int64).view(2, ranks) for buffer in self.buffers]
        self.versions = [note[0] for note in notes]
        self.sizes = [note[1] for note in notes]


class SharedMemorySender:
    """A trainer rank's end: see :class:`monarch_rl.weights.endpoint.Sender`."""

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None:
        self._manifest = manifest
        self._rank = rank
        self._device = device
        self._own: list[Area] = []
        self._areas: _Areas | None = None

    async def open(self) -> bytes:
        """Rank 0's address tells the areas; they stay the same for all meetings."""
        if self._rank == 0 and not self._own:
            size = self._manifest.nbytes + NOTES_BYTES * len(self._manifest.shards)
            self._own = [await asyncio.to_thread(Area, size, self._device) for _ in range(SNAPSHOTS)]
            for area in self._own:
                area.buffer[-NOTES_BYTES * len(self._manifest.shards) :].view(torch.int64).fill_(NOTHING)
        return pickle.dumps((this_host(), [area.handle for area in self._own]))

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        if self._areas is None:
            self._areas = _Areas(addresses[0], len(addresses))

    def views(self, slot: int) -> list[torch.Tensor]:
        areas = self._met()
        areas.versions[slot][self._rank] = NOTHING
        views = []
        for shard in self._manifest.shards[self._rank]:
            spec = self._manifest.tensors[shard.tensor]
            start = spec.offset + shard.start * spec.dtype.itemsize
            views.append(areas.buffers[slot][start : start + shard.numel * spec.dtype.itemsize])
        return views

    async def send(self, version: int, slot: int, nbytes: int | None = None) -> None:
        if self._device.type != "cpu":
            await asyncio.to_thread(torch.accelerator.synchronize, self._device)
        areas = self._met()
        areas.sizes[slot][self._rank] = shard_bytes(self._manifest, self._rank) if nbytes is None else nbytes
        areas.versions[slot][self._rank] = version

    async def close(self) -> None:
        self._areas = None

    def _met(self) -> _Areas:
        if self._areas is None:
            raise TransferError(f"trainer rank {self._rank} has no areas before connect()")
        return self._areas


class SharedMemoryReceiver:
    """A generator replica's end: see :class:`monarch_rl.weights.endpoint.Receiver`."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None:
        self._deadline_s = settings.deadline_s
        self._areas: _Areas | None = None

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        self._areas = _Areas(addresses[0], len(addresses))

    def area(self, slot: int) -> bytes:
        return self._met().handles[slot]

    async def receive(self, version: int, slot: int) -> list[int]:
        """Wait until every trainer rank has said that its part is there."""
        ranks = self._met().versions[slot]
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        while late := [rank for rank, found in enumerate(ranks.tolist()) if found != version]:
            if asyncio.get_running_loop().time() > deadline:
                raise TransferError(
                    f"version {version} is not whole after {self._deadline_s:g} s: the parts of trainer ranks {late} "
                    f"are of versions {[int(ranks[rank]) for rank in late]}"
                )
            await asyncio.sleep(POLL_S)
        return self._met().sizes[slot].tolist()

    async def close(self) -> None:
        self._areas = None

    def _met(self) -> _Areas:
        if self._areas is None:
            raise TransferError("a generator has no areas before connect()")
        return self._areas
