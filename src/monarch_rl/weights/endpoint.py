"""What every transport has: its settings, its two ends, and the errors they raise.

A transport is a pair of classes: a :class:`Sender` for every trainer rank and a :class:`Receiver` for every generator
replica, however many engine ranks the replica has. ``weights/transport.py`` finds them by name. The control plane
(``pipeline/publishing.py``) calls them in this order:

    sender.open()                                 every trainer rank: prepare, return this rank's address
    sender.connect(...), receiver.connect(...)    all at once
    sender.send(version, snapshot), receiver.receive(version, snapshot)      all at once, for each version

A sender has two snapshots (0 and 1) and uses them in turn: the trainer can write one version while the previous one
is still being sent. No end enters a transfer before all have said that they are ready. A transfer that does not end
within the deadline raises where it is awaited. When a member is lost or returns, ``open`` and ``connect`` are called
again; the rest of the run is not touched. Decoding goes on during a transfer: a received version is not yet served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from monarch_rl.weights.manifest import Manifest

TransportName = Literal["auto", "collective", "rdma", "shared_memory"]

SNAPSHOTS = 2
"""Versions that can be on their way: one in transfer, one being copied by the trainer."""


@dataclass(frozen=True)
class TransferSettings:
    """How new weights reach the generators."""

    transport: TransportName = "collective"
    """`collective` broadcasts from every trainer rank to all replicas: NCCL on GPUs, gloo on CPUs.
    `rdma`: replicas read out of the trainer ranks' memory, by ibverbs, or over Monarch's TCP connections.
    `shared_memory`, on one host: trainer ranks write a version where engines load it from. `auto` measures those that
    work with the run's own model at the start, and takes the fastest."""
    bucket_mib: int = 64
    """MiB sent at a time. With `collective` each replica holds two buckets beside a version; smaller ones cost more
    calls. With `delta`, at most 4."""
    delta: bool = False
    """Send only the elements whose bits changed, found and put back without loss. Costs up to three more copies of a
    rank's shards, two more versions on a replica, and a look at every byte; docs/weights.md says when it pays.
    `shared_memory` has no way to save on: there it only costs."""
    deadline_s: float = 120.0
    """Seconds that one transfer may take before it fails; the old version stays served."""
    attempts: int = 3
    """Times that a version is sent to a replica that answers and could not take it, the last time to it alone; then the
    replica is given up."""

    def __post_init__(self) -> None:
        if self.transport not in get_args(TransportName):
            raise ValueError(f"transport must be one of {', '.join(get_args(TransportName))}, got {self.transport!r}")
        if self.bucket_mib < 1:
            raise ValueError(f"bucket_mib must be at least 1 MiB, got {self.bucket_mib}")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be positive, got {self.deadline_s}")
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mib << 20


class Sender(Protocol):
    """One trainer rank's end. Methods run on the actor's event loop and must not block it."""

    def __init__(
        self, manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device
    ) -> None: ...

    async def open(self) -> bytes:
        """Prepare a meeting; the address under which others find this rank there."""

    async def connect(self, addresses: list[bytes], receivers: int) -> None:
        """Meet all senders (``addresses`` by rank, this one's too) and ``receivers`` receivers."""

    def views(self, slot: int) -> list[torch.Tensor]:
        """Where a snapshot goes: one flat uint8 view for each of ``manifest.shards[rank]``, in their order.

        Called before each snapshot, always the same memory for a slot: until the next ``send`` nobody takes what lies
        there for a version.
        """

    async def send(self, version: int, slot: int, nbytes: int | None = None) -> None:
        """Send the snapshot in ``slot`` as this rank's part of ``version``; with ``nbytes`` only its first bytes."""

    async def close(self) -> None: ...


class Receiver(Protocol):
    """One generator replica's end. Methods run on the actor's event loop and must not block it."""

    def __init__(self, manifest: Manifest, settings: TransferSettings, device: torch.device) -> None: ...

    async def connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        """Meet every sender, as number ``position`` of ``receivers``."""

    def area(self, slot: int) -> bytes:
        """Handle of the area (:mod:`monarch_rl.weights.area`) in which a version received from ``slot`` lies."""

    async def receive(self, version: int, slot: int) -> list[int]:
        """Return when all of ``version`` lies in ``area(slot)``: the bytes that each trainer rank sent.

        Raises TransferError; then nothing of use lies there.
        """

    async def close(self) -> None: ...


class TransferError(RuntimeError):
    """A transfer failed or was not of the version that was asked for; the area holds nothing of use."""


class StillServing(RuntimeError):
    """A version was not committed, and the one before is served on."""
