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
    """A folder with the program's messages."""
    folder = tmp_path_factory.mktemp("not_finite")
    random_model(folder / "good")
    random_model(folder / "experts", "moe")
    spoil(random_model(folder / "nan"), NORM, (7,), math.nan)
    spoil(random_model(folder / "inf", "moe"), EXPERT, (5, 2), -math.inf)
    run_program("not_finite.py", folder)
    return folder


def test_the_tensor_and_the_place_are_named(folder: Path) -> None:
    messages = {name: (folder / f"{name}.message").read_text() for name in ("good", "experts", "nan", "inf")}
    assert messages["good"] == messages["experts"] == ""
    assert f"{folder / 'nan'}: {NORM} holds 1 " in messages["nan"] and "[7]" in messages["nan"]
    assert f"{folder / 'inf'}: {EXPERT} holds 1 " in messages["inf"] and "[5, 2]" in messages["inf"]


def test_a_version_that_is_not_finite_in_the_served_dtype_is_named(folder: Path) -> None:
    messages = json.loads((folder / "messages.json").read_text())
    assert messages["good"] == messages["float32"] == ""
    # The greatest float32 is above the greatest bfloat16.
    assert messages["bfloat16"].startswith(f"{PROJECTION} holds 1 ") and "[5, 2]" in messages["bfloat16"]
    assert messages["infinite"] == messages["bfloat16"]
    assert messages["expert"].startswith(f"{EXPERT} holds 1 ") and "[7, 1]" in messages["expert"]
    assert messages["lora"].startswith(f"{messages['lora name']} holds 1 ") and "[3, 1]" in messages["lora"]
    # A row of B spoils the whole row of the merged weight.
    assert messages["merged"].startswith(f"{EXPERT} holds 64 ") and "[4, 0]" in messages["merged"]


def test_function_state_is_saved_as_of_the_last_complete_update(folder: Path) -> None:
    state = json.loads((folder / "messages.json").read_text())["state"]
    assert "step 1: the gradient norm is nan" in state["failed"]
    assert state["restored"] == state["made"] != state["ahead"]


def test_a_critic_after_one_of_two_updates_is_no_version(folder: Path) -> None:
    found = json.loads((folder / "messages.json").read_text())["half updated"]
    assert "step 1: the norm of the critic's gradient" in found["failed"]
    assert "version 0" in found["staged"] and "no checkpoint" in found["staged"]


def test_an_advantage_excludes_an_episode_whose_column_is_not_finite(folder: Path) -> None:
    left_out = json.loads((folder / "messages.json").read_text())["left out"]
    assert left_out["episodes"] == 1
    (line,) = left_out["logged"].splitlines()
    assert re.match("step 1: episode 2 of item 1 of task game .* of the engine ", line)


def test_a_supervised_row_that_is_not_trained_is_named(folder: Path) -> None:
    """By its number among all rows, from 1, mixed into a batch and alone."""
    for found in json.loads((folder / "messages.json").read_text())["rows left out"].values():
        assert 1 < len(found["expected"]) == found["masked"] < 5
        for row, line in zip(found["expected"], found["logged"].splitlines(), strict=True):
            assert re.match(rf"step 1: supervised row {row + 1} .* of the trainer ", line)


def test_a_gradient_that_is_not_finite_is_reported_with_its_cause(folder: Path) -> None:
    messages = json.loads((folder / "messages.json").read_text())
    assert re.search(rf"{PROJECTION} holds 1 .*\[5, 2\]", messages["update"])
    assert "weights are finite" in messages["nan loss"] and "loss is nan" in messages["nan loss"]
    assert "weights are finite" in messages["steep loss"] and "derivative" in messages["steep loss"]
