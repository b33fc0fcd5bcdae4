"""Transport ``rdma``: every generator replica reads each trainer rank's shards from its memory, one-sided.

A trainer rank registers the memory of two snapshots once, with Monarch's ``RDMABuffer``: one is written while the other
may still be read. Nothing waits for a reader, so a reader that dies does not delay the others. Reads use ibverbs if the
machine has it, otherwise Monarch's TCP connections, tuned in ``runtime/cluster.py``.

Shards of a rank that are contiguous in the readers' areas are contiguous in the snapshot as well. Long ranges are read
straight into the area; short ones are read together into a landing buffer and copied to their positions.

A one-sided read returns whatever the memory holds. So each snapshot has a header (version, bytes, state) that is read
before and after the data: a version that is missing, or was overwritten meanwhile, is an error and never served.
"""

from __future__ import annotations

import asyncio
import math
import pickle
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from monarch_rl.errors import TransferError
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.streams import SideThread
from monarch_rl.weights.area import Area
from monarch_rl.weights.manifest import ALIGNMENT, Manifest
from monarch_rl.weights.transport import SNAPSHOTS, TransferSettings

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer

T = TypeVar("T")

SILENCE_S = 5
"""Seconds (an integer) that one read may take. Monarch does not notice that the owner of memory has died: reads from it
end by this timeout. All reads of all replicas share the owner's connection: one replica with reads of 64 MiB from two
ranks needs 26 MiB/s from each, two replicas need twice that. With less bandwidth, use smaller buckets."""
_IN_FLIGHT = 4
"""Maximum concurrent reads of one replica; each has a landing buffer."""
_LANDING_BYTES = 16 << 20
"""Maximum bytes of a landing buffer. Smaller ones need more reads, larger ones only take memory."""
_DIRECT = 2
"""A range of at least 1 / this of a landing buffer has its own read; shorter ranges share reads. Over TCP a read costs
about 2 ms besides its bytes, in which 16 MB could be copied."""
_POLL_S = 0.005

_EMPTY, _WRITING, _READY = range(3)
_STATES = ("empty", "being written", "ready")


def usable() -> str | None:
    """Why this transport cannot work with this process's configuration; ``None`` if it can. Needs no actor."""
    from monarch.rdma import get_rdma_backend

    if get_rdma_backend() != "none":
        return None
    return (
        "transport rdma: this machine has no ibverbs device that Monarch can use, and Monarch's fallback to TCP is off "
        "(rdma_allow_tcp_fallback, MONARCH_RDMA_ALLOW_TCP_FALLBACK): enable the fallback or choose another transport"
    )


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes that are contiguous both in a rank's snapshot and in an area."""

    snapshot_offset: int
    """Byte offset in the snapshot."""
    area_offset: int
    """Byte offset in the area."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """Layout of one trainer rank's snapshot, and the reads that fetch it. Both sides compute it from the manifest."""

    shards: tuple[tuple[int, int], ...]
    """Byte offset in the snapshot, and number of bytes, of each of the rank's shards."""
    reads: tuple[tuple[ByteRange, ...], ...]
    """Ranges of each read: consecutive ranges of the snapshot, read together with the gaps between them."""
    nbytes: int
    """Bytes of the snapshot."""


def plan_snapshot(manifest: Manifest, rank: int, bucket_bytes: int) -> SnapshotPlan:
    """Lay out trainer rank ``rank``'s snapshot, and split it into reads of at most ``bucket_bytes`` (16 or more).

    A byte has the same offset modulo :data:`ALIGNMENT` in the snapshot and in the area, so shards stay aligned.
    """
    shards: list[tuple[int, int]] = []
    ranges: list[ByteRange] = []
    next_area = -1  # area offset that would extend the last range: its end, or the end of its last tensor's padding
    for shard in manifest.shards[rank]:
        spec = manifest.tensors[shard.tensor]
        area = spec.offset + shard.start * spec.dtype.itemsize
        nbytes = shard.numel * spec.dtype.itemsize
        if area == next_area:
            part = ranges.pop()
            part = ByteRange(part.snapshot_offset, part.area_offset, area + nbytes - part.area_offset)
        else:
            end = ranges[-1].snapshot_offset + ranges[-1].nbytes if ranges else 0
            part = ByteRange(end + (area - end) % ALIGNMENT, area, nbytes)
        ranges.append(part)
        shards.append((part.snapshot_offset + area - part.area_offset, nbytes))
        ends_tensor = shard.start + shard.numel == spec.numel
        next_area = _align(area + nbytes) if ends_tensor else area + nbytes
    total = ranges[-1].snapshot_offset + ranges[-1].nbytes if ranges else 0
    return SnapshotPlan(tuple(shards), tuple(_cut(ranges, bucket_bytes)), total)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _cut(ranges: list[ByteRange], bucket_bytes: int) -> Iterator[tuple[ByteRange, ...]]:
    shared: list[ByteRange] = []
    landing = min(bucket_bytes, _LANDING_BYTES)
    for part in ranges:
        if part.nbytes >= landing / _DIRECT:
            for offset in range(0, part.nbytes, bucket_bytes):
                nbytes = min(bucket_bytes, part.nbytes - offset)
                yield (ByteRange(part.snapshot_offset + offset, part.area_offset + offset, nbytes),)
            continue
        if shared and part.snapshot_offset + part.nbytes - shared[0].snapshot_offset > landing:
            yield tuple(shared)
            shared = []
        shared.append(part)
    if shared:
        yield tuple(shared)


def _span(ranges: tuple[ByteRange, ...]) -> tuple[int, int]:
    """First byte of a read in the snapshot, and its number of bytes."""
    return ranges[0].snapshot_offset, ranges[-1].snapshot_offset + ranges[-1].nbytes - ranges[0].snapshot_offset


@dataclass(frozen=True, slots=True)
class _SnapshotBuffers:
    """The registered buffers of one snapshot, as they are sent to its readers."""

    header: RDMABuffer
    data: tuple[RDMABuffer, ...]
    """One buffer for each read of the plan."""


class RdmaSender:
    """The trainer rank's endpoint: see :class:`monarch_rl.weights.transport.Sender`.

    Must be used inside an actor, whose process then owns the memory.
    """

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None:
        self._rank = rank
        self._plan = plan_snapshot(manifest, rank, settings.bucket_bytes)
        self._snapshots = [torch.zeros(self._plan.nbytes, dtype=torch.uint8, device=device) for _ in range(SNAPSHOTS)]
        self._views = [
            [memory[start : start + nbytes] for start, nbytes in self._plan.shards] for memory in self._snapshots
        ]
        self._headers = [torch.tensor([-1, self._plan.nbytes, _EMPTY]) for _ in range(SNAPSHOTS)]
        self._registered: list[_SnapshotBuffers] = []

    async def open(self) -> bytes:
        """Register the memory at the first call; receivers that join later get the same address."""
        if reason := usable():
            raise TransferError(reason)
        if not self._registered:
            self._registered = await asyncio.to_thread(self._register)
        return pickle.dumps(self._registered)

    def _register(self) -> list[_SnapshotBuffers]:
        from monarch.rdma import RDMABuffer

        reads = [_span(ranges) for ranges in self._plan.reads]
        return [
            _SnapshotBuffers(RDMABuffer(header), tuple(RDMABuffer(memory[start : start + n]) for start, n in reads))
            for header, memory in zip(self._headers, self._snapshots, strict=True)
        ]

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        """Nothing to do: receivers read on their own."""

    def views(self, snapshot: int) -> list[torch.Tensor]:
        """Memory to write this rank's shards to. Must be called before each write, because it marks the snapshot as
        being written."""
        self._headers[snapshot][2] = _WRITING
        return self._views[snapshot]

    async def send(self, version: int, snapshot: int, nbytes: int | None = None) -> None:
        """Mark the snapshot as readable, as ``version``. Does not wait for its readers."""
        if not self._registered:
            raise TransferError(f"trainer rank {self._rank} sends version {version} before open()")
        header = self._headers[snapshot]
        header[2] = _WRITING
        header[0], header[1] = version, self._plan.nbytes if nbytes is None else nbytes
        header[2] = _READY

    def abort(self, why: str) -> None:
        """Nothing to do: the sender never waits for others."""

    async def close(self) -> None:
        """Unregister the memory. Later reads fail."""
        registered, self._registered, self._snapshots, self._views = self._registered, [], [], []
        for buffers in registered:
            for buffer in (buffers.header, *buffers.data):
                # Monarch references the memory until the buffer is dropped.
                await within(SILENCE_S, buffer.drop(), "registered memory to be released", on="Monarch")


class RdmaReceiver:
    """The generator replica's endpoint: see :class:`monarch_rl.weights.transport.Receiver`. Must be used inside an
    actor."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None:
        self._settings = settings
        self._areas = [Area(max(1, manifest.nbytes), device) for _ in range(SNAPSHOTS)]
        self._plans = [plan_snapshot(manifest, rank, settings.bucket_bytes) for rank in range(len(manifest.shards))]
        shared = [_span(ranges)[1] for plan in self._plans for ranges in plan.reads if len(ranges) > 1]
        self._lanes = min(_IN_FLIGHT, max(2, len(self._plans)))
        self._landing = [
            torch.empty(max(shared, default=0), dtype=torch.uint8, device=device) for _ in range(self._lanes)
        ]
        self._headers = [torch.zeros(3, dtype=torch.int64) for _ in self._plans]
        self._owners: list[list[_SnapshotBuffers]] = []
        self._thread = SideThread("weights", device)

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        owners: list[list[_SnapshotBuffers]] = [pickle.loads(address) for address in addresses]
        if len(owners) != len(self._plans):
            raise TransferError(
                f"{len(owners)} trainer ranks registered memory, but the manifest has {len(self._plans)} ranks"
            )
        for rank, (owner, plan) in enumerate(zip(owners, self._plans, strict=True)):
            expected = [_span(ranges)[1] for ranges in plan.reads]
            if any([buffer.size() for buffer in buffers.data] != expected for buffers in owner):
                raise TransferError(
                    f"trainer rank {rank} registered other reads than this generator expects: its manifest or "
                    "weights.bucket_mib differs"
                )
        self._owners = owners
        deadline = time.monotonic() + self._settings.deadline_s
        await _all(self._read_header(rank, 0, deadline) for rank in range(len(owners)))

    def area(self, snapshot: int) -> bytes:
        return self._areas[snapshot].handle

    async def receive(self, version: int, snapshot: int) -> list[int]:
        """Read ``version`` from ``snapshot`` of all trainer ranks into the area of the same index.

        Raises :class:`TransferError` within :data:`SILENCE_S` seconds after the last byte if an owner is dead or stuck.
        When this returns or raises, nothing writes to the area any more, unless the call was cancelled.
        """
        if not self._owners:
            raise TransferError(f"a generator receives version {version} before connect()")
        deadline = time.monotonic() + self._settings.deadline_s
        ranks = range(len(self._owners))
        sizes = await _all(self._wait_until_ready(rank, version, snapshot, deadline) for rank in ranks)
        # Reads alternate between the ranks, so that concurrent reads use the links of several ranks.
        reads = [
            (k, rank)
            for rank in ranks
            for k, ranges in enumerate(self._plans[rank].reads)
            if _span(ranges)[0] < sizes[rank]
        ]
        queue = iter(sorted(reads))
        await _all(self._read_lane(queue, landing, version, snapshot, deadline) for landing in self._landing)
        await _all(self._check_unchanged(rank, version, snapshot, deadline) for rank in ranks)
        return sizes

    async def _wait_until_ready(self, rank: int, version: int, snapshot: int, deadline: float) -> int:
        """Wait until the rank offers ``version``; returns the number of bytes that it offers."""
        while True:
            offered, nbytes, state = await self._read_header(rank, snapshot, deadline)
            expected = self._plans[rank].nbytes
            if offered > version or (offered == version and nbytes > expected):
                raise TransferError(
                    f"trainer rank {rank} offers version {offered} of {nbytes} bytes, "
                    f"expected version {version} of {expected} bytes"
                )
            if offered == version and state == _READY:
                return nbytes
            if time.monotonic() > deadline:
                raise TransferError(
                    f"trainer rank {rank} did not offer version {version} in snapshot {snapshot} within "
                    f"{self._settings.deadline_s:g} s: it holds version {offered}, {_STATES[state]}"
                )
            await asyncio.sleep(_POLL_S)

    async def _read_lane(
        self, queue: Iterator[tuple[int, int]], landing: torch.Tensor, version: int, snapshot: int, deadline: float
    ) -> None:
        """Take reads from the shared queue, one after the other."""
        area = self._areas[snapshot].buffer
        try:
            for k, rank in queue:
                ranges = self._plans[rank].reads[k]
                buffer = self._owners[rank][snapshot].data[k]
                what = f"version {version} from trainer rank {rank}"
                if len(ranges) == 1:
                    start = ranges[0].area_offset
                    await _read(buffer, area[start : start + ranges[0].nbytes], deadline, what)
                else:
                    await _read(buffer, landing[: buffer.size()], deadline, what)
                    await self._thread.run(_unpack, ranges, landing, area)
        except TransferError:
            for _ in queue:  # empty the queue: the other lanes finish their reads and start no more
                pass
            raise

    async def _check_unchanged(self, rank: int, version: int, snapshot: int, deadline: float) -> None:
        offered, _, state = await self._read_header(rank, snapshot, deadline)
        if (offered, state) != (version, _READY):
            raise TransferError(
                f"version {version} of trainer rank {rank} was overwritten while it was read: "
                f"its snapshot {snapshot} now holds version {offered}, {_STATES[state]}"
            )

    async def _read_header(self, rank: int, snapshot: int, deadline: float) -> list[int]:
        header = self._headers[rank]
        what = f"the header of snapshot {snapshot} of trainer rank {rank}"
        await _read(self._owners[rank][snapshot].header, header.view(torch.uint8), deadline, what)
        return header.tolist()

    def abort(self, why: str) -> None:
        """Nothing to do: no other replica can delay a read, and a read from a lost owner ends by its timeout."""

    async def close(self) -> None:
        self._thread.close()
        self._owners, self._areas, self._landing = [], [], []


def _unpack(ranges: tuple[ByteRange, ...], landing: torch.Tensor, area: torch.Tensor) -> None:
    for part in ranges:
        start = part.snapshot_offset - ranges[0].snapshot_offset
        area[part.area_offset : part.area_offset + part.nbytes].copy_(landing[start : start + part.nbytes])


async def _read(buffer: RDMABuffer, into: torch.Tensor, deadline: float, what: str) -> None:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TransferError(f"{what}: the deadline of the transfer has passed")
    seconds = max(1, min(SILENCE_S, math.ceil(remaining_s)))
    try:
        # Monarch's timeout ends the read itself, so that it cannot write later to memory that has been reused.
        await buffer.read_into(into, timeout=seconds)  # waits: until Monarch's timeout, which holds
    except Exception as error:
        raise TransferError(
            f"could not read {what} within {seconds} s: its process is dead, stuck or closed, "
            f"or too many bytes are in flight (reduce TransferSettings.bucket_mib): {error}"
        ) from error


async def _all(steps: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Await all, even if some fail; then raise the first error, or return the results in order."""
    results: list[T] = []
    # waits: until each step's own deadline
    for result in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results
