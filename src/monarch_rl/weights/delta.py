"""Lossless compression of weight updates: send only the elements whose bits changed since the previous version.

An update is split into buckets; each is encoded in its smallest form:

| form | bytes, for n elements of which c changed | smallest when |
|---|---|---|
| same | 0 | c = 0 |
| offsets | 2 c + 4 n / 65536, and c values | c < n / 16 |
| mask | n / 8, and c values | in between |
| dense | n values | nearly all changed |

:func:`encode` and :func:`apply` are vectorised torch, on CPUs and GPUs. They compare and copy bits, so NaNs and -0.0
need no special case. Encoded numbers have the machine's byte order (little-endian on all supported machines).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from monarch_rl.errors import DeltaError, TransferError
from monarch_rl.runtime.streams import SideThread
from monarch_rl.weights.area import Area, attach
from monarch_rl.weights.manifest import INT_OF_SIZE, Manifest, make_manifest, plan_buckets, shard_bytes
from monarch_rl.weights.transport import SNAPSHOTS, Receiver, Sender

_MAGIC = 0x3161746C6564
"""`delta1`, read as a little-endian number."""
_HEADER, _ENTRY = 4, 2
"""Numbers of int64 values: of the header (magic, itemsize, bytes, bytes per bucket), and of the table entry of each
bucket (form, changed elements), which follow it. Then come the buckets' contents, and the bytes after the last full
group of eight elements."""
_SAME, _OFFSETS, _MASK, _DENSE = range(4)
_BLOCK = 1 << 16
"""Elements that a 16-bit offset can address."""
_GATHER_BITS = 0x0102040810204080
"""Multiplying eight bytes of 0 or 1, read as one number, by this moves byte i to bit 56 + i."""


@dataclass(frozen=True, slots=True)
class DeltaStats:
    """Sizes of an encoded update."""

    elements: int
    changed: int
    """Elements whose bits differ from the previous version; up to 7 elements at the end are not counted."""
    wire_bytes: int
    dense_bytes: int

    @property
    def changed_share(self) -> float:
        return self.changed / max(1, self.elements)


class _Layout(NamedTuple):
    """How an update is split. All buckets except the last are full; a tail of under 8 elements is sent unencoded."""

    itemsize: int
    nbytes: int
    bucket: int
    """Bytes of a bucket: a multiple of 64, so that no byte of a mask and no word spans two buckets."""

    @property
    def body(self) -> int:
        return self.nbytes - self.nbytes % (8 * self.itemsize)

    @property
    def starts(self) -> range:
        return range(0, self.body, self.bucket)

    @property
    def payload(self) -> int:
        """Byte offset of the buckets' contents in the encoded update."""
        return 8 * (_HEADER + _ENTRY * len(self.starts))

    def numel(self, start: int) -> int:
        """Elements of the bucket that starts at byte ``start``."""
        return min(self.bucket, self.body - start) // self.itemsize


def wire_bound(nbytes: int, bucket_bytes: int) -> int:
    """Maximum bytes of an encoded update of ``nbytes``: ``nbytes``, a header of 32, and 16 per bucket."""
    return _Layout(1, nbytes, _bucket(bucket_bytes)).payload + nbytes


def encode(previous: torch.Tensor, current: torch.Tensor, itemsize: int, bucket_bytes: int, out: torch.Tensor) -> int:
    """Encode to ``out`` the update that turns ``previous`` into ``current``.

    Args:
        previous: uint8[N], contiguous, its storage offset a multiple of 8.
        current: uint8[N], likewise, on the same device.
        itemsize: bytes per element: 1, 2, 4 or 8.
        bucket_bytes: bytes compared at a time, rounded down to a multiple of 64. Temporary memory is about as large.
        out: uint8, at least ``wire_bound(N, bucket_bytes)``, on the same device, its storage offset a multiple of 8.

    Returns:
        Number of bytes written to ``out``.

    Raises:
        ValueError: sizes, dtypes or devices do not fit together.
    """
    layout = _Layout(itemsize, current.numel(), _bucket(bucket_bytes))
    _check(previous=(previous, layout.nbytes), current=(current, layout.nbytes), itemsize=itemsize)
    bound = wire_bound(layout.nbytes, bucket_bytes)
    if out.dtype != torch.uint8 or out.numel() < bound or out.device != current.device or out.storage_offset() % 8:
        raise ValueError(
            f"out must be at least {bound} uint8 on {current.device}, aligned to 8 bytes: see wire_bound()"
        )
    table = [_MAGIC, itemsize, layout.nbytes, layout.bucket]
    end = layout.payload
    for start in layout.starts:
        stop = start + layout.numel(start) * itemsize
        form, changed, parts = _encode_bucket(previous[start:stop], current[start:stop], itemsize)
        table += [form, changed]
        for part in parts:
            out[end : end + part.numel()].copy_(part)
            padded = end + _aligned(part.numel())
            out[end + part.numel() : padded].zero_()
            end = padded
    tail = layout.nbytes - layout.body
    out[end : end + tail].copy_(current[layout.body :])
    out[: layout.payload].copy_(torch.tensor(table).view(torch.uint8))
    return end + tail


def _encode_bucket(previous: torch.Tensor, current: torch.Tensor, itemsize: int) -> tuple[int, int, list[torch.Tensor]]:
    """Returns the form, the number of changed elements, and the fields to send, in order."""
    elements = current.view(INT_OF_SIZE[itemsize])
    n = elements.numel()
    # Compare whole words of 8 bytes first, because usually most elements are unchanged.
    differs = _differs(previous.view(torch.int64), current.view(torch.int64))
    words = _count(differs)
    if words == 0:
        return _SAME, 0, []
    if words * 16 <= n:
        at, values = _changed_elements(previous, current, differs, itemsize)
        changed = at.numel()
        if _size(_OFFSETS, n, changed, itemsize) < _size(_MASK, n, changed, itemsize):
            counts = torch.bincount(at // _BLOCK, minlength=-(-n // _BLOCK)).to(torch.int32)
            offsets = at.to(torch.int16)  # wraps around to the lower 16 bits
            return _OFFSETS, changed, [counts.view(torch.uint8), offsets.view(torch.uint8), values.view(torch.uint8)]
    mask = _differs(previous.view(INT_OF_SIZE[itemsize]), elements)
    changed = _count(mask)
    if _size(_MASK, n, changed, itemsize) >= n * itemsize:
        return _DENSE, changed, [current]
    return _MASK, changed, [_pack(mask), elements.index_select(0, _nonzero(mask)).view(torch.uint8)]


def _changed_elements(
    previous: torch.Tensor, current: torch.Tensor, differs: torch.Tensor, itemsize: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices (int64, ascending) and new values of the changed elements; ``differs`` marks the words that hold them."""
    dtype, width = INT_OF_SIZE[itemsize], 8 // itemsize
    words = _nonzero(differs)
    old = previous.view(torch.int64).index_select(0, words).view(dtype)
    new = current.view(torch.int64).index_select(0, words).view(dtype)
    among = _nonzero(_differs(old, new))
    return words.index_select(0, among // width) * width + among % width, new.index_select(0, among)


def apply(wire: torch.Tensor, target: torch.Tensor) -> None:
    """Turn ``target``, which holds the previous version, into the current one, in place.

    Args:
        wire: uint8, the bytes that :func:`encode` wrote, its storage offset a multiple of 8.
        target: uint8[N], contiguous, its storage offset a multiple of 8; on the device of ``wire``.

    Raises:
        DeltaError: ``wire`` is damaged or for another size; ``target`` may hold a mix of both versions. Nothing is
            written outside of ``target``. Damaged values of elements are not detected. After a DeltaError ``target``
            must not be patched again: reconnect, so that the next version is sent in full.
        ValueError: dtypes, alignment or devices do not fit together.
    """
    layout, entries = _read_table(wire)
    if layout.nbytes != target.numel():
        raise DeltaError(f"the update is for {layout.nbytes} bytes, the target has {target.numel()}")
    _check(target=(target, layout.nbytes), wire=(wire, wire.numel()), itemsize=layout.itemsize)
    at = layout.payload
    for k, start in enumerate(layout.starts):
        n = layout.numel(start)
        form, changed = entries[k]
        size = _size(form, n, changed, layout.itemsize)
        bucket = target[start : start + n * layout.itemsize]
        try:
            _apply_bucket(form, changed, wire[at : at + size], bucket, layout.itemsize)
        except DeltaError as error:
            raise DeltaError(f"bucket {k + 1} of {len(entries)}: {error}") from None
        at += size
    target[layout.body :].copy_(wire[at:])


def stats(wire: torch.Tensor) -> DeltaStats:
    """Sizes of an update encoded by :func:`encode`. Raises :class:`DeltaError` like :func:`apply`."""
    layout, entries = _read_table(wire)
    changed = sum(count for _, count in entries)
    return DeltaStats(layout.nbytes // layout.itemsize, changed, wire.numel(), layout.nbytes)


def _read_table(wire: torch.Tensor) -> tuple[_Layout, list[tuple[int, int]]]:
    """Layout, and each bucket's form and number of changed elements, checked against the length of ``wire``."""
    header = wire[: 8 * _HEADER]
    magic, itemsize, nbytes, bucket = header.view(torch.int64).tolist() if header.numel() == 8 * _HEADER else [0] * 4
    if magic != _MAGIC or itemsize not in INT_OF_SIZE or nbytes < 0 or bucket <= 0 or bucket % 64:
        raise DeltaError(f"not an encoded update: bad header in {wire.numel()} bytes")
    layout = _Layout(itemsize, nbytes, bucket)
    if wire.numel() < layout.payload:
        raise DeltaError(f"the update is cut off: it has {wire.numel()} bytes, its table alone {layout.payload}")
    table = wire[8 * _HEADER : layout.payload].view(torch.int64).tolist()
    entries = list(zip(table[::2], table[1::2], strict=True))
    expected = layout.payload + nbytes - layout.body
    for k, (start, (form, changed)) in enumerate(zip(layout.starts, entries, strict=True)):
        fits = changed == 0 if form == _SAME else 0 < changed <= layout.numel(start)
        if not _SAME <= form <= _DENSE or not fits:
            raise DeltaError(
                f"bucket {k + 1} of {len(entries)}: invalid encoding {form} with {changed} changed elements"
            )
        expected += _size(form, layout.numel(start), changed, itemsize)
    if wire.numel() != expected:
        raise DeltaError(f"the update has {wire.numel()} bytes, but its table declares {expected}")
    return layout, entries


def _apply_bucket(form: int, changed: int, wire: torch.Tensor, target: torch.Tensor, itemsize: int) -> None:
    dtype = INT_OF_SIZE[itemsize]
    elements = target.view(dtype)
    n = elements.numel()
    if form == _SAME:
        return
    if form == _DENSE:
        target.copy_(wire)
        return
    values_at = wire.numel() - _aligned(changed * itemsize)
    values = wire[values_at : values_at + changed * itemsize].view(dtype)
    if form == _MASK:
        at = _nonzero(_unpack(wire[: n // 8]))
        if at.numel() != changed:
            raise DeltaError(f"the mask has {at.numel()} changed elements, expected {changed}")
        elements.scatter_(0, at, values)
        return
    blocks = -(-n // _BLOCK)
    counts = wire[: 4 * blocks].view(torch.int32).to(torch.int64)
    if int(counts.min()) < 0 or int(counts.sum()) != changed:
        raise DeltaError(f"the counts of its blocks do not add up to {changed} changed elements")
    offsets_at = _aligned(4 * blocks)
    offsets = wire[offsets_at : offsets_at + 2 * changed].view(torch.int16).to(torch.int64) & (_BLOCK - 1)
    block = torch.repeat_interleave(torch.arange(blocks, device=wire.device), counts, output_size=changed)
    at = block * _BLOCK + offsets
    if int(at.max()) >= n:
        raise DeltaError(f"changed element {int(at.max())} is out of range, there are {n} elements")
    elements.scatter_(0, at, values)


def _size(form: int, n: int, changed: int, itemsize: int) -> int:
    """Encoded bytes of a bucket of ``n`` elements; each field is padded to a multiple of 8."""
    values = _aligned(changed * itemsize)
    if form == _OFFSETS:
        return _aligned(4 * -(-n // _BLOCK)) + _aligned(2 * changed) + values
    return {_SAME: 0, _MASK: _aligned(n // 8) + values, _DENSE: n * itemsize}[form]


def _pack(mask: torch.Tensor) -> torch.Tensor:
    """Pack bool[8 k] into uint8[k], the first element in the lowest bit."""
    return ((mask.view(torch.int64) * _GATHER_BITS) >> 56).to(torch.uint8)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_pack`."""
    return _spread_bits(packed.device).index_select(0, packed.to(torch.int32)).view(torch.bool)


# On a CPU, NumPy compares, counts and searches 3 to 10 times faster than torch, on the same memory.


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(a.numpy() != b.numpy()) if a.device.type == "cpu" else a != b


def _count(mask: torch.Tensor) -> int:
    return int(np.count_nonzero(mask.numpy())) if mask.device.type == "cpu" else int(mask.count_nonzero())


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    """int64: indices of the true elements, ascending."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().flatten()


@lru_cache(maxsize=8)
def _spread_bits(device: torch.device) -> torch.Tensor:
    """int64[256]: the eight bits of each byte as eight bytes."""
    bits = torch.arange(256, dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.view(torch.int64).flatten().to(device)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _bucket(bucket_bytes: int) -> int:
    return max(64, bucket_bytes // 64 * 64)


def _check(itemsize: int, **buffers: tuple[torch.Tensor, int]) -> None:
    if itemsize not in INT_OF_SIZE:
        raise ValueError(f"itemsize must be 1, 2, 4 or 8, got {itemsize}")
    device = next(iter(buffers.values()))[0].device
    for name, (buffer, nbytes) in buffers.items():
        if buffer.dtype != torch.uint8 or buffer.shape != (nbytes,) or not buffer.is_contiguous():
            raise ValueError(f"{name} must be a contiguous uint8[{nbytes}], not {buffer.dtype}{list(buffer.shape)}")
        if buffer.device != device:
            raise ValueError(f"{name} is on {buffer.device}, the other buffers on {device}")
        if buffer.storage_offset() % 8:
            raise ValueError(f"{name} begins at byte {buffer.storage_offset()} of its storage, not a multiple of 8")


# -- sender and receiver: encoded updates over any transport that moves bytes -----------------------------------------
# These classes wrap a transport, which then moves one tensor of bytes per trainer rank: the encoded update. Each side
# keeps a copy of the last version that every receiver has. ``open`` (sender) and ``connect`` (receiver) reset it to
# zeros, so the next version is sent in full.

BUCKET_BYTES = 4 << 20
"""Bytes compared at a time on a CPU: the fastest of 1 to 64 MiB. A replica also saves reads in steps of this size."""
DEVICE_BUCKET_BYTES = 64 << 20
"""Bytes compared at a time on a device. There the host synchronises 1 to 5 times per bucket to read a number: for 4 GB
at most 300 times, instead of 4,800 with the CPU's bucket size. Temporary memory is a few times as large. None of this
has been measured on a GPU."""


def updates_manifest(manifest: Manifest) -> Manifest:
    """Manifest of the tensors that the transport moves: for each trainer rank the maximum bytes of its encoded update,
    which occur with the smallest buckets."""
    sizes = [wire_bound(shard_bytes(manifest, rank), BUCKET_BYTES) for rank in range(len(manifest.shards))]
    names = [f"update of trainer rank {rank}" for rank in range(len(sizes))]
    return make_manifest(
        [(name, (size,), torch.uint8) for name, size in zip(names, sizes, strict=True)],
        [[(name, 0, size)] for name, size in zip(names, sizes, strict=True)],
    )


class DeltaSender:
    """A trainer rank's sender of updates, which ``transport`` moves."""

    def __init__(self, transport: Sender, manifest: Manifest, rank: int, device: torch.device) -> None:
        self._transport = transport
        sizes = [shard.numel * manifest.tensors[shard.tensor].dtype.itemsize for shard in manifest.shards[rank]]
        self._itemsize = manifest.tensors[0].dtype.itemsize
        self._snapshots = [torch.zeros(sum(sizes), dtype=torch.uint8, device=device) for _ in range(SNAPSHOTS)]
        self._views = [list(snapshot.split(sizes)) for snapshot in self._snapshots]
        self._bucket_bytes = BUCKET_BYTES if device.type == "cpu" else DEVICE_BUCKET_BYTES
        self._previous = torch.zeros_like(self._snapshots[0])
        """The version that all receivers hold. A separate copy, because the trainer may overwrite a snapshot."""
        self._offered: set[int] = set()
        """Snapshots of the transport that hold an update."""
        self._thread = SideThread("delta", device)

    async def open(self) -> bytes:
        await self._thread.run(self._previous.zero_)
        for snapshot in range(SNAPSHOTS):
            self._withdraw(snapshot)
        return await self._transport.open()

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        await self._transport.connect(addresses, receivers)

    def _withdraw(self, snapshot: int) -> None:
        """Mark the transport's snapshot as being written, so that no receiver reads the previous update from it."""
        # Needed even if the same version is sent again, because that is then a different update.
        if snapshot in self._offered:
            self._transport.views(snapshot)  # views() marks it

    def views(self, snapshot: int) -> list[torch.Tensor]:
        self._withdraw(snapshot)
        return self._views[snapshot]

    async def send(self, version: int, snapshot: int, nbytes: int | None = None) -> None:
        if nbytes is not None:
            raise ValueError("an update covers a whole snapshot: nbytes is not supported")
        (update,) = self._transport.views(snapshot)
        current = self._snapshots[snapshot]
        used = await self._thread.run(encode, self._previous, current, self._itemsize, self._bucket_bytes, update)
        self._offered.add(snapshot)
        await self._transport.send(version, snapshot, used)
        await self._thread.run(self._previous.copy_, current)

    def abort(self, why: str) -> None:
        self._transport.abort(why)

    async def close(self) -> None:
        self._thread.close()
        await self._transport.close()


class DeltaReceiver:
    """A replica's receiver of updates, which ``transport`` moves."""

    def __init__(self, transport: Receiver, manifest: Manifest, device: torch.device) -> None:
        self._transport = transport
        self._updates = updates_manifest(manifest).tensors
        ranks = range(len(manifest.shards))
        sizes = [shard_bytes(manifest, rank) for rank in ranks]
        self._previous = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        # One bucket with all shards of a rank: its entries map each shard to its position in the area.
        self._plans = [plan_buckets(manifest, rank, max(1, size), size + 1) for rank, size in enumerate(sizes)]
        self._area = Area(manifest.nbytes, device)
        self._thread = SideThread("delta", device)

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        for previous in self._previous:
            await self._thread.run(previous.zero_)
        await self._transport.connect(addresses, position, receivers)

    def area(self, snapshot: int) -> bytes:
        return self._area.handle

    async def receive(self, version: int, snapshot: int) -> list[int]:
        received = await self._transport.receive(version, snapshot)
        arrived = attach(self._transport.area(snapshot))
        await self._thread.run(self._apply, version, arrived, received)
        return received

    def _apply(self, version: int, arrived: torch.Tensor, received: list[int]) -> None:
        by_rank = zip(self._updates, received, self._previous, self._plans, strict=True)
        for rank, (update, nbytes, previous, buckets) in enumerate(by_rank):
            try:
                apply(arrived[update.offset : update.offset + nbytes], previous)
            except DeltaError as error:
                raise TransferError(
                    f"the update to version {version} from trainer rank {rank} is corrupt: {error}"
                ) from error
            entries = [entry for bucket in buckets for entry in bucket]
            sources = [previous[entry.bucket : entry.bucket + entry.nbytes] for entry in entries]
            targets = [self._area.buffer[entry.staging : entry.staging + entry.nbytes] for entry in entries]
            if sources:  # a rank may own nothing
                torch._foreach_copy_(targets, sources)

    def abort(self, why: str) -> None:
        self._transport.abort(why)

    async def close(self) -> None:
        self._thread.close()
        await self._transport.close()
