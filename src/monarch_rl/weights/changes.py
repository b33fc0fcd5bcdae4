"""Send only what changed (:mod:`monarch_rl.weights.delta`), over any transport that moves bytes.

These classes wrap a transport. It then moves one tensor of bytes for each trainer rank: the encoded update, which omits
the elements that did not change. Both ends keep the version that all receivers have. After ``connect`` they begin with
zeros, so the first version is sent whole.
"""

from __future__ import annotations

import torch

from monarch_rl.runtime.streams import SideThread
from monarch_rl.weights import delta
from monarch_rl.weights.area import Area, attach
from monarch_rl.weights.endpoint import SNAPSHOTS, Receiver, Sender, TransferError
from monarch_rl.weights.manifest import Manifest, make_manifest, plan_buckets, shard_bytes

BUCKET_BYTES = 4 << 20
"""Bytes compared at a time on a CPU: the fastest of 1 to 64 MiB. A replica saves reads in steps of this size, too."""
DEVICE_BUCKET_BYTES = 64 << 20
"""The same on a device. There the host waits 1 to 5 times a bucket for a number that it needs to go on: 300 times at
most for 4 GB instead of 4,800. Temporary memory is a few times as large. None of this has been measured on a GPU."""


def updates_manifest(manifest: Manifest) -> Manifest:
    """What the transport moves: for each trainer rank, as many bytes as its encoded update can take at most, which is
    with the smallest buckets."""
    sizes = [delta.wire_bound(shard_bytes(manifest, rank), BUCKET_BYTES) for rank in range(len(manifest.shards))]
    names = [f"update of trainer rank {rank}" for rank in range(len(sizes))]
    return make_manifest(
        [(name, (size,), torch.uint8) for name, size in zip(names, sizes, strict=True)],
        [[(name, 0, size)] for name, size in zip(names, sizes, strict=True)],
    )


class ChangesSender:
    """The trainer rank's end: see :class:`monarch_rl.weights.endpoint.Sender`. ``transport`` moves the updates."""

    def __init__(self, transport: Sender, manifest: Manifest, rank: int, device: torch.device) -> None:
        self._transport = transport
        sizes = [shard.numel * manifest.tensors[shard.tensor].dtype.itemsize for shard in manifest.shards[rank]]
        self._itemsize = manifest.tensors[0].dtype.itemsize
        self._snapshots = [torch.zeros(sum(sizes), dtype=torch.uint8, device=device) for _ in range(SNAPSHOTS)]
        self._views = [list(snapshot.split(sizes)) for snapshot in self._snapshots]
        self._bucket_bytes = BUCKET_BYTES if device.type == "cpu" else DEVICE_BUCKET_BYTES
        self._known = torch.zeros_like(self._snapshots[0])
        """The version that all receivers hold. Not a snapshot: the trainer may write the next one there meanwhile."""
        self._offered: set[int] = set()
        """Snapshots of the transport that hold an update."""
        self._thread = SideThread("delta", device)

    async def open(self) -> bytes:
        await self._thread.run(self._known.zero_)
        for snapshot in range(SNAPSHOTS):
            self._withdraw(snapshot)
        return await self._transport.open()

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        await self._transport.connect(addresses, receivers)

    def _withdraw(self, snapshot: int) -> None:
        """Mark the transport's snapshot as being written, so that no receiver reads the previous update from it.

        A version that is sent again is a different update.
        """
        if snapshot in self._offered:
            self._transport.views(snapshot)

    def views(self, snapshot: int) -> list[torch.Tensor]:
        self._withdraw(snapshot)
        return self._views[snapshot]

    async def send(self, version: int, snapshot: int, nbytes: int | None = None) -> None:
        if nbytes is not None:
            raise ValueError("an update covers a whole snapshot: nbytes is not supported")
        (update,) = self._transport.views(snapshot)
        current = self._snapshots[snapshot]
        used = await self._thread.run(delta.encode, self._known, current, self._itemsize, self._bucket_bytes, update)
        self._offered.add(snapshot)
        await self._transport.send(version, snapshot, used)
        await self._thread.run(self._known.copy_, current)

    def abort(self, why: str) -> None:
        self._transport.abort(why)

    async def close(self) -> None:
        self._thread.close()
        await self._transport.close()


class ChangesReceiver:
    """The replica's end: see :class:`monarch_rl.weights.endpoint.Receiver`. ``transport`` moves the updates."""

    def __init__(self, transport: Receiver, manifest: Manifest, device: torch.device) -> None:
        self._transport = transport
        self._updates = updates_manifest(manifest).tensors
        ranks = range(len(manifest.shards))
        sizes = [shard_bytes(manifest, rank) for rank in ranks]
        self._known = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        # One bucket holds all of a rank's shards: its entries say where each shard belongs in the area.
        self._plans = [plan_buckets(manifest, rank, max(1, size), size + 1) for rank, size in enumerate(sizes)]
        self._area = Area(manifest.nbytes, device)
        self._thread = SideThread("delta", device)

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        for known in self._known:
            await self._thread.run(known.zero_)
        await self._transport.connect(addresses, position, receivers)

    def area(self, snapshot: int) -> bytes:
        return self._area.handle

    async def receive(self, version: int, snapshot: int) -> list[int]:
        received = await self._transport.receive(version, snapshot)
        arrived = attach(self._transport.area(snapshot))
        try:
            await self._thread.run(self._apply, arrived, received)
        except delta.DeltaError as error:
            raise TransferError(f"the update to version {version} is damaged: {error}") from error
        return received

    def _apply(self, arrived: torch.Tensor, received: list[int]) -> None:
        for update, nbytes, known, buckets in zip(self._updates, received, self._known, self._plans, strict=True):
            delta.apply(arrived[update.offset : update.offset + nbytes], known)
            entries = [entry for bucket in buckets for entry in bucket]
            runs = [known[entry.bucket : entry.bucket + entry.nbytes] for entry in entries]
            places = [self._area.buffer[entry.staging : entry.staging + entry.nbytes] for entry in entries]
            if runs:  # a rank may own nothing
                torch._foreach_copy_(places, runs)

    def abort(self, why: str) -> None:
        self._transport.abort(why)

    async def close(self) -> None:
        self._thread.close()
        await self._transport.close()
