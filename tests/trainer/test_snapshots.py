"""A snapshot is sent only as its own version; neighbouring weights are merged with their LoRA together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from monarch_rl.errors import TransferError
from monarch_rl.model.lora import lora_names
from monarch_rl.trainer import lora as trainer_lora
from monarch_rl.trainer.lora import merged_shards, merged_spans
from monarch_rl.trainer.publishing import _copy_computed
from monarch_rl.trainer.snapshots import Snapshots
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.manifest import make_manifest
from tests.kernels import Kernels
from tests.patience import patiently


class Memory:
    """The sending end's memory, without a transport."""

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
    with pytest.raises(RuntimeError, match="rank 0 .*version 3 .*snapshot 1.*2"):
        asyncio.run(snapshots.checksums(2, 1))
    with pytest.raises(RuntimeError, match="None .*snapshot 0.*3"):
        asyncio.run(snapshots.checksums(3, 0))


class Transfer(Memory):
    """A sending end whose transfer ends when the test ends it, or when it is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.sending = asyncio.Event()
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = False

    async def send(self, version: int, index: int) -> None:
        self.sending.set()
        try:
            await patiently(self.outcome, "the outcome of the transfer")
        finally:
            self.ended = True

    def abort(self, why: str) -> None:
        self.outcome.set_exception(TransferError(f"the transfer was aborted: {why}"))

    async def close(self) -> None:
        pass


async def outcome_of(fails: str) -> tuple[Transfer, Any]:
    """The result or error of ``Snapshots.send`` when checksums or the transfer fail."""
    sender: Any = Transfer()
    manifest = make_manifest([("a", (4, 2), torch.float32)], [[("a", 0, 8)]])
    snapshots = Snapshots(sender, manifest, 0, torch.device("cpu"))
    (view,) = snapshots.prepare(3, 1)
    view.view(torch.float32).fill_(1)
    calling = asyncio.ensure_future(snapshots.send(2 if "checksums" in fails else 3, 1))
    await patiently(sender.sending.wait(), "the transfer to begin")
    if fails == "transfer":
        sender.outcome.set_exception(TransferError("a generator is lost"))
    elif not fails:
        sender.outcome.set_result(None)
    answers: list[Any] = await asyncio.gather(calling, return_exceptions=True)
    await snapshots.close()
    return sender, answers[0]


def test_a_transfer_is_aborted_before_its_failed_checksums_are_raised() -> None:
    """The transfer is aborted and has ended when the error is raised; and the error comes from the checksums."""
    sender, answer = asyncio.run(outcome_of("checksums"))
    assert sender.ended and "snapshot 1" in str(answer)
    assert str(answer) in str(sender.outcome.exception())
    sender, answer = asyncio.run(outcome_of("transfer"))
    assert sender.ended and str(answer) == "a generator is lost"
    sender, answer = asyncio.run(outcome_of(""))
    assert sender.ended and answer.tolist() == [int(tensor_checksum(torch.ones(4, 2)))]


@pytest.mark.parametrize("at_a_time", [1, 3, 64])
def test_neighbouring_weights_are_merged_with_their_lora_together(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of a layer are slices of one parameter here and in a snapshot: the bytes merged and copied at a time are
    bounded, and the number of kernels does not grow with experts."""
    experts, rows, columns, rank, scaling = 10, 6, 4, 2, 0.5
    monkeypatch.setattr(trainer_lora, "MERGED_BYTES", at_a_time * rows * columns * 4)
    weights: dict[str, torch.Tensor] = {}
    lora: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for layer in range(2):
        stacks = (
            torch.randn(experts, rows, columns),
            torch.randn(experts, rank, columns),
            torch.randn(experts, rows, rank),
        )
        for expert, (w, a, b) in enumerate(zip(*stacks, strict=True)):
            name = f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
            weights[name] = w
            lora |= dict(zip(lora_names(name), (a, b), strict=True))
            expected[name] = w + scaling * b @ a
    weights["model.norm.weight"] = torch.ones(4)
    snapshot = torch.zeros(len(expected), rows * columns, dtype=torch.bfloat16)
    places = dict(zip(expected, snapshot, strict=True))
    with Kernels() as kernels:
        for names, values in merged_spans(weights, lora, scaling):
            assert values.shape == (len(names), rows, columns) and len(names) <= at_a_time
            _copy_computed(values, [places[name] for name in names])
    assert kernels.count == 3 * 2 * -(-experts // at_a_time), "a product, a sum and a copy"
    merged = dict(merged_shards(weights, lora, scaling))
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(merged[name], value, atol=1e-6)
        assert torch.equal(places[name], merged[name].flatten().to(torch.bfloat16)), (
            "the sent tensor equals the saved one"
        )
