"""The snapshots from which a trainer rank sends versions, and their checksums."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from monarch_rl.runtime.streams import SideThread
from monarch_rl.weights.checksum import ShardChecksums
from monarch_rl.weights.manifest import Manifest
from monarch_rl.weights.transport import Sender


class Snapshots:
    """The snapshots of one trainer rank, by index in the sender.

    Args:
        rank: rank of the trainer.
        device: device of the snapshots.
    """

    def __init__(self, sender: Sender, manifest: Manifest, rank: int, device: torch.device) -> None:
        self.sender = sender
        self.manifest = manifest
        self.rank = rank
        self._thread = SideThread("verify", device)
        self._views: dict[int, list[torch.Tensor]] = {}
        self._versions: dict[int, int] = {}
        self._checksums: dict[int, ShardChecksums] = {}

    @property
    def served_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which generators serve each tensor of a version, by name."""
        return {spec.name: spec.dtype for spec in self.manifest.tensors}

    def prepare(self, version: int, index: int) -> list[torch.Tensor]:
        """Assign a snapshot to ``version``; returns the views to copy this rank's shards to."""
        views = self.sender.views(index)
        self._versions[index], self._views[index] = version, views
        return views

    async def send(self, version: int, index: int) -> np.ndarray:
        """Send a snapshot as this rank's part of ``version``, and compute its checksums meanwhile, which it returns.

        Both have ended when this returns or raises. If the checksums fail, the transfer is aborted.
        """
        sending = asyncio.ensure_future(self.sender.send(version, index))

        async def sum_or_abort() -> np.ndarray:
            try:
                return await self.checksums(version, index)
            except Exception as error:
                if not sending.done():
                    self.sender.abort(f"trainer rank {self.rank} could not compute the checksums: {error}")
                raise

        # waits: until the transfer's deadline
        sums, sent = await asyncio.gather(sum_or_abort(), sending, return_exceptions=True)
        for outcome in (sums, sent):
            if isinstance(outcome, BaseException):
                raise outcome
        assert isinstance(sums, np.ndarray)
        return sums

    async def checksums(self, version: int, index: int) -> np.ndarray:
        """int64[tensors]: checksums of this rank's part of each tensor of ``version``, as the snapshot holds it.

        Raises:
            RuntimeError: the snapshot holds another version.
        """
        held = self._versions.get(index)
        if held != version:
            raise RuntimeError(f"trainer rank {self.rank} has version {held} in snapshot {index}, not {version}")
        return await self._thread.run(self._take, index)

    def _take(self, index: int) -> np.ndarray:
        if index not in self._checksums:
            self._checksums[index] = ShardChecksums(self.manifest, self.rank, self._views[index])
        return self._checksums[index].take()

    async def close(self) -> None:
        """Close the sender, too."""
        self._thread.close()
        await self.sender.close()
