"""The interface of a transport: how the bytes of a version get from trainer ranks to staging areas.

A transport is a pair of classes, one for a trainer rank and one for a generator rank, found by name in
:func:`sender_class` and :func:`receiver_class`.
The control plane (``pipeline.py``) calls them in this order, each call on a thread of its own:

    sender = Sender(...)                     every trainer rank; ``sender.address`` is where it can be met
    receiver = Receiver(..., addresses)      every generator rank
    sender.connect(...), receiver.connect(...)         all at once: they meet
    sender.send(version, snapshot), receiver.receive(version, staging)      all at once, for each version

Nobody enters a transfer before all have said that they are ready, and a transfer that does not end within the
deadline raises on every rank. Decoding goes on throughout: staging is not what is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from monarch_rl.weights.manifest import Manifest

TransportName = Literal["collective"]


@dataclass(frozen=True)
class TransferSettings:
    """How new weights reach the generators."""

    transport: TransportName = "collective"
    """`collective` broadcasts from every trainer rank to all generator ranks: NCCL on GPUs, gloo on CPUs."""
    bucket_mib: int = 64
    """MiB sent at a time. Each generator rank holds two buckets beside staging; smaller ones cost more calls."""
    deadline_s: float = 120.0
    """Seconds that one transfer may take before it fails; the old version stays served."""

    def __post_init__(self) -> None:
        if self.bucket_mib < 1:
            raise ValueError(f"bucket_mib must be at least 1 MiB, got {self.bucket_mib}")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be positive, got {self.deadline_s}")

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mib << 20


class Sender(Protocol):
    """One trainer rank's end."""

    address: str
    """``host:port`` that receivers need to meet this sender."""

    def __init__(self, manifest: Manifest, rank: int, settings: TransferSettings, host: str) -> None: ...

    def connect(self, receivers: int, device: torch.device) -> None:
        """Meet all receivers; blocks until they are there or the deadline has passed."""

    def send(self, version: int, snapshot: torch.Tensor) -> None:
        """Send ``snapshot`` (uint8, this rank's shards one after the other) as part of ``version``; blocks."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """One generator rank's end."""

    def __init__(self, manifest: Manifest, index: int, addresses: list[str], settings: TransferSettings) -> None: ...

    def connect(self, receivers: int, device: torch.device) -> None:
        """Meet every sender; blocks until it is there or the deadline has passed."""

    def receive(self, version: int, staging: torch.Tensor) -> None:
        """Fill ``staging`` (uint8, laid out by the manifest) with ``version``; blocks."""

    def close(self) -> None: ...


class TransferError(RuntimeError):
    """A transfer failed or was not of the version that was asked for; staging holds nothing of use."""


def sender_class(name: TransportName) -> type[Sender]:
    """The sender's class of a transport, imported on demand."""
    from monarch_rl.weights import collective

    return {"collective": collective.CollectiveSender}[name]


def receiver_class(name: TransportName) -> type[Receiver]:
    """The receiver's class of a transport, imported on demand."""
    from monarch_rl.weights import collective

    return {"collective": collective.CollectiveReceiver}[name]
