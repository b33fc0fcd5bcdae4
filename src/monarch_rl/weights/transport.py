"""Transports of weights: their interface, the registry that declares each one, and the settings that choose one.

A transport is a pair of classes: a :class:`Sender` for every trainer rank and a :class:`Receiver` for every generator
replica, however many engine ranks the replica has. Its entry in :data:`TRANSPORTS` names them and declares the memory
that they need and the devices that they support. Memory plans, checks of settings and `auto` read only the entry, so a
new transport is a module with the two classes, and an entry here. This module does not import torch.

The control plane (``pipeline/publishing.py``) calls the two classes in this order:

    sender.open()                                 on every trainer rank: prepare, return this rank's address
    sender.connect(...), receiver.connect(...)    on all concurrently
    sender.send(version, snapshot), receiver.receive(version, snapshot)      on all concurrently, for each version

A sender has two snapshots (0 and 1) and alternates between them, so that the trainer can write one version while the
previous one is still being sent. No sender or receiver starts a transfer before all have reported that they are ready.
A transfer that exceeds the deadline raises where it is awaited. Once a member is lost, the others are told to ``abort``
the transfer. After a member is lost or returns, ``open`` and ``connect`` are called again; the rest of the run is not
affected. Decoding continues during a transfer: a received version is not served yet.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from monarch_rl.settings.cli import NotAFlag
from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range

if TYPE_CHECKING:  # memory plans and checks of settings read this module without torch
    import torch

    from monarch_rl.weights.manifest import Manifest

SNAPSHOTS = 2
"""Versions in flight at a time: one in transfer, one being copied by the trainer."""
DELTA_BUCKET_MIB = 4
"""Largest bucket with ``weights.delta``: encoded updates are small, and reading 64 MiB for a few bytes would be
wasteful."""


@dataclass(frozen=True)
class Transport:
    """Declaration of a transport."""

    module: str
    """Module of its two classes. Imported only in trainer ranks and replicas."""
    sender: str
    """Name of its :class:`Sender` class."""
    receiver: str
    """Name of its :class:`Receiver` class."""
    received_versions: int
    """Versions for which a replica holds memory, besides the weights that it serves."""
    received_buckets: int
    """Maximum number of buckets in the memory of a replica."""
    sends_from_rank_0: bool = False
    """Whether the snapshots of all trainer ranks are in rank 0's memory, which holds :data:`SNAPSHOTS` whole versions.
    Otherwise every rank holds as many snapshots of its own shards."""
    nccl: bool = False
    """Whether on GPUs each trainer rank has an NCCL communicator with all replicas. NCCL does not support two ranks on
    one GPU, so such a transport cannot be used with ``colocate`` there."""
    one_host: bool = False
    """Whether trainer ranks and replicas must be on the same host."""
    gpu_only: bool = False
    """Whether it needs GPUs. On CPUs `auto` skips it, and settings that name it are refused."""


TransportName = Literal["auto", "collective", "rdma", "shared_memory"]
"""``auto``, and the keys of :data:`TRANSPORTS`: the choices of ``weights.transport``."""

TRANSPORTS: dict[TransportName, Transport] = {
    "collective": Transport(
        "monarch_rl.weights.collective",
        "CollectiveSender",
        "CollectiveReceiver",
        received_versions=1,
        received_buckets=2,
        nccl=True,
    ),
    "rdma": Transport(
        "monarch_rl.weights.rdma", "RdmaSender", "RdmaReceiver", received_versions=SNAPSHOTS, received_buckets=4
    ),
    "shared_memory": Transport(
        "monarch_rl.weights.shared_memory",
        "SharedMemorySender",
        "SharedMemoryReceiver",
        received_versions=0,
        received_buckets=0,
        sends_from_rank_0=True,
        one_host=True,
    ),
}
"""All transports, by name. ``auto`` measures them in this order."""


def transports_on(on_gpu: bool) -> list[TransportName]:
    """Names of the transports that work on GPUs, or on CPUs: those that ``auto`` measures there."""
    return [name for name, transport in TRANSPORTS.items() if on_gpu or not transport.gpu_only]


@dataclass(frozen=True)
class TransferSettings(CheckedSettings, flags="weights"):
    """How new weights are published to the generators."""

    transport: TransportName | None = None
    """`collective`: every trainer rank broadcasts to all replicas, by NCCL on GPUs and gloo on CPUs.
    `rdma`: replicas read the trainer ranks' memory, by ibverbs or over Monarch's TCP connections.
    `shared_memory`, on one host only: trainer ranks write each version to memory from which engines load it. On GPUs
    this is memory of the first trainer rank, read while decoding pauses: use it with one GPU, or NVLink. `auto`:
    measures the transports that work at the start, with the run's own model, and uses the fastest. None: `collective`,
    or `shared_memory` if trainer ranks and replicas share devices."""
    bucket_mib: NotAFlag[Annotated[int, Range(1, 65_536)]] = 64
    """MiB sent at a time. With `collective` each replica holds two buckets in addition to a version; smaller buckets
    need more calls. At most 4 with weights.delta."""
    delta: bool = False
    """Send only the elements whose bits changed; lossless. Costs up to three more copies of a rank's shards, two more
    versions on a replica, and one pass over every byte; see docs/weights.md for when it pays off. Of no use with
    `shared_memory`, which sends nothing over a network."""
    deadline_s: NotAFlag[Annotated[float, Range(0.1, FOREVER_S)]] = 120.0
    """Seconds that one transfer may take before it fails, times `patience`, plus 20 per GB of a version. After a
    failure the old version stays served. Under `collective` also the seconds in which all members connect: a replica
    connects to one trainer rank after the other. If NCCL needed 1 to 3 s for each (not measured), 64 ranks would take
    up to 190 s."""
    attempts: NotAFlag[Annotated[int, Range(1, 1000)]] = 3
    """How often a version is sent to a replica that responds but could not load it, times `patience`, the last time to
    this replica alone. Then the replica is removed."""

    @property
    def resolved_transport(self) -> TransportName:
        """The transport's name; `collective` if none is set."""
        return self.transport or "collective"

    @property
    def candidates(self) -> tuple[Transport, ...]:
        """The transports that the run may use: with `auto` all of them, otherwise one."""
        name = self.resolved_transport
        return tuple(TRANSPORTS.values()) if name == "auto" else (TRANSPORTS[name],)

    @property
    def bucket_bytes(self) -> int:
        """Maximum bytes of a bucket."""
        return (min(self.bucket_mib, DELTA_BUCKET_MIB) if self.delta else self.bucket_mib) << 20


class Sender(Protocol):
    """The endpoint of one trainer rank. Methods run on the actor's event loop and must not block it."""

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None: ...

    async def open(self) -> bytes:
        """Prepare to connect; returns this rank's address."""

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        """Connect to all senders (``addresses`` by rank, including this one) and to ``receivers`` receivers."""

    def views(self, snapshot: int) -> list[torch.Tensor]:
        """Memory of snapshot 0 or 1 to write to: one flat uint8 view for each of ``manifest.shards[rank]``, in order.

        Must be called before each write: from this call until the next ``send`` of the snapshot, no receiver accepts
        its content as a version. A snapshot's memory never changes, and the same list may be returned.
        """

    async def send(self, version: int, snapshot: int, nbytes: int | None = None) -> None:
        """Send a snapshot as this rank's part of ``version``; with ``nbytes``, only its first bytes.

        Raises TransferError.
        """

    def abort(self, why: str) -> None:
        """Make a ``connect`` or ``send`` that may wait for other members raise TransferError at once.

        Afterwards ``open`` and ``connect`` must be called again.
        """

    async def close(self) -> None: ...


class Receiver(Protocol):
    """The endpoint of one generator replica. Methods run on the actor's event loop and must not block it."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None: ...

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        """Connect to every sender, as receiver number ``position`` of ``receivers``."""

    def area(self, snapshot: int) -> bytes:
        """Handle of the area (:mod:`monarch_rl.weights.area`) that holds a version received from ``snapshot``."""

    async def receive(self, version: int, snapshot: int) -> list[int]:
        """Wait until all of ``version`` is in ``area(snapshot)``; returns the bytes that each trainer rank sent.

        Raises TransferError; the content of the area is then undefined.
        """

    def abort(self, why: str) -> None:
        """Make a ``connect`` or ``receive`` raise TransferError at once, as for :meth:`Sender.abort`."""

    async def close(self) -> None: ...


def make_sender(manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device) -> Sender:
    """Make the sender of trainer rank ``rank``; with ``settings.delta`` it sends only changed elements.

    Args:
        manifest: the tensors of a version.
        rank: index of the trainer rank.
        settings: settings of the transfer, with a transport other than `auto`.
        host: address of this process's host.
        device: device of the rank's snapshots.
    """
    from monarch_rl.runtime.streams import on_side_stream

    transport = TRANSPORTS[settings.resolved_transport]
    make: type[Sender] = _load(transport.module, transport.sender)
    with on_side_stream(device):  # memory is zeroed before any other use
        if not settings.delta:
            return make(manifest, rank, settings, host, device)
        updates = _load(_DELTA, "updates_manifest")(manifest)
        sender: Sender = _load(_DELTA, "DeltaSender")(
            make(updates, rank, settings, host, device), manifest, rank, device
        )
        return sender


def make_receiver(manifest: Manifest, settings: TransferSettings, device: torch.device) -> Receiver:
    """Make the receiver of a replica; the arguments are those of :func:`make_sender`."""
    from monarch_rl.runtime.streams import on_side_stream

    transport = TRANSPORTS[settings.resolved_transport]
    make: type[Receiver] = _load(transport.module, transport.receiver)
    with on_side_stream(device):  # as in make_sender
        if not settings.delta:
            return make(manifest, settings, device)
        updates = _load(_DELTA, "updates_manifest")(manifest)
        receiver: Receiver = _load(_DELTA, "DeltaReceiver")(make(updates, settings, device), manifest, device)
        return receiver


_DELTA = "monarch_rl.weights.delta"
"""Imported on demand, as transports are: it needs torch, and imports this module."""


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
