"""Low-rank adapters on two FSDP ranks against peft in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from monarch_rl.model.lora import LoraSettings
from tests.trainer.lora_cases import CASES, VARIANTS
from tests.trainer.programs import check_merged, run_program, saved

CORE = "lora_all"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of lora_reference.py."""
    folder = tmp_path_factory.mktemp("lora")
    run_program("lora_reference.py", "make", folder)
    return folder


def train(folder: Path, *names: str) -> None:
    run_program("lora_ranks.py", folder, *names, ranks=2)
    run_program("lora_reference.py", "compare", folder, *(name for name in names if name in CASES))


@pytest.fixture(scope="module")
def one(models: Path) -> Path:
    """The core tests' case: output of lora_ranks.py and lora_reference.py."""
    train(models, CORE)
    return models


@pytest.fixture(scope="module")
def others(models: Path) -> Path:
    """The same for all other cases, by one program."""
    train(models, *(name for name in (*CASES, *VARIANTS) if name != CORE))
    return models


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.core] * (name == CORE)) for name in CASES])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(models: Path, name: str, request: pytest.FixtureRequest) -> Path:
    """The folder with the trained models of the test's case."""
    request.getfixturevalue("one" if name == CORE else "others")
    return models


def test_updates_equal_those_of_peft(folder: Path, name: str) -> None:
    """Packed, in micro-batches and on two ranks, or one episode after the other: the same adapters."""
    expected, found = load_file(folder / f"{name}.trained"), saved(folder / f"{name}_adapter")
    start = saved(folder / f"{name}_start_adapter")
    assert expected.keys() == found.keys()
    for tensor in expected:
        # In the norm: AdamW's first steps turn a gradient of nearly zero into a whole step of either sign.
        moved = (found[tensor] - start[tensor]).norm()
        assert moved > 5e-4 * found[tensor].numel() ** 0.5, tensor
        assert (found[tensor] - expected[tensor]).norm() < 0.01 * moved, tensor


def test_trainer_adapter_and_merged_model_give_the_same_logits(folder: Path, name: str) -> None:
    written = load_file(folder / f"{name}.logits")
    before = load_file(folder / f"{CASES[name][0]}.logits")["logits"]
    assert (written["peft"] - before).abs().max() > 1e-2
    assert (written["merged"] - written["peft"]).abs().max() < 2e-6
    for rank in range(2):
        found = load_file(folder / f"{name}.rank{rank}")["logits"].view(before.shape)
        assert (found - written["peft"]).abs().max() < 2e-6


def test_the_merged_weights_equal_the_formula(folder: Path, name: str) -> None:
    kind, lora = CASES[name]
    before, merged, adapter = saved(folder / kind), saved(folder / name), saved(folder / f"{name}_adapter")
    check_merged(before, merged, adapter, lora)


def test_training_starts_from_the_unchanged_model(folder: Path, name: str) -> None:
    """B is zero; A is uniform within 1 / sqrt(in), like peft's Kaiming initialisation; no two tensors are equal."""
    before, start = saved(folder / CASES[name][0]), saved(folder / f"{name}_start")
    assert all(torch.equal(before[tensor], start[tensor]) for tensor in before)
    adapter = saved(folder / f"{name}_start_adapter")
    for tensor, value in adapter.items():
        if ".lora_B." in tensor:
            assert not value.any()
        else:
            scaled = value * value.shape[1] ** 0.5
            assert scaled.abs().max() <= 1
            assert abs(float(scaled.std()) - 3**-0.5) < 0.12
    first, second = [value for tensor, value in adapter.items() if "q_proj.lora_A" in tensor]
    assert not torch.equal(first, second)


def test_learning_rate_zero_changes_nothing(others: Path) -> None:
    for start, end in (("lora_still_start_adapter", "lora_still_adapter"), ("qwen3", "lora_still")):
        before, after = saved(others / start), saved(others / end)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_activation_checkpointing_changes_nothing(one: Path, others: Path) -> None:
    first, second = saved(one / "lora_all_adapter"), saved(others / "lora_recomputed_adapter")
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_expert_parallelism_changes_no_adapter(others: Path) -> None:
    first, second = saved(others / "lora_moe_adapter"), saved(others / "lora_divided_adapter")
    start = saved(others / "lora_moe_start_adapter")
    for name in first:
        assert (first[name] - second[name]).norm() < 1e-3 * (first[name] - start[name]).norm(), name


def test_the_adapters_folder_names_its_base(others: Path) -> None:
    config = json.loads((others / "lora_some_adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(others / "qwen3")
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rank": -1}, r"lora\.rank\b"),
        ({"rank": 2, "alpha": 0.0}, r"lora\.alpha\b.*\b0\.001\b"),
        ({"rank": 2, "targets": ()}, r"lora\.targets\b.*\bq_proj\b.*\(\)"),
        ({"rank": 2, "targets": ("q_proj", "q_proj")}, "each once"),
        ({"rank": 2, "targets": ("lm_head",)}, "targets .*'lm_head'"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoraSettings(**wrong)  # type: ignore[arg-type]
