"""The interface of all transports: settings, sender, receiver, and the errors that they raise.

A transport is a pair of classes: a :class:`Sender` for every trainer rank and a :class:`Receiver` for every generator
replica, however many engine ranks the replica has. ``weights/transport.py`` finds them by name. The control plane
(``pipeline/publishing.py``) calls them in this order:

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

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch

from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range
from monarch_rl.weights.manifest import Manifest

TransportName = Literal["auto", "collective", "rdma", "shared_memory"]

SNAPSHOTS = 2
"""Versions in flight at a time: one in transfer, one being copied by the trainer."""


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
    bucket_mib: Annotated[int, Range(1, 65_536)] = 64
    """MiB sent at a time. With `collective` each replica holds two buckets in addition to a version; smaller buckets
    need more calls. At most 4 with weights.delta."""
    delta: bool = False
    """Send only the elements whose bits changed; lossless. Costs up to three more copies of a rank's shards, two more
    versions on a replica, and one pass over every byte; see docs/weights.md for when it pays off. Of no use with
    `shared_memory`, which sends nothing over a network."""
    deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 120.0
    """Seconds that one transfer may take before it fails, plus 20 per GB of a version. After a failure the old version
    stays served."""
    attempts: Annotated[int, Range(1, 1000)] = 3
    """How often a version is sent to a replica that responds but could not load it, the last time to this replica
    alone. Then the replica is removed."""

    @property
    def resolved_transport(self) -> TransportName:
        """The transport's name; `collective` if none is set."""
        return self.transport or "collective"

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mib << 20


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
