"""Builds the sender and receiver of a transport by name; with ``delta``, wraps them to send only changed elements.

The interface is in ``weights/endpoint.py``.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch

from monarch_rl.runtime.streams import on_side_stream
from monarch_rl.weights.delta import DeltaReceiver, DeltaSender, updates_manifest
from monarch_rl.weights.endpoint import Receiver, Sender, TransferSettings, TransportName
from monarch_rl.weights.manifest import Manifest

TRANSPORTS: dict[TransportName, tuple[str, str, str]] = {
    "collective": ("monarch_rl.weights.collective", "CollectiveSender", "CollectiveReceiver"),
    "rdma": ("monarch_rl.weights.rdma", "RdmaSender", "RdmaReceiver"),
    "shared_memory": ("monarch_rl.weights.shared_memory", "SharedMemorySender", "SharedMemoryReceiver"),
}
"""By name: module, sender class, receiver class. Imported on demand."""


def make_sender(manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device) -> Sender:
    """Make the trainer rank's endpoint of the transport in ``settings``; ``host``: this process's address."""
    make: type[Sender] = _find(settings.resolved_transport, 1)
    with on_side_stream(device):  # memory is zeroed before any other use
        if not settings.delta:
            return make(manifest, rank, settings, host, device)
        transport = make(updates_manifest(manifest), rank, _in_small_buckets(settings), host, device)
        return DeltaSender(transport, manifest, rank, device)


def make_receiver(manifest: Manifest, settings: TransferSettings, device: torch.device) -> Receiver:
    """Make the replica's endpoint of the transport in ``settings``."""
    make: type[Receiver] = _find(settings.resolved_transport, 2)
    with on_side_stream(device):  # as in make_sender
        if not settings.delta:
            return make(manifest, settings, device)
        transport = make(updates_manifest(manifest), _in_small_buckets(settings), device)
        return DeltaReceiver(transport, manifest, device)


def _find(name: TransportName, side: int) -> Any:
    names = TRANSPORTS[name]
    return getattr(importlib.import_module(names[0]), names[side])


def _in_small_buckets(settings: TransferSettings) -> TransferSettings:
    # An encoded update is small: reading a whole bucket of 64 MiB for a few bytes would be wasteful.
    return replace(settings, bucket_mib=min(settings.bucket_mib, 4))
