"""Which settings a resumed run may have, and how its folder is truncated to the checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.checkpoint import folders
from monarch_rl.checkpoint.folders import GROUPS, Manifest, Measurement
from monarch_rl.checkpoint.journal import JournalBatch, JournalSettings
from monarch_rl.errors import SettingsError
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.lora import LoraSettings
from monarch_rl.pipeline import resume
from monarch_rl.pipeline.checkpoints import versions_of_packages
from monarch_rl.pipeline.replayed_steps import OnReplayed, replay_steps
from monarch_rl.pipeline.resume import Resumed
from monarch_rl.pipeline.run_folder import note_state, read_state, recipe_name
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.pipeline.start import Actors
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime import folder_lock, supervisor
from monarch_rl.settings.ranges import to_plain
from monarch_rl.trainer.loss_settings import CriticSettings
from monarch_rl.trainer.settings import TrainerSettings
from tests import patience


def finished_step(run_settings: RunSettings, version: int = 3, name: str = "1", **manifest: Any) -> Path:
    """Make the folder of a run that continued after a checkpoint.

    Args:
        manifest: fields of the checkpoint's manifest that differ from the defaults.
    """
    run = run_settings.output / f"{recipe_name()}-{name}"
    run.mkdir(parents=True, exist_ok=True)
    (run / "settings.json").write_text(json.dumps(to_plain(run_settings), indent=2))
    (run / "metrics.jsonl").write_text("before\nafter\n")
    partial = folders.begin(run / "checkpoints", version)
    (partial / GROUPS).write_bytes(b"groups")
    files = [folders.file_sum(partial, partial / GROUPS)]
    default = Manifest(version, version, 0, 9.0, {"metrics.jsonl": 7}, settings=to_plain(run_settings), files=files)
    folders.commit(run / "checkpoints", replace(default, **manifest))
    note_state(run, "failed", "a loss", goes_on=True)
    return run


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (RunSettings(groups_per_step=8), "--groups-per-step was 32 and is now 8, .* bound"),
        (RunSettings(buffer=BufferSettings(1)), "--buffer.max-policy-lag was 2 and is now 1, .* bound"),
        (
            RunSettings(trainer=TrainerSettings(lr_min_factor=0.1)),
            "--trainer.lr-min-factor was 1.0 and is now 0.1, .* schedule .*from 1 to 0.989 .*export.py .*--model",
        ),
    ],
)
def test_settings_that_break_the_bound_or_the_schedule_are_refused(
    tmp_path: Path, changed: RunSettings, message: str
) -> None:
    run = finished_step(RunSettings(output=tmp_path))
    with pytest.raises(ValueError, match=message):
        resume.resolve_resume(replace(changed, output=tmp_path, resume=str(run)))


def test_the_learning_rate_may_change_and_so_may_its_schedule_if_the_next_step_keeps_its_rate(tmp_path: Path) -> None:
    """Checkpoints are of step 3 of 250."""
    run = finished_step(RunSettings(output=tmp_path))
    for trainer, listed in (
        (TrainerSettings(lr=1e-5), {"trainer.lr 1e-06 -> 1e-05"}),
        (TrainerSettings(lr_warmup_steps=3), {"trainer.lr_warmup_steps 0 -> 3"}),
        (
            TrainerSettings(lr=1e-7, lr_min_factor=0.1, lr_decay_ratio=0.2),
            {"trainer.lr 1e-06 -> 1e-07", "trainer.lr_min_factor 1.0 -> 0.1", "trainer.lr_decay_ratio None -> 0.2"},
        ),
    ):
        settings = RunSettings(output=tmp_path, resume=str(run), trainer=trainer)
        resumed = resume.resolve_resume(settings)
        assert resumed is not None and listed <= set(resumed.differences)
        resume.take_folder(settings, resumed)
        row = json.loads((run / "resumes.jsonl").read_text().splitlines()[-1])
        assert listed <= set(row["differences"]) and row["step"] == 3
    with pytest.raises(ValueError, match="--trainer.lr-warmup-steps was 0 and is now 5"):
        resume.resolve_resume(RunSettings(output=tmp_path, resume=str(run), trainer=TrainerSettings(lr_warmup_steps=5)))
    late = TrainerSettings(lr_min_factor=0.0, lr_decay_ratio=0.1)
    run = finished_step(RunSettings(output=tmp_path / "late", trainer=late))
    longer = RunSettings(output=tmp_path / "late", trainer=late, steps=500, resume=str(run))
    resumed = resume.resolve_resume(longer)
    assert resumed is not None and "steps 250 -> 500" in resumed.differences


@pytest.mark.parametrize("given", ["path", "auto"])
def test_a_resumed_run_keeps_its_ranks_and_replicas_on_another_machine(tmp_path: Path, given: str) -> None:
    sizes = {"trainer": TrainerSettings(ranks=3), "generator": GeneratorSettings(replicas=5)}
    run = finished_step(RunSettings(output=tmp_path, **sizes))  # type: ignore[arg-type]
    damaged = folders.folder_of(run / "checkpoints", 9)
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")  # the one before counts
    fresh = RunSettings(output=tmp_path, resume=str(run) if given == "path" else "auto")
    kept = resume.keep_sizes(fresh)
    assert (kept.trainer.ranks, kept.generator.replicas) == (3, 5)
    assert (resumed := resume.resolve_resume(kept)) is not None
    assert not any("ranks" in text or "replicas" in text for text in resumed.differences)
    own = resume.keep_sizes(replace(fresh, trainer=TrainerSettings(ranks=2)))
    assert (own.trainer.ranks, own.generator.replicas) == (2, 5)
    assert resume.keep_sizes(replace(fresh, resume=None)) == replace(fresh, resume=None)


def test_more_steps_are_refused_only_where_the_schedule_depends_on_them(tmp_path: Path) -> None:
    run = finished_step(RunSettings(output=tmp_path))
    more = RunSettings(output=tmp_path, resume=str(run), steps=300, held_out=7)
    resumed = resume.resolve_resume(more)
    assert resumed is not None and {"steps 250 -> 300", "held_out 200 -> 7"} <= set(resumed.differences)
    decaying = RunSettings(output=tmp_path / "other", trainer=TrainerSettings(lr_min_factor=0.1))
    run = finished_step(decaying)
    with pytest.raises(ValueError, match="--steps was 250 and is now 300, .* schedule"):
        resume.resolve_resume(replace(decaying, steps=300, resume=str(run)))


@pytest.mark.parametrize("flag", ["epochs", "minibatches"])
def test_more_updates_a_batch_are_refused_where_the_schedule_depends_on_them(tmp_path: Path, flag: str) -> None:
    constant, twice = RunSettings(output=tmp_path), dict[str, Any]({flag: 2})
    run = finished_step(constant)
    more = replace(constant, resume=str(run), trainer=TrainerSettings(**twice))
    resumed = resume.resolve_resume(more)
    assert resumed is not None and f"trainer.{flag} 1 -> 2" in resumed.differences
    decaying = RunSettings(output=tmp_path / "other", trainer=TrainerSettings(lr_min_factor=0.1))
    run = finished_step(decaying)
    with pytest.raises(ValueError, match=f"--trainer.{flag} was 1 and is now 2, .* schedule"):
        resume.resolve_resume(replace(decaying, resume=str(run), trainer=TrainerSettings(lr_min_factor=0.1, **twice)))


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        (TrainerSettings(lora=LoraSettings(4)), "LoRA"),
        (TrainerSettings(reference=True), "reference"),
    ],
)
def test_another_model_is_refused_where_a_checkpoint_does_not_hold_all_weights(
    tmp_path: Path, trainer: TrainerSettings, reason: str
) -> None:
    run = finished_step(RunSettings(output=tmp_path, trainer=trainer))
    other = RunSettings(model="other/model", output=tmp_path, resume=str(run), trainer=trainer)
    with pytest.raises(ValueError, match=f"--model was Qwen/Qwen3-0.6B and is now other/model, .*{reason}"):
        resume.resolve_resume(other)
    whole = RunSettings(output=tmp_path / "whole")
    run = finished_step(whole)
    resumed = resume.resolve_resume(replace(whole, model="other/model", resume=str(run)))
    assert resumed is not None and "model Qwen/Qwen3-0.6B -> other/model" in resumed.differences


def test_a_model_that_was_recorded_by_a_relative_path_or_without_a_commit_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As version 0.1 recorded it."""
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    for number, (before, now) in enumerate((("tiny", str(tmp_path / "tiny")), ("org/tiny", "org/tiny@1234"))):
        settings = RunSettings(model=before, output=tmp_path, trainer=TrainerSettings(lora=LoraSettings(rank=1)))
        run = finished_step(settings, name=str(number))
        resumed = resume.resolve_resume(replace(settings, model=now, resume=str(run)))
        assert resumed is not None and not [change for change in resumed.differences if "model" in change]
        with pytest.raises(ValueError, match="--model was"):
            resume.resolve_resume(replace(settings, model="org/other@1234", resume=str(run)))


def test_a_resume_repeats_the_flags_in_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder, or a Hub name, means the model that the run recorded, unless it exists here."""
    monkeypatch.chdir(tmp_path)
    for number, (recorded, given, model) in enumerate(
        [
            ("/home/me/models/tiny", "models/tiny", "/home/me/models/tiny"),
            ("org/tiny@1234", "org/tiny", "org/tiny@1234"),
            ("org/tiny@1234", "org/tiny@5678", "org/tiny@5678"),
            ("/home/me/models/tiny", "models/other", "models/other"),
        ]
    ):
        run = finished_step(RunSettings(model=recorded, output=tmp_path), name=str(number))
        settings = RunSettings(model=given, output=tmp_path)
        assert resume.with_recorded_model(replace(settings, resume=str(run))).model == model
        monkeypatch.setenv(supervisor.RESUMES, str(run))
        assert resume.with_recorded_model(settings).model == model
        monkeypatch.delenv(supervisor.RESUMES)
        assert resume.with_recorded_model(settings).model == given
    for damaged in ("{", "null"):
        (run / "settings.json").write_text(damaged)
        assert resume.with_recorded_model(replace(settings, resume=str(run))).model == given


def test_without_an_intact_checkpoint_the_saved_model_is_offered(tmp_path: Path) -> None:
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings)
    (run / "checkpoints" / "step-000003" / GROUPS).write_bytes(b"gr0ups")
    for saved in (False, True):
        if saved:
            (run / "model").mkdir()
        with pytest.raises(SettingsError, match=rf"{GROUPS} is damaged") as refused:
            resume.resolve_resume(replace(settings, resume=str(run)))
        assert (f"--model {run / 'model'}" in str(refused.value)) == saved


def test_lora_is_not_resumed_on_changed_base_weights(tmp_path: Path) -> None:
    saved = {"model.layers.0 (bfloat16)": 7, "model.layers.1 (bfloat16)": 8}
    manifest = Manifest(1, 1, 0, 0.0, {}, settings={"model": "/models/base"}, base_weights=saved)
    resumed = resume.Resumed(tmp_path, tmp_path / "step-000001", manifest, 1)
    for found in (saved, {}, {name.replace("bfloat16", "float32"): 9 for name in saved}):
        resumed.check_base_weights(found)
    with pytest.raises(SettingsError, match=r"/models/base .*step-000001.* model\.layers\.1 \(bfloat16\)\."):
        resumed.check_base_weights(saved | {"model.layers.1 (bfloat16)": 9})


def test_a_run_without_a_critic_cannot_be_resumed_with_one(tmp_path: Path) -> None:
    without, with_one = TrainerSettings(), TrainerSettings(critic=CriticSettings(lr=1e-5))
    saved = to_plain(RunSettings(output=tmp_path, trainer=without))
    del saved["trainer"]["critic"]  # a run from before critics were added
    run = finished_step(RunSettings(output=tmp_path, trainer=without), settings=saved)
    assert resume.resolve_resume(RunSettings(output=tmp_path, resume=str(run), trainer=without)) is not None
    with pytest.raises(ValueError, match="--trainer.critic.lr was None and is now 1e-05, .*no critic"):
        resume.resolve_resume(RunSettings(output=tmp_path, resume=str(run), trainer=with_one))
    run = finished_step(RunSettings(output=tmp_path / "other", trainer=with_one))
    faster = replace(with_one, critic=CriticSettings(lr=1e-4))
    resumed = resume.resolve_resume(RunSettings(output=tmp_path / "other", resume=str(run), trainer=faster))
    assert resumed is not None and "trainer.critic.lr 1e-05 -> 0.0001" in resumed.differences


def test_the_folder_is_truncated_to_the_checkpoint_and_the_resume_recorded(tmp_path: Path) -> None:
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings)
    for generation in (1, 2):
        resumed = resume.resolve_resume(replace(settings, resume=str(run), held_out=7))
        assert resumed is not None and (resumed.version, resumed.generation) == (3, generation)
        assert resume.take_folder(settings, resumed) == run.resolve()
    assert (run / "metrics.jsonl").read_text() == "before\n"
    rows = [json.loads(line) for line in (run / "resumes.jsonl").read_text().splitlines()]
    assert [(row["generation"], row["step"]) for row in rows] == [(1, 3), (2, 3)]
    assert "held_out 200 -> 7" in rows[0]["differences"]


def test_journals_from_before_a_generation_without_one_are_ignored(tmp_path: Path) -> None:
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings)
    since, calls = list[int](), list[tuple[int, int]]()

    async def replayable_batches(*arguments: int) -> dict[int, list[JournalBatch]]:
        calls.append(arguments)  # type: ignore[arg-type]
        return {0: []}

    async def replay(resumed: Resumed) -> list[str]:
        trainer = SimpleNamespace(replayable_batches=SimpleNamespace(call=replayable_batches))
        replayed = replay_steps(
            cast(Actors, SimpleNamespace(trainer=trainer)), resumed, 1, 9, 60, cast(OnReplayed, None)
        )
        return [line async for line in replayed]

    for mib in (64, 0, 64, 64):
        resumed = resume.resolve_resume(replace(settings, resume=str(run)))
        assert resumed is not None
        since.append(resumed.journal_since)
        assert asyncio.run(replay(resumed)) == []
        resume.take_folder(replace(settings, journal=JournalSettings(mib)), resumed)
    assert since == [0, 0, 2, 2] and calls == [(0, number) for number in since]


@pytest.mark.parametrize(
    ("damage", "since"),
    [
        (lambda line: line.replace(b"false", b"galse"), 2),
        (lambda line: line.replace(b'"journal"', b'"kournal"'), 2),
        (lambda line: line.replace(b'"generation": 2', b'"generation": 3'), 2),
        (lambda line: line[: len(line) // 2], 3),  # joined with the next line
        (lambda line: b"", 2),
        (lambda line: b"\xff" + line[1:], 2),
    ],
    ids=["no JSON", "another key", "another generation", "cut", "removed", "no text"],
)
def test_a_generation_whose_line_is_damaged_counts_as_one_without_a_journal(
    tmp_path: Path, damage: Callable[[bytes], bytes], since: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise batches from before it would be replayed."""
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings)
    for mib in (64, 0, 64):
        resumed = resume.resolve_resume(replace(settings, resume=str(run)))
        resume.take_folder(replace(settings, journal=JournalSettings(mib)), resumed)
    (run / "journal").mkdir()
    for generation in (1, 3):
        (run / "journal" / f"plan-{generation}.json").touch()
    path = run / "resumes.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + damage(lines[1]) + lines[2])
    resumed = resume.resolve_resume(replace(settings, resume=str(run)))
    assert resumed is not None and (resumed.generation, resumed.journal_since) == (4, since)
    if b"galse" in path.read_bytes():
        assert f"{path}: line 2, at byte {len(lines[0])}, is damaged" in caplog.text


def test_a_damaged_file_of_the_runs_state_or_settings_prevents_no_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings)
    for text in ('{"state": "fin', "[]", '{"state": 7, "cause": "", "goes_on": true}', "{}"):
        (run / "run.json").write_text(text)
        assert read_state(run)["goes_on"] is True and f"{run / 'run.json'} is damaged" in caplog.text
        caplog.clear()
        assert (found := resume.resolve_resume(replace(settings, resume="auto"))) and found.run == run.resolve()
    path, held_out = run / "settings.json", f'"held_out": {settings.held_out}'
    for damage in (lambda text: "{" + text, lambda text: text.replace(held_out, '"held_out": 7')):
        path.write_text(damage(path.read_text()))
        resume.note_settings(run, settings)
        assert folders.read_checked(path)["held_out"] == settings.held_out
    written = path.stat().st_ino
    resume.note_settings(run, settings)
    assert path.stat().st_ino == written, "unchanged settings are not written"


def test_lines_that_a_checkpoint_had_and_that_are_gone_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings, positions={"metrics.jsonl": 20})
    resume.take_folder(settings, resume.resolve_resume(replace(settings, resume=str(run))))
    assert f"{run.resolve() / 'metrics.jsonl'} has 13 bytes, but had 20" in caplog.text


def test_lines_that_a_checkpoint_had_and_that_are_zeros_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that lost what it had reported as written."""
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings, positions={"metrics.jsonl": 13})
    (run / "metrics.jsonl").write_bytes(b"before\n\0\0\0\0\0\0")
    resume.take_folder(settings, resume.resolve_resume(replace(settings, resume=str(run))))
    assert f"{run.resolve() / 'metrics.jsonl'} is damaged: no line ends at byte 13" in caplog.text


@pytest.mark.parametrize("left", ["line", "checkpoint", "plan"])
def test_a_generation_number_is_not_reused_while_any_file_of_it_is_left(tmp_path: Path, left: str) -> None:
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings, generation=7 if left == "checkpoint" else 0)
    if left == "line":
        (run / "resumes.jsonl").write_text('{"generation": 7}\n{"gene\n')
    elif left == "plan":
        (run / "journal").mkdir()
        for name in ("plan-7.json", "plan-2.pickle"):  # also of version 0.1
            (run / "journal" / name).touch()
    resumed = resume.resolve_resume(replace(settings, resume=str(run)))
    assert resumed is not None and resumed.generation == 8


def test_a_resume_that_cannot_be_recorded_fails(tmp_path: Path) -> None:
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings)
    resumed = resume.resolve_resume(replace(settings, resume=str(run)))
    (run / "resumes.jsonl").mkdir()
    with pytest.raises(OSError, match="resumes.jsonl"):
        resume.take_folder(settings, resumed)


def test_a_resume_survives_a_disk_that_refuses_settings_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unchanged settings are not written at all."""
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings, best=Measurement("held_out/accuracy", 0.5, 2))

    def full(path: Path, *_: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(resume, "write_whole", full)
    monkeypatch.setattr(folders, "write_whole", full)
    assert resume.take_folder(settings, resume.resolve_resume(replace(settings, resume=str(run)))) == run.resolve()
    resume.note_settings(run, settings)
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(run.resolve() / "best.json") in message
    resume.note_settings(run, replace(settings, held_out=7))
    assert re.search("settings.json .*No space left on device", caplog.text)


def test_a_resume_compares_with_the_settings_saved_in_the_checkpoint(tmp_path: Path) -> None:
    """Not with settings.json, which a resume with other settings may have written, even one that did not start."""
    settings = RunSettings(output=tmp_path, held_out=9)
    run = finished_step(settings)
    (run / "settings.json").write_text(json.dumps(to_plain(replace(settings, model="other/model"))))
    resumed = resume.resolve_resume(replace(settings, resume=str(run)))
    assert resumed is not None and not any(text.startswith("model") for text in resumed.differences)
    resumed = resume.resolve_resume(replace(settings, resume=str(run), model="third/model"))
    assert resumed is not None and "model Qwen/Qwen3-0.6B -> third/model" in resumed.differences
    before = (run / "settings.json").read_text()
    resume.take_folder(replace(settings, model="third/model"), resumed)
    assert (run / "settings.json").read_text() == before, "the checkpoint may be of another model"


@pytest.mark.parametrize(
    "given",
    [
        {"rollout": RolloutSettings(temperature=0.7)},
        {"rollout": RolloutSettings(top_k=50, top_p=0.9, keep_sampling_mask=True)},
        {"trainer": TrainerSettings(router_replay="replay")},
        {"trainer": TrainerSettings(tokens_per_microbatch=4096)},
    ],
)
def test_complete_groups_are_sampled_anew_where_they_do_not_fit_the_changed_settings(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    old, new = RunSettings(output=tmp_path), RunSettings(output=tmp_path, **given)
    run = finished_step(old)
    changed = resume.open_run(run, new)
    assert changed.buffer(()).resample and any("sampled anew" in text for text in changed.differences)
    larger = RunSettings(output=tmp_path, trainer=TrainerSettings(tokens_per_microbatch=16384, lr=1e-5), steps=300)
    assert not resume.open_run(run, old).buffer(()).resample and not resume.open_run(run, larger).buffer(()).resample


def test_packages_that_differ_are_listed(tmp_path: Path) -> None:
    settings = RunSettings(output=tmp_path)
    installed = versions_of_packages()
    assert {"torch", "numpy", "tokenizers"} <= installed.keys()
    run = finished_step(settings, packages={"gone": "1", **installed, "tokenizers": "0.0.1"})
    resumed = resume.resolve_resume(replace(settings, resume=str(run)))
    assert resumed is not None
    assert resumed.differences == ("gone 1 -> none", f"tokenizers 0.0.1 -> {installed['tokenizers']}")


def test_a_resume_removes_a_broken_newer_checkpoint(tmp_path: Path) -> None:
    settings = RunSettings(output=tmp_path)
    finished_step(settings, version=3)
    run = finished_step(settings, version=5)
    (run / "checkpoints" / "step-000005" / GROUPS).write_bytes(b"")
    resume.take_folder(settings, resume.resolve_resume(replace(settings, resume=str(run))))
    assert list(folders.complete(run / "checkpoints")) == [3]


@pytest.mark.parametrize("best", [None, Measurement("held_out/accuracy", 0.5, 2)])
def test_the_best_result_is_that_of_the_checkpoint(tmp_path: Path, best: Measurement | None) -> None:
    """A result of undone weights could otherwise remain the best forever."""
    settings = RunSettings(output=tmp_path)
    run = finished_step(settings, best=best)
    (run / "best.json").write_text('{"metric": "held_out/accuracy", "value": 0.9, "version": 4}')
    resume.take_folder(settings, resume.resolve_resume(replace(settings, resume=str(run))))
    found = [Measurement(**json.loads(path.read_text())) for path in run.glob("best.json")]
    assert found == ([best] if best else [])


def test_auto_takes_the_newest_run_that_has_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunSettings(output=tmp_path, resume="auto")
    assert resume.resolve_resume(settings) is None
    first, second, third = (finished_step(settings, name=name) for name in "123")
    for age, run in enumerate((third, second, first)):
        os.utime(run / "settings.json", (1e9 - age, 1e9 - age))
    note_state(third, "finished")
    resumed = resume.resolve_resume(settings)
    assert resumed is not None and resumed.run == second.resolve()
    assert resume.resolve_resume(replace(settings, resume=None)) is None, "no resume was requested"
    monkeypatch.setenv(supervisor.RESUMES, str(first))
    resumed = resume.resolve_resume(settings)
    assert resumed is not None and resumed.run == first.resolve()


def torchrun(monkeypatch: pytest.MonkeyPatch, job: str, restarts: int) -> None:
    """Set the environment variables of rank 0."""
    for name, value in {"RUN_ID": job, "RESTART_COUNT": str(restarts)}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("RANK", "0")


OTHER_AGENT = [1, 0.0]
"""Process id and start time of an agent; process 1 is never the parent of a test."""


@pytest.mark.parametrize(
    ("job", "launched_by", "restarts", "state", "resumes"),
    [
        ("job 7", "job 7", 1, "running", True),  # its controller was killed
        ("job 7", "job 7", 0, "interrupted", True),  # a machine joined, or the batch system restarted the job
        ("job 7", "job 6", 0, "running", False),
        ("job 7", "job 6", 1, "running", False),
        ("job 7", "job 7", 0, "failed", False),  # started again by hand after an error was fixed
        ("job 7", "job 7", 0, "finished", False),
        ("none", None, 1, "running", True),  # started by the same agent
        ("none", None, 0, "interrupted", True),
        ("none", OTHER_AGENT, 0, "running", False),  # another job: all jobs without an id have this one
        ("none", OTHER_AGENT, 1, "running", False),
        ("none", "none", 1, "running", False),
    ],
)
def test_torchrun_resumes_the_run_of_the_same_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    launched_by: str | list[float] | None,
    restarts: int,
    state: str,
    resumes: bool,
) -> None:
    """It resumes no run of another job, whatever agent and restart count. ``launched_by`` None is this agent."""
    torchrun(monkeypatch, job, restarts)
    settings = RunSettings(output=tmp_path)
    assert resume.resolve_resume(settings) is None
    run = finished_step(settings)
    note_state(run, state, goes_on=state == "running")
    if launched_by is not None:
        values = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(values | {"launcher": launched_by}))
    resumed = resume.resolve_resume(settings)
    assert (resumed is not None) == resumes
    if resumed is not None:
        folder_lock.release(resumed.run)
        assert resumed.run == run.resolve()


@pytest.mark.parametrize("job", ["job 7", "none"])
def test_torchrun_does_not_restart_a_run_that_finished_or_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """It does not resume an older run of the job instead."""
    settings = RunSettings(output=tmp_path)
    torchrun(monkeypatch, job, 1)
    older, run = (finished_step(settings, name=name) for name in "12")
    os.utime(older / "settings.json", (1e9, 1e9))
    note_state(run, "failed", "ValueError: no such word", goes_on=False)
    with pytest.raises(ValueError, match=f"torchrun .*{run} .*no such word"):
        resume.resolve_resume(settings)
    note_state(run, "finished")
    with pytest.raises(ValueError, match=f"torchrun .*{run} .*finished"):
        resume.resolve_resume(settings)


HOLDS = """
import sys
from pathlib import Path
from monarch_rl.runtime import folder_lock
print(folder_lock.take(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_a_running_run_is_refused_by_name_and_skipped_by_auto(tmp_path: Path) -> None:
    settings = RunSettings(output=tmp_path, resume="auto")
    older, newer = (finished_step(settings, name=name) for name in "12")
    os.utime(older / "settings.json", (1e9, 1e9))
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen([*command, str(newer)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "True\n"
        with pytest.raises(ValueError, match=f"resume {newer}: .*process {os.getpid()}"):
            resume.resolve_resume(replace(settings, resume=str(newer)))
        resumed = resume.resolve_resume(settings)
        assert resumed is not None and resumed.run == older.resolve()
        tried = patience.run([*command, str(older)], stdin=subprocess.DEVNULL)
        assert tried.stdout == "False\n", "it is locked from here on"
        holder.kill()
        patience.exit_code(holder)
        resumed = resume.resolve_resume(settings)
        assert resumed is not None and resumed.run == newer.resolve()
    for run in (older, newer):
        folder_lock.release(run)


def test_a_run_without_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    assert resume.how_to_resume(tmp_path / "none") == "it has no checkpoint to resume from"
    run = finished_step(RunSettings(output=tmp_path))
    assert resume.how_to_resume(run) == f"resume it with --resume {run}"
    with pytest.raises(ValueError, match=f"resume {tmp_path}/none: .*no checkpoint"):
        resume.resolve_resume(RunSettings(output=tmp_path, resume=str(tmp_path / "none")))
