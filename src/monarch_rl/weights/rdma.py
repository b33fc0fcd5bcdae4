"""Transport ``rdma``: every generator replica reads what each trainer rank owns out of its memory, one-sided.

A trainer rank registers two slots of memory once, with Monarch's ``RDMABuffer``: a snapshot is written to one while
the other may still be read. Nobody waits for a reader, so a reader that dies costs the others nothing. Reads go over
ibverbs where the machine has it, else over Monarch's TCP connections, tuned in ``runtime/cluster.py``.

A slot is laid out like the readers' areas wherever what a rank owns is contiguous there: such runs are read straight
into the area. Short ones are read together into a landing buffer and copied to their places.

One-sided reads see whatever lies there. So each slot has a header of its own (version, bytes, state) that is read
before and after the data: a version that is not there, or was written to meanwhile, is an error and never served.
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

from monarch_rl.runtime.deadlines import within
from monarch_rl.weights.area import Area
from monarch_rl.weights.endpoint import SNAPSHOTS, TransferError, TransferSettings
from monarch_rl.weights.manifest import ALIGNMENT, Manifest

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer

T = TypeVar("T")

SILENCE_S = 5
"""Seconds (whole ones) that one read may take. Monarch does not notice a dead owner of memory: reads run into this.
All reads under way of all replicas share an owner's connection: one replica with reads of 64 MiB from two ranks needs
26 MiB/s of each, two replicas twice that. Where there is less, smaller buckets help."""
_IN_FLIGHT = 4
"""Reads of one replica under way at a time, at most; each has a landing buffer."""
_LANDING_BYTES = 16 << 20
"""Bytes of a landing buffer, at most: smaller ones cost more reads, larger ones only memory."""
_DIRECT = 2
"""A run of at least one part in this many of a landing buffer has a read of its own, shorter ones share one. On TCP a
read costs about 2 ms more than its bytes do, in which 16 MB are copied."""
_POLL_S = 0.005

_EMPTY, _WRITING, _READY = range(3)
_STATES = ("empty", "being written", "ready")


def usable() -> str | None:
    """Why this transport cannot work with this process's configuration, or ``None``. Needs no actor."""
    from monarch.rdma import get_rdma_backend

    if get_rdma_backend() != "none":
        return None
    return (
        "transport rdma: this machine has no ibverbs device that Monarch can use, and its fallback to TCP is off "
        "(rdma_allow_tcp_fallback, MONARCH_RDMA_ALLOW_TCP_FALLBACK): allow that or choose another transport"
    )


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are contiguous both in a rank's slot and in an area."""

    slot: int
    """Byte offset in the slot."""
    area: int
    """Byte offset in the area."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """How one trainer rank's slot is laid out and read; both sides compute it from the manifest."""

    shards: tuple[tuple[int, int], ...]
    """Byte offset and bytes of each of the rank's shards in the slot."""
    reads: tuple[tuple[Run, ...], ...]
    """What each read brings: consecutive runs of the slot, the gaps between them included."""
    nbytes: int
    """Bytes of the slot."""


def plan_slot(manifest: Manifest, rank: int, bucket_bytes: int) -> SlotPlan:
    """Lay out trainer rank ``rank``'s slot, and cut it into reads of at most ``bucket_bytes`` (16 or more).

    A byte has the same place modulo :data:`ALIGNMENT` in the slot and in the area, so shards stay aligned.
    """
    shards: list[tuple[int, int]] = []
    runs: list[Run] = []
    after = -1  # where in the area the last run may go on: its end, or past the padding of the tensor it ends with
    for shard in manifest.shards[rank]:
        spec = manifest.tensors[shard.tensor]
        area = spec.offset + shard.start * spec.dtype.itemsize
        nbytes = shard.numel * spec.dtype.itemsize
        if area == after:
            run = runs.pop()
            run = Run(run.slot, run.area, area + nbytes - run.area)
        else:
            end = runs[-1].slot + runs[-1].nbytes if runs else 0
            run = Run(end + (area - end) % ALIGNMENT, area, nbytes)
        runs.append(run)
        shards.append((run.slot + area - run.area, nbytes))
        whole = shard.start + shard.numel == spec.numel
        after = _align(area + nbytes) if whole else area + nbytes
    return SlotPlan(tuple(shards), tuple(_cut(runs, bucket_bytes)), runs[-1].slot + runs[-1].nbytes if runs else 0)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _cut(runs: list[Run], bucket_bytes: int) -> Iterator[tuple[Run, ...]]:
    shared: list[Run] = []
    landing = min(bucket_bytes, _LANDING_BYTES)
    for run in runs:
        if run.nbytes >= landing / _DIRECT:
            for offset in range(0, run.nbytes, bucket_bytes):
                yield (Run(run.slot + offset, run.area + offset, min(bucket_bytes, run.nbytes - offset)),)
            continue
        if shared and run.slot + run.nbytes - shared[0].slot > landing:
            yield tuple(shared)
            shared = []
        shared.append(run)
    if shared:
        yield tuple(shared)


def _span(runs: tuple[Run, ...]) -> tuple[int, int]:
    """First byte of a read in the slot, and bytes."""
    return runs[0].slot, runs[-1].slot + runs[-1].nbytes - runs[0].slot


@dataclass(frozen=True, slots=True)
class _SlotBuffers:
    """One registered slot, as it is sent to those who read it."""

    header: RDMABuffer
    data: tuple[RDMABuffer, ...]
    """One for each read of the plan."""


class RdmaSender:
    """A trainer rank's end: see :class:`monarch_rl.weights.endpoint.Sender`.

    To be used inside an actor, whose process then owns the memory.
    """

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None:
        self._rank = rank
        self._plan = plan_slot(manifest, rank, settings.bucket_bytes)
        self._slots = [torch.zeros(self._plan.nbytes, dtype=torch.uint8, device=device) for _ in range(SNAPSHOTS)]
        self._headers = [torch.tensor([-1, self._plan.nbytes, _EMPTY]) for _ in range(SNAPSHOTS)]
        self._registered: list[_SlotBuffers] = []

    async def open(self) -> bytes:
        """Register the memory, once: whoever joins later is given the same address."""
        if reason := usable():
            raise TransferError(reason)
        if not self._registered:
            self._registered = await asyncio.to_thread(self._register)
        return pickle.dumps(self._registered)

    def _register(self) -> list[_SlotBuffers]:
        from monarch.rdma import RDMABuffer

        reads = [_span(runs) for runs in self._plan.reads]
        return [
            _SlotBuffers(RDMABuffer(header), tuple(RDMABuffer(slot[start : start + n]) for start, n in reads))
            for header, slot in zip(self._headers, self._slots, strict=True)
        ]

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        """Nothing to do: those who read come by themselves."""

    def views(self, slot: int) -> list[torch.Tensor]:
        """Where to write this rank's shards. Ask anew for each snapshot: this marks the slot as being written."""
        self._headers[slot][2] = _WRITING
        return [self._slots[slot][start : start + nbytes] for start, nbytes in self._plan.shards]

    async def send(self, version: int, slot: int, nbytes: int | None = None) -> None:
        """Let the slot be read as ``version``. Does not wait for those who read it."""
        if not self._registered:
            raise TransferError(f"trainer rank {self._rank} sends version {version} before open()")
        header = self._headers[slot]
        header[2] = _WRITING
        header[0], header[1] = version, self._plan.nbytes if nbytes is None else nbytes
        header[2] = _READY

    async def close(self) -> None:
        """Give the memory back. Reads that come later fail."""
        registered, self._registered, self._slots = self._registered, [], []
        for buffers in registered:
            for buffer in (buffers.header, *buffers.data):
                # Monarch keeps the memory until then.
                await within(SILENCE_S, buffer.drop(), "registered memory to be given back", on="Monarch")


class RdmaReceiver:
    """A generator replica's end: see :class:`monarch_rl.weights.endpoint.Receiver`. To be used inside an actor."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None:
        self._settings = settings
        self._areas = [Area(max(1, manifest.nbytes), device) for _ in range(SNAPSHOTS)]
        self._plans = [plan_slot(manifest, rank, settings.bucket_bytes) for rank in range(len(manifest.shards))]
        shared = [_span(runs)[1] for plan in self._plans for runs in plan.reads if len(runs) > 1]
        self._lanes = min(_IN_FLIGHT, max(2, len(self._plans)))
        self._landing = [
            torch.empty(max(shared, default=0), dtype=torch.uint8, device=device) for _ in range(self._lanes)
        ]
        self._headers = [torch.zeros(3, dtype=torch.int64) for _ in self._plans]
        self._owners: list[list[_SlotBuffers]] = []

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        owners: list[list[_SlotBuffers]] = [pickle.loads(address) for address in addresses]
        if len(owners) != len(self._plans):
            raise TransferError(f"{len(owners)} trainer ranks have memory to read, the manifest has {len(self._plans)}")
        for rank, (owner, plan) in enumerate(zip(owners, self._plans, strict=True)):
            expected = [_span(runs)[1] for runs in plan.reads]
            if any([buffer.size() for buffer in slot.data] != expected for slot in owner):
                raise TransferError(f"trainer rank {rank} registered other reads: do manifest and bucket_mib differ?")
        self._owners = owners
        deadline = time.monotonic() + self._settings.deadline_s
        await _all(self._read_header(rank, 0, deadline) for rank in range(len(owners)))

    def area(self, slot: int) -> bytes:
        return self._areas[slot].handle

    async def receive(self, version: int, slot: int) -> list[int]:
        """Read ``version`` from all trainer ranks' ``slot`` into the area of the same number.

        Raises :class:`TransferError` within :data:`SILENCE_S` seconds of the last byte if an owner is dead or stuck.
        Nothing writes to the area any more when this returns or raises, unless it was cancelled.
        """
        if not self._owners:
            raise TransferError(f"version {version} is to be received before connect()")
        deadline = time.monotonic() + self._settings.deadline_s
        ranks = range(len(self._owners))
        sizes = await _all(self._wait_until_ready(rank, version, slot, deadline) for rank in ranks)
        # Ranks take turns, so that reads under way at one time go over the links of several.
        reads = [
            (k, rank)
            for rank in ranks
            for k, runs in enumerate(self._plans[rank].reads)
            if _span(runs)[0] < sizes[rank]
        ]
        queue = iter(sorted(reads))
        await _all(self._read_lane(queue, landing, version, slot, deadline) for landing in self._landing)
        await _all(self._check_unchanged(rank, version, slot, deadline) for rank in ranks)
        return sizes

    async def _wait_until_ready(self, rank: int, version: int, slot: int, deadline: float) -> int:
        """The bytes that are offered."""
        while True:
            found, nbytes, state = await self._read_header(rank, slot, deadline)
            expected = self._plans[rank].nbytes
            if found > version or (found == version and nbytes > expected):
                raise TransferError(
                    f"version {version} of {expected} bytes was to be read from trainer rank {rank}, "
                    f"but version {found} of {nbytes} bytes lies there"
                )
            if found == version and state == _READY:
                return nbytes
            if time.monotonic() > deadline:
                raise TransferError(
                    f"trainer rank {rank} did not offer version {version} in slot {slot} within "
                    f"{self._settings.deadline_s:g} s: version {found} lies there, {_STATES[state]}"
                )
            await asyncio.sleep(_POLL_S)

    async def _read_lane(
        self, queue: Iterator[tuple[int, int]], landing: torch.Tensor, version: int, slot: int, deadline: float
    ) -> None:
        """Do reads from the common queue, one after the other."""
        area = self._areas[slot].buffer
        try:
            for k, rank in queue:
                runs = self._plans[rank].reads[k]
                buffer = self._owners[rank][slot].data[k]
                what = f"version {version} from trainer rank {rank}"
                if len(runs) == 1:
                    await _read(buffer, area[runs[0].area : runs[0].area + runs[0].nbytes], deadline, what)
                else:
                    await _read(buffer, landing[: buffer.size()], deadline, what)
                    await asyncio.to_thread(_unpack, runs, landing, area)
        except TransferError:
            for _ in queue:  # the other lanes finish what they began, and begin nothing more
                pass
            raise

    async def _check_unchanged(self, rank: int, version: int, slot: int, deadline: float) -> None:
        found, _, state = await self._read_header(rank, slot, deadline)
        if (found, state) != (version, _READY):
            raise TransferError(
                f"version {version} of trainer rank {rank} was written to while it was read: "
                f"its slot {slot} now holds version {found}, {_STATES[state]}"
            )

    async def _read_header(self, rank: int, slot: int, deadline: float) -> list[int]:
        header = self._headers[rank]
        what = f"the header of slot {slot} of trainer rank {rank}"
        await _read(self._owners[rank][slot].header, header.view(torch.uint8), deadline, what)
        return header.tolist()

    async def close(self) -> None:
        self._owners, self._areas, self._landing = [], [], []


def _unpack(runs: tuple[Run, ...], landing: torch.Tensor, area: torch.Tensor) -> None:
    for run in runs:
        start = run.slot - runs[0].slot
        area[run.area : run.area + run.nbytes].copy_(landing[start : start + run.nbytes])
    if area.is_cuda:
        torch.cuda.current_stream(area.device).synchronize()


async def _read(buffer: RDMABuffer, into: torch.Tensor, deadline: float, what: str) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TransferError(f"{what}: the deadline of the transfer has passed")
    seconds = max(1, min(SILENCE_S, math.ceil(left)))
    try:
        # Monarch's timeout ends the read itself: it cannot write later to memory that is used again.
        await buffer.read_into(into, timeout=seconds)  # waits: until Monarch's timeout, which holds
    except Exception as error:
        raise TransferError(
            f"could not read {what} within {seconds} s; its process is dead, stuck or has closed, "
            f"or too many bytes are under way (--weights.bucket-mib): {error}"
        ) from error


async def _all(steps: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Await all, whatever happens to some; then raise the first error."""
    done: list[T] = []
    # waits: until each step's own deadline
    for result in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
