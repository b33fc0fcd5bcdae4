"""A snapshot is sent only as the version that it was taken of."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from monarch_rl.trainer.snapshots import Snapshots
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.endpoint import TransferError
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


class Transfer(Memory):
    """A sending end whose transfer ends when the test says so, or when it is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.sending = asyncio.Event()
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = False

    async def send(self, version: int, index: int) -> None:
        self.sending.set()
        try:
            await asyncio.wait_for(self.outcome, 60)
        finally:
            self.ended = True

    def abort(self, why: str) -> None:
        self.outcome.set_exception(TransferError(f"the transfer was aborted: {why}"))

    async def close(self) -> None:
        pass


async def outcome_of(fails: str) -> tuple[Transfer, Any]:
    """What ``Snapshots.send`` answers or raises, where checksums or the transfer fail."""
    sender: Any = Transfer()
    manifest = make_manifest([("a", (4, 2), torch.float32)], [[("a", 0, 8)]])
    snapshots = Snapshots(sender, manifest, 0, torch.device("cpu"))
    (view,) = snapshots.prepare(3, 1)
    view.view(torch.float32).fill_(1)
    calling = asyncio.ensure_future(snapshots.send(2 if "checksums" in fails else 3, 1))
    await asyncio.wait_for(sender.sending.wait(), 60)
    if fails == "transfer":
        sender.outcome.set_exception(TransferError("a generator is lost"))
    elif not fails:
        sender.outcome.set_result(None)
    answers: list[Any] = await asyncio.gather(calling, return_exceptions=True)
    await snapshots.close()
    return sender, answers[0]


def test_a_snapshot_whose_checksums_fail_is_not_sent_on_behind_the_callers_back() -> None:
    """The transfer is aborted and has ended when the error is raised; and the error is that of the checksums."""
    sender, answer = asyncio.run(outcome_of("checksums"))
    assert sender.ended and "has version 3 in snapshot 1, not 2" in str(answer)
    assert "could not take the checksums: trainer rank 0 has version 3" in str(sender.outcome.exception())
    sender, answer = asyncio.run(outcome_of("transfer"))
    assert sender.ended and str(answer) == "a generator is lost"
    sender, answer = asyncio.run(outcome_of(""))
    assert sender.ended and answer.tolist() == [int(tensor_checksum(torch.ones(4, 2)))]
