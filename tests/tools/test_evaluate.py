"""Which model tools/evaluate.py uses. No episode runs here: tests/recipe/test_recipe.py evaluates held-out items."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from monarch_rl.algorithms.objectives import CISPO, GSPO, IcePop, SequenceMask
from monarch_rl.checkpoint import folders
from monarch_rl.checkpoint.folders import Measurement
from monarch_rl.errors import SettingsError
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.offline import export
from monarch_rl.offline.export import Source, source_of
from monarch_rl.offline.recipes import load_recipe
from monarch_rl.runtime.devices import Devices
from monarch_rl.settings.ranges import to_plain
from monarch_rl.trainer.loss_settings import LossSettings
from tests import patience
from tests.model.configs import qwen3
from tests.pipeline.test_resume import RunSettings, finished_step
from tests.recipe.running import ROOT, random_model
from tools import evaluate
from tools.evaluate import Evaluated

CPU = Devices("cpu", 1, 8)


def settings_of(folder: Path) -> RunSettings:
    """Return settings of a run in ``folder``, with a base model there."""
    base = folder / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text(json.dumps(qwen3().raw))
    (base / "model.safetensors").write_bytes(b"")
    return RunSettings(output=folder / "runs", model=str(base))


def source_in(place: Path, trained: bool = False) -> Source:
    with source_of(str(place), trained) as source:
        return source


def test_the_newest_weights_of_a_run_are_evaluated_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint can be named; its weights are exported in the dtype that is served, with their version. A LoRA
    adapter alone is only in checkpoints. A checkpoint of the last step has higher precision than a model saved in half
    precision.
    """
    run = finished_step(settings_of(tmp_path))
    exported: list[Source] = []

    def export(source: Source, folder: Path, dtype: str) -> None:
        assert dtype == "float32"
        exported.append(source)
        folder.mkdir()

    monkeypatch.setattr(evaluate, "export", export)
    for place in (run, run / "checkpoints" / "step-000003"):
        with evaluate.model_of(Evaluated.of(str(place)), GeneratorSettings(), CPU) as (model, version):
            assert Path(model).is_dir() and version == 3
        assert not Path(model).exists()
        assert exported.pop().checkpoint == (run / "checkpoints" / "step-000003").resolve() and not exported
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    os.utime(run / "model" / "config.json", (1e9, 1e9))
    assert source_in(run).checkpoint is not None, "the checkpoint is newer"
    os.utime(run / "model" / "config.json", (4e9, 4e9))
    assert source_in(run) == Source(run / "model")
    os.utime(run / "model" / "config.json")
    assert folders.measure(run / "checkpoints", Measurement("held_out/accuracy", 0.5, 3), best=True)
    assert source_in(run) == Source(run / "model"), "an evaluation makes no checkpoint newer"
    assert source_in(run, trained=True).checkpoint is not None
    for name, expected in ((str(run), str(run / "model")), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")):
        with evaluate.model_of(Evaluated.of(name), GeneratorSettings(), CPU) as (model, version):
            assert (model, version) == (expected, 0) and not exported
    (run / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    assert source_in(run).checkpoint is not None, "the saved model has the weights of the checkpoint"
    (run / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4\n')
    assert source_in(run) == Source(run / "model"), "the model may be of a later step"
    assert f"{run / 'metrics.jsonl'}: line 2, at byte 12, is damaged" in caplog.text


def test_a_run_is_exported_without_its_settings_and_past_what_is_no_checkpoint(tmp_path: Path) -> None:
    run = finished_step(settings_of(tmp_path))
    (run / "settings.json").unlink(missing_ok=True)
    (run / "checkpoints" / "step-000007").write_text("a folder once")
    assert source_in(run).checkpoint == (run / "checkpoints" / "step-000003").resolve()


def test_a_model_that_has_been_moved_is_named_with_the_checkpoint_that_needs_it(tmp_path: Path) -> None:
    run = finished_step(settings_of(tmp_path))
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(SettingsError, match=f"step-000003 needs the model .* {tmp_path / 'base'}: put it back"):
        source_in(run)


READ = "import sys; print(open(sys.argv[1]).read())"


@pytest.mark.parametrize("named", [".", "checkpoints/best", "checkpoints/step-000003"])
def test_a_checkpoint_that_its_run_removes_can_still_be_read(tmp_path: Path, named: str) -> None:
    settings = settings_of(tmp_path)
    run = finished_step(settings)
    folders.point(run / "checkpoints" / "best", run / "checkpoints" / "step-000003")
    with source_of(str(run / named)) as source:
        finished_step(settings, version=6)
        folders.keep(run / "checkpoints", 6, newest=1)
        assert list(folders.complete(run / "checkpoints")) == [6]
        assert source.files is not None and source.checkpoint == (run / "checkpoints" / "step-000003").resolve()
        command = [sys.executable, "-c", READ, str(source.files / folders.GROUPS)]
        assert patience.run(command).stdout == "groups\n"
        assert folders.verify(source.checkpoint, source.files).version == 3
    assert not source.files.exists()


@pytest.mark.parametrize("named", [".", "checkpoints/best", "checkpoints/step-000003"])
def test_a_checkpoint_that_its_run_removes_before_it_is_held_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """The checkpoint to which the name points afterwards is used."""
    settings = settings_of(tmp_path)
    run = finished_step(settings)
    checkpoints, held = run / "checkpoints", export.held
    folders.point(checkpoints / "best", checkpoints / "step-000003")

    def late(folder: Path, links: Path) -> AbstractContextManager[None]:
        monkeypatch.setattr(export, "held", held)
        finished_step(settings, version=6)
        assert folders.measure(checkpoints, Measurement("held_out/accuracy", 0.5, 6), best=True)
        folders.keep(checkpoints, 6, newest=1, best_by="held_out/accuracy")
        return held(folder, links)

    monkeypatch.setattr(export, "held", late)
    if named.endswith("3"):
        with pytest.raises(folders.BrokenCheckpoint, match="step-000003/manifest.json"):
            source_in(run / named)
    else:
        assert source_in(run / named).checkpoint == (checkpoints / "step-000006").resolve()


def test_an_earlier_checkpoint_is_used_if_the_newest_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a resume. A broken checkpoint that was named explicitly is refused."""
    settings = settings_of(tmp_path)
    run = finished_step(settings)
    finished_step(settings, version=6)
    broken, whole = (run / "checkpoints" / name / folders.GROUPS for name in ("step-000006", "step-000003"))
    broken.write_bytes(b"gr0ups")
    message = f"{broken.resolve()} .*checksum"
    assert source_in(run).checkpoint == whole.parent.resolve()
    assert re.search(message, caplog.text)
    with pytest.raises(folders.BrokenCheckpoint, match=message):
        source_in(broken.parent)
    whole.write_bytes(b"")
    with pytest.raises(folders.BrokenCheckpoint, match=f"{message}.*{whole.parent.name}.* 0 bytes"):
        source_in(run)


def test_a_run_is_not_evaluated_with_damaged_settings(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    folders.write_checked(path, {"model": "a/model", "held_out": 200})
    assert Evaluated.of(str(tmp_path)).settings == {"model": "a/model", "held_out": 200}
    path.write_text(path.read_text().replace("200", "300"))
    with pytest.raises(SettingsError, match=f"{path} is damaged"):
        Evaluated.of(str(tmp_path))


def test_the_recipe_gets_the_model_that_the_run_started_from(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"model": "Qwen/Qwen3-0.6B"}')
    assert Evaluated.of(str(tmp_path)).initial_model == "Qwen/Qwen3-0.6B"
    assert Evaluated.of("Qwen/Qwen3-4B").initial_model == "Qwen/Qwen3-4B"


CHANGED = ["--held-out=7", "--evaluation.samples=3", "--evaluation.temperature=0.7", "--evaluation.pass-at", "2", "3"]
CHANGED += ["--evaluation.sets", "held_out", "--rollout.max-new-tokens=5", "--rollout.keep-sampling-mask"]
CHANGED += ["--rollout.chat-options", '{"enable_thinking": false}', "--rollout.seed=9"]
CHANGED += ["--trainer.lr-warmup-steps=7", "--generator.max-total-tokens=4096", "--trainer.lora.targets", "q_proj"]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_saved_settings_are_the_defaults_of_their_recipe(path: Path, tmp_path: Path) -> None:
    model = random_model(tmp_path / "tiny", recipe=ROOT / "recipes" / "tools.py")
    models = [f"--{name}={model}" for name in ("model", "teacher") if name == "model" or path.stem == "distill"]
    for changed in ([], CHANGED):
        settings = to_plain(load_recipe(path, [*models, *changed]).settings)
        assert to_plain(load_recipe(path, [], settings).settings) == settings


def test_parameters_without_a_flag_come_from_the_run() -> None:
    recipe = ROOT / "recipes" / "grpo.py"
    run = load_recipe(recipe, []).settings
    loss = LossSettings(corrections=(IcePop(low=0.1), SequenceMask(high=2.0)))
    run = replace(run, objective=CISPO(clip_high=7.0), trainer=replace(run.trainer, loss=loss))
    loaded = load_recipe(recipe, ["--objective.clip-low=0.5"], to_plain(run)).settings
    assert loaded.objective == CISPO(clip_high=7.0, clip_low=0.5) and loaded.trainer == run.trainer
    assert load_recipe(recipe, ["--objective=gspo"], to_plain(run)).settings.objective == GSPO()


def test_a_run_whose_settings_the_recipe_does_not_have_is_refused_with_its_version(tmp_path: Path) -> None:
    path = ROOT / "recipes" / "grpo.py"
    settings = {"trainer": {"loss": {"policy_loss": "gspo"}}}
    run = finished_step(settings_of(tmp_path), packages={"monarch_rl": "0.1.0"}, settings=settings)
    run = run.rename(run.parent / "grpo-1")
    (run / "settings.json").write_text(json.dumps(settings))
    for place in (run, run / "checkpoints" / "step-000003"):
        evaluated = Evaluated.of(str(place))
        with pytest.raises(ValueError, match=r"no policy_loss.*: use monarch_rl 0\.1\.0"):
            load_recipe(path, [], evaluated.settings_for(path), evaluated.writer)
    own = tmp_path / "own.py"
    own.write_text(path.read_text().replace("launch(train, cli(", "import tyro\n    launch(train, tyro.cli("))
    assert load_recipe(own, ["--held-out=5"]).settings.held_out == 5
    with pytest.raises(ValueError, match=r"monarch_rl\.cli"):
        load_recipe(own, [], {"held_out": 7})


def test_flags_override_the_settings_of_a_run(tmp_path: Path) -> None:
    """Settings of a checkpoint come from its manifest. The paths of the run are not used; nor is anything for another
    recipe."""
    path = ROOT / "recipes" / "grpo.py"
    run_settings = replace(
        load_recipe(path, [*CHANGED, "--trainer.ranks=6", "--rollout.workers=9"]).settings, model="begun"
    )
    run = tmp_path / "grpo-1"
    run.mkdir()
    (run / "settings.json").write_text(json.dumps(to_plain(run_settings)))
    evaluated = Evaluated.of(str(run))
    loaded = load_recipe(path, ["--held-out=8"], evaluated.settings_for(path)).settings
    saved, found = to_plain(run_settings), to_plain(loaded)
    assert found["held_out"] == 8
    assert all(found[group] == saved[group] for group in ("evaluation", "task", "rollout", "trainer"))
    assert evaluated.settings_for(ROOT / "recipes" / "game.py") == {}
    run_settings = replace(run_settings, output=tmp_path)
    checkpoint = finished_step(run_settings) / "checkpoints" / "step-000003"
    assert Evaluated.of(str(checkpoint)).settings == to_plain(run_settings)


def test_a_run_that_has_saved_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    with (
        pytest.raises(ValueError, match=f"{tmp_path}.* neither"),
        evaluate.model_of(Evaluated.of(str(tmp_path)), GeneratorSettings(), CPU),
    ):
        pass
