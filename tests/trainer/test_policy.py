"""The trainer on two FSDP ranks against transformers and plain training in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
KINDS = ("qwen3", "qwen3_tied", "llama_tied", "llama3_rope", "qwen3_bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What reference.py and ranks.py wrote."""
    folder = tmp_path_factory.mktemp("trainer")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for arguments in (["tests/trainer/reference.py"], [*torchrun, "tests/trainer/ranks.py"]):
        done = subprocess.run(
            [sys.executable, *arguments, str(folder)], cwd=ROOT, env=environment, capture_output=True, timeout=240
        )
        assert done.returncode == 0, done.stderr.decode()[-4000:]
    return folder


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(folder: Path, kind: str) -> None:
    expected = load_file(folder / f"{kind}.logits")["logits"]
    for rank in range(2):
        found = load_file(folder / f"{kind}.rank{rank}")["logits"].view(expected.shape)
        assert (found - expected).abs().max() < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_is_saved_bit_for_bit(folder: Path, kind: str) -> None:
    before, after = saved(folder / kind), saved(folder / f"{kind}.saved")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {value.dtype for value in after.values()} == {torch.bfloat16 if kind == "qwen3_bf16" else torch.float32}
    assert (folder / f"{kind}.saved" / "config.json").is_file()


@pytest.mark.parametrize("loss", ["trained", "clipped_sequence_mean", "clipped_token_mean"])
def test_updates_equal_plain_training(folder: Path, loss: str) -> None:
    """Packed, in micro-batches and on two ranks, or one episode after the other: the same weights."""
    expected, found = load_file(folder / f"{loss}.safetensors"), saved(folder / loss)
    start = saved(folder / "qwen3")
    assert expected.keys() == found.keys()
    for name in expected:
        # In the norm: AdamW's first steps turn a gradient of nearly zero into a whole step of either sign.
        moved = (found[name] - start[name]).norm()
        assert moved > 1e-3 * found[name].numel() ** 0.5, name
        assert (found[name] - expected[name]).norm() < 0.01 * moved, name


def test_learning_rate_zero_changes_nothing(folder: Path) -> None:
    before, after = saved(folder / "qwen3"), saved(folder / "still")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_activation_checkpointing_changes_nothing(folder: Path) -> None:
    first, second = saved(folder / "trained"), saved(folder / "recomputed")
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
