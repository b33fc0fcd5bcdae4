"""Which model tools/evaluate.py takes: nothing is played. tests/recipe/test_recipe.py plays a run's held-out items."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monarch_rl.checkpoint import folders
from monarch_rl.checkpoint.folders import Measurement
from monarch_rl.pipeline.exporting import Source, source_of
from tests.pipeline.test_resume import RunSettings, finished_step
from tools import evaluate


def test_of_a_run_what_was_written_last_is_evaluated_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint can be named. LoRA by itself is in checkpoints alone."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (base / "model.safetensors").write_bytes(b"")
    run = finished_step(RunSettings(output=tmp_path / "runs", model=str(base)))
    exported: list[Source] = []

    def export(source: Source, folder: Path) -> None:
        exported.append(source)
        folder.mkdir()

    monkeypatch.setattr(evaluate, "export", export)
    for place in (run, run / "checkpoints" / "step-000003"):
        with evaluate.model_of(str(place)) as model:
            assert Path(model).is_dir()
        assert not Path(model).exists()
        assert exported.pop().checkpoint == (run / "checkpoints" / "step-000003").resolve() and not exported
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    os.utime(run / "model" / "config.json", (1e9, 1e9))
    assert source_of(str(run)).checkpoint is not None, "the checkpoint is newer"
    os.utime(run / "model" / "config.json", (4e9, 4e9))
    assert source_of(str(run)) == Source(run / "model")
    os.utime(run / "model" / "config.json")
    assert folders.measure(run / "checkpoints", Measurement("held_out/accuracy", 0.5, 3), best=True)
    assert source_of(str(run)) == Source(run / "model"), "an evaluation makes no checkpoint newer"
    assert source_of(str(run), trained=True).checkpoint is not None
    for name, taken in ((str(run), str(run / "model")), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")):
        with evaluate.model_of(name) as model:
            assert model == taken and not exported


def test_to_the_recipe_the_model_is_what_the_run_began_with(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"model": "Qwen/Qwen3-0.6B"}')
    assert evaluate.begun_with(str(tmp_path), "runs/grpo/model") == "Qwen/Qwen3-0.6B"
    assert evaluate.begun_with("Qwen/Qwen3-4B", "Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"


def test_a_run_that_has_saved_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    with (
        pytest.raises(ValueError, match="has neither a checkpoint .* nor a saved model"),
        evaluate.model_of(str(tmp_path)),
    ):
        pass
