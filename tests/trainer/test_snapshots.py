"""A snapshot is sent only as the version that it was taken of."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from monarch_rl.trainer.snapshots import Snapshots
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.manifest import make_manifest


class Memory:
    """The sending end's memory, and nothing that sends it."""

    def __init__(self) -> None:
        self.areas = [torch.zeros(32, dtype=torch.uint8) for _ in range(2)]

    def views(self, index: int) -> list[torch.Tensor]:
        return [self.areas[index]]


def test_a_snapshot_of_another_version_is_refused() -> None:
    memory: Any = Memory()
    manifest = make_manifest([("a", (4, 2), torch.float32)], [[("a", 0, 8)]])
    snapshots = Snapshots(memory, manifest, 0, torch.device("cpu"))
    weights = torch.arange(8.0).view(4, 2)
    (view,) = snapshots.prepare(3, 1)
    view.view(torch.float32).view(4, 2).copy_(weights)
    assert asyncio.run(snapshots.checksums(3, 1)).tolist() == [int(tensor_checksum(weights))]
    with pytest.raises(RuntimeError, match="trainer rank 0 has version 3 in snapshot 1, not 2"):
        asyncio.run(snapshots.checksums(2, 1))
    with pytest.raises(RuntimeError, match="has version None in snapshot 0, not 3"):
        asyncio.run(snapshots.checksums(3, 0))
