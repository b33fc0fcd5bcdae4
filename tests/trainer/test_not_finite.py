"""Weights that are not finite are refused where they are loaded, by the tensor's name."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.recipe.running import random_model
from tests.trainer.programs import run_program

NORM, EXPERT = "model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"


def spoil(folder: Path, name: str, place: tuple[int, ...], value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][place] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_the_tensor_and_the_place_are_named(tmp_path: Path) -> None:
    random_model(tmp_path / "good")
    spoil(random_model(tmp_path / "nan"), NORM, (7,), math.nan)
    spoil(random_model(tmp_path / "inf", "moe"), EXPERT, (5, 2), -math.inf)
    run_program("not_finite.py", tmp_path)
    said = {name: (tmp_path / f"{name}.said").read_text() for name in ("good", "nan", "inf")}
    assert said["good"] == ""
    assert f"{tmp_path / 'nan'}: {NORM} holds 1 values that are not finite, the first at [7]" in said["nan"]
    assert f"{tmp_path / 'inf'}: {EXPERT} holds 1 values that are not finite, the first at [5, 2]" in said["inf"]
