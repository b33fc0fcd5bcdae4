"""The trainer on two FSDP ranks against transformers and plain training in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.programs import run_program, saved

KINDS = (
    "qwen3",
    "qwen3_tied",
    "llama_tied",
    "llama3_rope",
    "qwen3_bf16",
    "qwen3_moe",
    "qwen2",
    "qwen2_tied",
    "mistral",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What reference.py and ranks.py wrote."""
    folder = tmp_path_factory.mktemp("trainer")
    run_program("reference.py", folder)
    run_program("ranks.py", folder, ranks=2)
    return folder


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


@pytest.mark.parametrize("run", ["trained", "clipped_sequence_mean", "clipped_token_mean", "biased"])
def test_updates_equal_plain_training(folder: Path, run: str) -> None:
    """Packed, in micro-batches and on two ranks, or one episode after the other: the same weights."""
    expected, found = load_file(folder / f"{run}.safetensors"), saved(folder / run)
    start = saved(folder / ("qwen2" if run == "biased" else "qwen3"))
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
