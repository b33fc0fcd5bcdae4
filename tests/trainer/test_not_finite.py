"""Values that are not finite are refused by the tensor's name: where weights are loaded, published, or trained."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.recipe.running import random_model
from tests.trainer.not_finite import EXPERT, PROJECTION
from tests.trainer.programs import run_program

NORM = "model.norm.weight"


def spoil(folder: Path, name: str, place: tuple[int, ...], value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][place] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the program has written what was said."""
    folder = tmp_path_factory.mktemp("not_finite")
    random_model(folder / "good")
    random_model(folder / "experts", "moe")
    spoil(random_model(folder / "nan"), NORM, (7,), math.nan)
    spoil(random_model(folder / "inf", "moe"), EXPERT, (5, 2), -math.inf)
    run_program("not_finite.py", folder)
    return folder


def test_the_tensor_and_the_place_are_named(folder: Path) -> None:
    said = {name: (folder / f"{name}.said").read_text() for name in ("good", "experts", "nan", "inf")}
    assert said["good"] == said["experts"] == ""
    assert f"{folder / 'nan'}: {NORM} holds 1 " in said["nan"] and "[7]" in said["nan"]
    assert f"{folder / 'inf'}: {EXPERT} holds 1 " in said["inf"] and "[5, 2]" in said["inf"]


def test_a_version_that_is_not_finite_in_the_served_dtype_is_named(folder: Path) -> None:
    said = json.loads((folder / "said.json").read_text())
    assert said["good"] == said["float32"] == ""
    # The greatest float32 is above the greatest bfloat16.
    assert said["bfloat16"].startswith(f"{PROJECTION} holds 1 ") and "[5, 2]" in said["bfloat16"]
    assert said["infinite"] == said["bfloat16"]
    assert said["expert"].startswith(f"{EXPERT} holds 1 ") and "[7, 1]" in said["expert"]
    assert said["lora"].startswith(f"{said['lora name']} holds 1 ") and "[3, 1]" in said["lora"]
    # A row of B times A: the whole row of the merged weight.
    assert said["merged"].startswith(f"{EXPERT} holds 64 ") and "[4, 0]" in said["merged"]


def test_what_functions_remember_is_saved_as_of_the_last_update_that_was_made(folder: Path) -> None:
    kept = json.loads((folder / "said.json").read_text())["kept"]
    assert "step 1: the gradient norm is nan" in kept["failed"]
    assert kept["remembered"] == kept["made"] != kept["ahead"]


def test_a_critic_that_made_one_of_two_updates_is_no_version(folder: Path) -> None:
    said = json.loads((folder / "said.json").read_text())["half made"]
    assert "step 1: the norm of the critic's gradient" in said["failed"]
    assert "version 0" in said["staged"] and "no checkpoint" in said["staged"]


def test_an_advantage_that_reads_what_is_not_finite_is_that_of_the_other_episodes(folder: Path) -> None:
    left_out = json.loads((folder / "said.json").read_text())["left out"]
    assert left_out["episodes"] == 1
    (line,) = left_out["said"].splitlines()
    assert re.match("step 1: episode 2 of item 1 of task game .* of the engine ", line)


def test_a_supervised_row_that_is_not_trained_is_named(folder: Path) -> None:
    """By its place among all rows, beside a batch and alone."""
    for found in json.loads((folder / "said.json").read_text())["rows left out"].values():
        assert 1 < len(found["expected"]) == found["masked"] < 5
        for row, line in zip(found["expected"], found["said"].splitlines(), strict=True):
            assert re.match(rf"step 1: supervised row {row} .* of the trainer ", line)


def test_a_gradient_that_is_not_finite_has_a_cause(folder: Path) -> None:
    said = json.loads((folder / "said.json").read_text())
    assert re.search(rf"{PROJECTION} holds 1 .*\[5, 2\]", said["update"])
    assert "weights are finite" in said["nan loss"] and "loss is nan" in said["nan loss"]
    assert "weights are finite" in said["steep loss"] and "derivative" in said["steep loss"]
