"""The trainer on two FSDP ranks against transformers and plain training in one process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.programs import run_program, saved

pytestmark = pytest.mark.core

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
    """A folder with the output of reference.py and ranks.py."""
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
def test_a_loaded_model_is_saved_bit_for_bit(folder: Path, kind: str) -> None:
    before, after = saved(folder / kind), saved(folder / f"{kind}.saved")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {value.dtype for value in after.values()} == {torch.bfloat16 if kind == "qwen3_bf16" else torch.float32}
    assert (folder / f"{kind}.saved" / "config.json").is_file()


@pytest.mark.parametrize(
    "run",
    [
        *("trained", "clipped_sequence_mean", "clipped_token_mean", "biased", "several", "anchored"),
        *("supervised", "mixed"),
    ],
)
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


def test_the_gradient_of_supervised_rows_equals_that_of_transformers_cross_entropy(folder: Path) -> None:
    """Mixed into a batch it is added with its share, which ranks.py checks; this test reads the rest of its output."""
    expected, found = load_file(folder / "rows.gradient"), load_file(folder / "rows.found")
    assert expected.keys() == found.keys()
    for name in expected:
        assert (found[name] - expected[name]).norm() < 1e-4 * expected[name].norm(), name


def test_one_update_per_batch_equals_the_plain_loop_bit_for_bit(folder: Path) -> None:
    """What several updates per batch need, a column of old log-probs and sums over steps, changes nothing for one."""
    expected, found = saved(folder / "by_hand"), saved(folder / "trained")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_disagreeing_ranks_are_refused_on_all_ranks(folder: Path) -> None:
    """Advantages by their checksum, sums of an objective by their names: added up blindly, both would be wrong."""
    for rank in range(2):
        values, large, names = json.loads((folder / f"disagree.rank{rank}").read_text())
        assert (values, large) == ("no agreement", "no agreement on large values")
        assert f"['of rank {rank}', 'tokens']" in names


def test_invalid_functions_are_refused_at_the_first_step_with_their_location(folder: Path) -> None:
    for rank in range(2):
        errors = json.loads((folder / f"refuse.rank{rank}").read_text())
        expected = {
            "of_this_rank": "different trainer ranks",
            "not_a_number": "nan for sequence 0",
            "endless": "step 1: the gradient norm ",
            "shifted": "step 1: .*nan.*gradient is finite",
        }
        assert errors.keys() == expected.keys()
        for name, message in errors.items():
            assert re.search(expected[name], message), message
            assert re.search(rf"{name} \(.*/tests/trainer/ranks\.py:\d+\)", message), message


def test_learning_rate_zero_changes_nothing(folder: Path) -> None:
    before, after = saved(folder / "qwen3"), saved(folder / "still")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_activation_checkpointing_changes_nothing(folder: Path) -> None:
    first, second = saved(folder / "trained"), saved(folder / "recomputed")
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
