"""Sending only what changed (:mod:`monarch_rl.weights.delta`), over any transport that moves bytes.

Stands between a trainer rank or a replica and its transport, which then moves one run of bytes for each trainer rank:
an encoded update, shorter than the shards by what did not change. Both ends keep the version that all receivers have;
in a new meeting they begin with zeros, so that the first version is sent whole.
"""

from __future__ import annotations

import asyncio

import torch

from monarch_rl.weights import delta
from monarch_rl.weights.area import Area, attach
from monarch_rl.weights.endpoint import SNAPSHOTS, Receiver, Sender, TransferError
from monarch_rl.weights.manifest import Manifest, make_manifest, plan_buckets, shard_bytes

BUCKET_BYTES = 4 << 20
"""Looked at at a time: the fastest of 1 to 64 MiB, and the grain in which a replica can read less."""


def updates_manifest(manifest: Manifest) -> Manifest:
    """What the transport moves: for each trainer rank as many bytes as its encoded update can have."""
    sizes = [delta.wire_bound(shard_bytes(manifest, rank), BUCKET_BYTES) for rank in range(len(manifest.shards))]
    names = [f"update of trainer rank {rank}" for rank in range(len(sizes))]
    return make_manifest(
        [(name, (size,), torch.uint8) for name, size in zip(names, sizes, strict=True)],
        [[(name, 0, size)] for name, size in zip(names, sizes, strict=True)],
    )


class ChangesSender:
    """A trainer rank's end: see :class:`monarch_rl.weights.endpoint.Sender`. ``transport`` moves the updates."""

    def __init__(self, transport: Sender, manifest: Manifest, rank: int, device: torch.device) -> None:
        self._transport = transport
        self._sizes = [shard.numel * manifest.tensors[shard.tensor].dtype.itemsize for shard in manifest.shards[rank]]
        self._itemsize = manifest.tensors[0].dtype.itemsize
        self._snapshots = [torch.zeros(sum(self._sizes), dtype=torch.uint8, device=device) for _ in range(SNAPSHOTS)]
        self._known = torch.zeros_like(self._snapshots[0])
        """What all receivers hold. Not a slot: the next snapshot may be written there while this one is sent."""
        self._offered: set[int] = set()
        """Slots of the transport in which an update lies."""

    async def open(self) -> bytes:
        self._known.zero_()
        for slot in range(SNAPSHOTS):
            self._withdraw(slot)
        return await self._transport.open()

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        await self._transport.connect(addresses, receivers)

    def _withdraw(self, slot: int) -> None:
        """A version that is sent again is another update: who reads by itself must not find the one before."""
        if slot in self._offered:
            self._transport.views(slot)

    def views(self, slot: int) -> list[torch.Tensor]:
        self._withdraw(slot)
        return list(self._snapshots[slot].split(self._sizes))

    async def send(self, version: int, slot: int, nbytes: int | None = None) -> None:
        if nbytes is not None:
            raise ValueError("an update is of a whole snapshot")
        (update,) = self._transport.views(slot)
        snapshot = self._snapshots[slot]
        used = await asyncio.to_thread(delta.encode, self._known, snapshot, self._itemsize, BUCKET_BYTES, update)
        self._offered.add(slot)
        await self._transport.send(version, slot, used)
        await asyncio.to_thread(self._known.copy_, snapshot)

    async def close(self) -> None:
        await self._transport.close()


class ChangesReceiver:
    """A replica's end: see :class:`monarch_rl.weights.endpoint.Receiver`. ``transport`` moves the updates."""

    def __init__(self, transport: Receiver, manifest: Manifest, device: torch.device) -> None:
        self._transport = transport
        self._updates = updates_manifest(manifest).tensors
        ranks = range(len(manifest.shards))
        sizes = [shard_bytes(manifest, rank) for rank in ranks]
        self._known = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        # One bucket holds all: the pieces tell where each run of a rank's shards belongs.
        self._pieces = [plan_buckets(manifest, rank, max(1, size), size + 1) for rank, size in enumerate(sizes)]
        self._area = Area(manifest.nbytes, device)

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        for known in self._known:
            known.zero_()
        await self._transport.connect(addresses, position, receivers)

    def area(self, slot: int) -> bytes:
        return self._area.handle

    async def receive(self, version: int, slot: int) -> list[int]:
        received = await self._transport.receive(version, slot)
        arrived = attach(self._transport.area(slot))
        try:
            await asyncio.to_thread(self._apply, arrived, received)
        except delta.DeltaError as error:
            raise TransferError(f"version {version} did not arrive well: {error}") from error
        return received

    def _apply(self, arrived: torch.Tensor, received: list[int]) -> None:
        for update, nbytes, known, buckets in zip(self._updates, received, self._known, self._pieces, strict=True):
            delta.apply(arrived[update.offset : update.offset + nbytes], known)
            for piece in (piece for bucket in buckets for piece in bucket):
                run = known[piece.bucket : piece.bucket + piece.nbytes]
                self._area.buffer[piece.staging : piece.staging + piece.nbytes].copy_(run)
        if arrived.device.type != "cpu":  # the engine's processes read it
            torch.accelerator.synchronize(arrived.device)

    async def close(self) -> None:
        await self._transport.close()
