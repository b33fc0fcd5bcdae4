"""What every transport has: its settings, its two ends, and the errors they raise.

A transport is a pair of classes: a :class:`Sender` for every trainer rank and a :class:`Receiver` for every generator
replica, however many engine ranks the replica has. ``weights/transport.py`` finds them by name. The control plane
(``pipeline/publishing.py``) calls them in this order:

    sender.open()                                 every trainer rank: prepare, return this rank's address
    sender.connect(...), receiver.connect(...)    all at once
    sender.send(version, snapshot), receiver.receive(version, snapshot)      all at once, for each version

A sender has two snapshots (0 and 1) and uses them in turn: the trainer can write one version while the previous one
is still being sent. No end enters a transfer before all have said that they are ready. A transfer that does not end
within the deadline raises where it is awaited. Once a member is lost the others are told to ``abort`` it. When a member
is lost or returns, ``open`` and ``connect`` are called again; the rest of the run is not touched. Decoding goes on
during a transfer: a received version is not yet served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch

from monarch_rl.settings.ranges import FOREVER_S, CheckedSettings, Range
from monarch_rl.weights.manifest import Manifest

TransportName = Literal["auto", "collective", "rdma", "shared_memory"]

SNAPSHOTS = 2
"""Versions under way at a time: one in transfer, one being copied by the trainer."""


@dataclass(frozen=True)
class TransferSettings(CheckedSettings, flags="weights"):
    """How new weights reach the generators."""

    transport: TransportName | None = None
    """`collective` broadcasts from every trainer rank to all replicas: NCCL on GPUs, gloo on CPUs.
    `rdma`: replicas read from the trainer ranks' memory, by ibverbs or over Monarch's TCP connections.
    `shared_memory`, on one host: trainer ranks write a version where engines load it from; on GPUs that is the first
    rank's, and engines read it while decoding stops, so it wants one GPU, or NVLink. `auto` measures,
    at the start and with the run's own model, those that work, and takes the fastest. None is `collective`, or, where
    trainer ranks and replicas share devices, `shared_memory`."""
    bucket_mib: Annotated[int, Range(1, 65_536)] = 64
    """MiB sent at a time. With `collective` each replica holds two buckets beside a version; smaller buckets cost more
    calls. With `delta`, at most 4."""
    delta: bool = False
    """Send only the elements whose bits changed; lossless. Costs up to three more copies of a rank's shards, two more
    versions on a replica, and one pass over every byte; docs/weights.md says when it pays. `shared_memory` sends
    nothing over a network, so there it only costs."""
    deadline_s: Annotated[float, Range(0.1, FOREVER_S)] = 120.0
    """Seconds that one transfer may take before it fails, and 20 for each GB of a version; the old version stays
    served."""
    attempts: Annotated[int, Range(1, 1000)] = 3
    """Times that a version is sent to a replica that answers but could not load it, the last time to it alone. Then
    the replica is removed."""

    @property
    def way(self) -> TransportName:
        """The transport, without one `collective`."""
        return self.transport or "collective"

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mib << 20


class Sender(Protocol):
    """The end of one trainer rank. Methods run on the actor's event loop and must not block it."""

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None: ...

    async def open(self) -> bytes:
        """Prepare to connect; returns the address at which the others reach this rank."""

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        """Connect to all senders (``addresses`` by rank, this rank's included) and ``receivers`` receivers."""

    def views(self, snapshot: int) -> list[torch.Tensor]:
        """Where to write snapshot 0 or 1: one flat uint8 view for each of ``manifest.shards[rank]``, in their order.

        Call it before each write. A snapshot always has the same memory, and the list may be the same one. From this
        call until the next ``send`` of this snapshot, no receiver takes its content for a version.
        """

    async def send(self, version: int, snapshot: int, nbytes: int | None = None) -> None:
        """Send a snapshot as this rank's part of ``version``; with ``nbytes``, only its first bytes.

        Raises TransferError.
        """

    def abort(self, why: str) -> None:
        """End a ``connect`` or ``send`` that other members could hold up: it raises TransferError at once.

        After it, ``open`` and ``connect`` must come again.
        """

    async def close(self) -> None: ...


class Receiver(Protocol):
    """The end of one generator replica. Methods run on the actor's event loop and must not block it."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None: ...

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        """Connect to every sender, as number ``position`` of ``receivers``."""

    def area(self, snapshot: int) -> bytes:
        """Handle of the area (:mod:`monarch_rl.weights.area`) that holds a version received from ``snapshot``."""

    async def receive(self, version: int, snapshot: int) -> list[int]:
        """Return when all of ``version`` is in ``area(snapshot)``: the bytes that each trainer rank sent.

        Raises TransferError; then the area holds nothing of use.
        """

    def abort(self, why: str) -> None:
        """As the sender's, for ``connect`` and ``receive``."""

    async def close(self) -> None: ...


class TransferError(RuntimeError):
    """A transfer failed or brought another version than expected; the area holds nothing of use."""


class StillServing(RuntimeError):
    """A version was not committed; the previous version is still served."""
