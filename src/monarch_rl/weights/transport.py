"""Build the two ends of a transport by its name; with ``delta``, let it send only what changed.

The interface is in ``weights/endpoint.py``.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch

from monarch_rl.runtime.streams import on_side_stream
from monarch_rl.weights.delta import ChangesReceiver, ChangesSender, updates_manifest
from monarch_rl.weights.endpoint import Receiver, Sender, TransferSettings, TransportName
from monarch_rl.weights.manifest import Manifest

TRANSPORTS: dict[TransportName, tuple[str, str, str]] = {
    "collective": ("monarch_rl.weights.collective", "CollectiveSender", "CollectiveReceiver"),
    "rdma": ("monarch_rl.weights.rdma", "RdmaSender", "RdmaReceiver"),
    "shared_memory": ("monarch_rl.weights.shared_memory", "SharedMemorySender", "SharedMemoryReceiver"),
}
"""By name: module, class of the sender, class of the receiver. Imported on demand."""


def make_sender(manifest: Manifest, rank: int, settings: TransferSettings, host: str, device: torch.device) -> Sender:
    """Make the trainer rank's end of the transport in ``settings``. ``host``: where others reach this process."""
    make: type[Sender] = _find(settings.way, 1)
    with on_side_stream(device):  # memory is filled with zeros before anything else is done with it
        if not settings.delta:
            return make(manifest, rank, settings, host, device)
        transport = make(updates_manifest(manifest), rank, _in_small_buckets(settings), host, device)
        return ChangesSender(transport, manifest, rank, device)


def make_receiver(manifest: Manifest, settings: TransferSettings, device: torch.device) -> Receiver:
    """Make the replica's end of the transport in ``settings``."""
    make: type[Receiver] = _find(settings.way, 2)
    with on_side_stream(device):  # as in make_sender
        if not settings.delta:
            return make(manifest, settings, device)
        transport = make(updates_manifest(manifest), _in_small_buckets(settings), device)
        return ChangesReceiver(transport, manifest, device)


def _find(name: TransportName, side: int) -> Any:
    names = TRANSPORTS[name]
    return getattr(importlib.import_module(names[0]), names[side])


def _in_small_buckets(settings: TransferSettings) -> TransferSettings:
    """An update is short: a whole bucket of 64 MiB would be read for a few bytes."""
    return replace(settings, bucket_mib=min(settings.bucket_mib, 4))
