"""What is not exported as it is, is refused before a process starts. tests/recipe/test_recipe.py exports."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from monarch_rl.checkpoint.folders import Manifest
from monarch_rl.errors import SettingsError
from monarch_rl.offline.export import Source, check_base_weights, export, source_of
from monarch_rl.pipeline.publishing import sums_by_layer
from tests.model.test_broken_folders import changed, tensors, written
from tests.recipe.running import random_model


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("export") / "good")


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        (lambda found: found.update({"score.weight": torch.zeros(1, 64)}), "score.weight"),
        (lambda found: found.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}), "weight_scale"),
        (lambda found: found.update({"lm_head.weight": changed(found["model.embed_tokens.weight"])}), "lm_head.weight"),
        (lambda found: found.pop("model.norm.weight"), "model.norm.weight"),
    ],
)
def test_tensors_that_an_export_would_drop_or_lack_are_refused(
    good: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], culprit: str
) -> None:
    shutil.copytree(good, tmp_path / "odd")
    tensors(change)(tmp_path / "odd")
    with source_of(str(tmp_path / "odd")) as source, pytest.raises(SettingsError, match=culprit):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_exported_only_as_what_transformers_would_load(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "adapted")
    written("adapter_config.json", "{}")(tmp_path / "adapted")
    with source_of(str(tmp_path / "adapted")) as source, pytest.raises(SettingsError, match=r"adapter_config\.json"):
        export(source, tmp_path / "out")


def test_only_an_earlier_export_is_replaced(good: Path, tmp_path: Path) -> None:
    """An export to the run's own folder, or to one with models in it, would remove all of that."""
    (tmp_path / "models" / "other").mkdir(parents=True)
    (tmp_path / "file").touch()
    for place in ("models", "file"):
        with pytest.raises(SettingsError, match=rf"{place} exists and is no model folder"):
            export(Source(good), tmp_path / place)
    with pytest.raises(SettingsError, match="the model that the run began with"):
        export(Source(good, checkpoint=tmp_path), good)


def test_lora_is_exported_only_with_the_base_weights_that_it_was_trained_on(tmp_path: Path) -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"]
    saved = sums_by_layer(names, "bfloat16", np.array([1, 2, 3]))
    manifest = Manifest(1, 1, 0, 0.0, {}, settings={"model": "/models/base"}, base_weights=saved)

    def check(*checksums: int) -> None:
        tensors = [(name, (1,)) for name in names]
        loaded: Any = SimpleNamespace(base_checksums=lambda dtype: (tensors, np.array(checksums)))
        policy: Any = SimpleNamespace(published=loaded)
        check_base_weights(policy, Source(tmp_path, tmp_path / "step-000001", manifest=manifest))

    check(1, 2, 3)
    with pytest.raises(SettingsError, match=r"/models/base .*step-000001.* model\.layers\.0 \(bfloat16\)\."):
        check(1, 2, 4)
