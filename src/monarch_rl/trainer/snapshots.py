"""The snapshots that a trainer rank sends versions from: which version each holds, and its checksums."""

from __future__ import annotations

import torch

from monarch_rl.weights.checksum import ShardChecksums
from monarch_rl.weights.endpoint import Sender
from monarch_rl.weights.manifest import Manifest


class Snapshots:
    """The snapshots of one rank, by their index in the sending end.

    Args:
        rank: of the trainer.
    """

    def __init__(self, sender: Sender, manifest: Manifest, rank: int) -> None:
        self.sender = sender
        self.manifest = manifest
        self._rank = rank
        self._versions: dict[int, int] = {}
        self._checksums: dict[int, ShardChecksums] = {}

    def prepare(self, version: int, index: int) -> list[torch.Tensor]:
        """Note that a snapshot is about to hold ``version``; returns where to copy this rank's shards to."""
        views = self.sender.views(index)
        self._versions[index] = version
        if index not in self._checksums:
            self._checksums[index] = ShardChecksums(self.manifest, self._rank, views)
        return views

    def checksums(self, version: int, index: int) -> ShardChecksums:
        """Of this rank's part of each tensor of ``version``, to be taken.

        Raises:
            RuntimeError: the snapshot holds another version.
        """
        held = self._versions.get(index)
        if held != version:
            raise RuntimeError(f"trainer rank {self._rank} has version {held} in snapshot {index}, not {version}")
        return self._checksums[index]
