"""A trainer resumes from its checkpoint: bit for bit on as many ranks, on others up to the order of sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monarch_rl.checkpoint.folders import RECORDS, TRAINER, read_checked
from monarch_rl.checkpoint.tensors import names
from tests.trainer.programs import run_program, saved
from tools.gpu_parts.common import TINY, Bench, make_model

KINDS = ("full", "lora", "critic")
"""Kinds of training; with a critic, the policy learns only after the checkpoint."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, and the output of :func:`write`."""
    made = tmp_path_factory.mktemp("checkpoints")
    make_model(Bench(torch.device("cpu"), made), TINY, "model")
    return made


def write(folder: Path, name: str) -> None:
    """Make a checkpoint of two ranks and a model that was trained without interruption, unless they exist."""
    if not (folder / f"{name}_whole").exists():
        run_program("checkpoint_ranks.py", folder, "model", name, "write", ranks=2)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.core] * (name == "full")) for name in KINDS])
def test_resumed_weights_equal_the_uninterrupted_ones_bit_for_bit(folder: Path, name: str) -> None:
    """Also the weights of a checkpoint that was written during an update, after one for which a rank was too late, and
    one that a full disk had refused to a rank. Each rank resumes with its own random numbers."""
    write(folder, name)
    run_program("checkpoint_ranks.py", folder, "model", name, "read", ranks=2)
    expected, resumed = saved(folder / f"{name}_whole"), saved(folder / f"{name}_resumed_2")
    start = saved(folder / "model")
    assert expected.keys() == resumed.keys()
    for tensor, value in expected.items():
        assert torch.equal(resumed[tensor], value), tensor
    assert sum(not torch.equal(start[tensor], value) for tensor, value in expected.items() if tensor in start) > 5
    if name == "critic":
        assert expected["critic.lm_head.weight"].abs().min() > 0
    assert not (folder / f"{name}_full" / TRAINER / ".metadata").exists()
    located, shards = set(), folder / f"{name}_checkpoint" / TRAINER
    for shard in shards.glob("*.distcp"):
        records = read_checked(shard.with_name(shard.name + RECORDS))["records"]
        assert records[-1][1] == shard.stat().st_size
        located |= {tensor for tensor, _, _ in records}
    assert located == names(shards), "damage cannot be located in every tensor"


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.core)])
def test_a_checkpoint_of_two_ranks_is_read_by_fewer_and_more(folder: Path, ranks: int) -> None:
    """Sums over other shards of a batch differ in the last bits, and Adam divides by the gradient's size."""
    write(folder, "full")
    run_program("checkpoint_ranks.py", folder, "model", "full", "read", ranks=ranks)
    expected, resumed = saved(folder / "full_whole"), saved(folder / f"full_resumed_{ranks}")
    start = saved(folder / "model")
    for tensor, value in expected.items():
        moved = (value - start[tensor]).abs().max()
        assert (resumed[tensor] - value).abs().max() <= 0.02 * moved, tensor
