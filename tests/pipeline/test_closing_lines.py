"""The last lines of a run, from the files of its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.pipeline import closing_lines as closing
from monarch_rl.pipeline import run_folder
from monarch_rl.pipeline.closing_lines import closing_lines, page_lines, page_of_failed
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.pipeline.start import schedule
from monarch_rl.rollout.evaluation import EvaluationSettings
from monarch_rl.runtime import supervisor
from tests.report.synthetic import write_run
from tests.report.test_page import data_of


def evaluated(step: int, accuracy: float, name: str = "held_out") -> dict[str, Any]:
    """The line of an evaluation."""
    key = f"{name}/accuracy"
    return {"step": step, key: accuracy, f"{key}_low": accuracy - 0.1, f"{key}_high": accuracy + 0.1}


def of_metrics(folder: Path, *lines: Mapping[str, Any]) -> str:
    """The line ``done`` of a run of 12 steps with these lines in its metrics."""
    rows = [json.dumps({**line, "seconds": 20.0 * (place + 1)}) for place, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("".join(row + "\n" for row in rows))
    sets = tuple({key.split("/")[1] for line in lines for key in line if key.count("/") == 2})
    return closing_lines(folder, RunSettings(evaluation=EvaluationSettings(sets=sets)), 12, warm_up_steps=3)[0]


def test_the_first_and_the_last_evaluation_are_named_with_their_steps(tmp_path: Path) -> None:
    step: dict[str, Any] = {"step": 4, "reward/mean": 0.5}
    line = of_metrics(tmp_path, evaluated(3, 0.35), step, evaluated(9, 0.2), evaluated(15, 0.44), step)
    after = "held-out accuracy 35.0% @0 -> 44.0% @12 [34.0%, 54.0%]"
    assert line.split(maxsplit=1) == ["done:", f"12 steps in 1 min 40 s; {after}"]
    named = of_metrics(tmp_path, step, evaluated(15, 0.44, "held_out/hard"))
    assert named.endswith("in 40 s; held-out hard accuracy 44.0% @12 [34.0%, 54.0%]")
    only_rewards: list[dict[str, Any]] = [{"step": 0, "held_out/reward": 0.25}, {"step": 15, "held_out/reward": None}]
    assert of_metrics(tmp_path, *only_rewards).endswith("; held-out reward 0.250 @0")
    assert of_metrics(tmp_path, step).endswith("12 steps in 20 s")


def test_each_command_stands_on_a_line_and_only_if_it_has_something_to_work_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing.sys, "argv", ["recipes/own_data.py", "--steps", "12"])
    settings = RunSettings(steps=12)
    none = dict(line.split(": ", 1) for line in closing_lines(tmp_path, settings, 1))
    assert none["done"].strip() == "1 step in 0 s"  # no metrics were written
    assert none["files"].strip() == f"metrics and rollouts are in {tmp_path}"
    assert list(none) == ["done", "files", "look", "curves", "table"]
    monkeypatch.setattr(closing, "complete", lambda folder: {12: folder / "step-000012"})
    lines = closing_lines(tmp_path, settings, 12, model=tmp_path / "model")
    assert len({len(line) - len(line.split(":", 1)[1].lstrip()) for line in lines}) == 1, "texts are not aligned"
    assert lines[1].endswith(f"metrics, rollouts and the model are in {tmp_path}")
    assert [line.split(maxsplit=1)[1] for line in lines[-3:]] == [
        f"python tools/export.py {tmp_path} OUT",
        f"python tools/evaluate.py {tmp_path} --task recipes/own_data.py",
        f"the same command with --resume {tmp_path} --steps 24",
    ]


def test_the_page_of_an_ended_run_and_its_problem_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 31):
            row = {"reward/mean": 0.0, "reward/equal_groups_share": 1.0, "reward/all_wrong_share": 1.0}
            file.write(json.dumps({"step": step, "seconds": float(step), **row}) + "\n")
    page, problem = page_lines(run)
    assert page.split() == ["page:", str(run / "report.html")] and (run / "report.html").stat().st_size > 50_000
    assert problem.startswith("problem:") and "100% of the groups" in problem and str(run) in problem


@pytest.mark.parametrize("why", ["no run", "slow"])
def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, why: str) -> None:
    (line,) = page_lines(tmp_path, 0.0 if why == "slow" else closing.PAGE_S)
    assert line.startswith("page: ") and f"monarch-rl report {tmp_path}" in line
    assert (str(tmp_path) in line.partition(";")[0]) or why == "slow"


def failed_run(folder: Path, **state: Any) -> Path:
    """A run of this process that has ended so, by its ``run.json``."""
    run = write_run(folder, state="failed")
    values = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(values | state))
    return run


def end_of(run: Path, error: BaseException, restarts: int = 3) -> bool:
    """Whether a run that ends with ``error`` has a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "_run_of_this_process", run)
        with pytest.raises(type(error)) as raised, page_of_failed(restarts):
            raise error
    assert raised.value is error
    return (run / "report.html").exists()


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_a_failed_run_has_its_page_which_its_error_follows(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = failed_run(tmp_path / "run", state=state, cause="SIGINT")
    assert end_of(run, KeyError("of the recipe") if state == "failed" else SystemExit(130))
    assert capsys.readouterr().out.split() == ["page:", str(run / "report.html")]
    assert data_of((run / "report.html").read_text())["runs"][0]["state"]["state"] == state


def test_a_run_has_a_page_unless_it_may_be_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of an unknown kind counts as the loss of a process: another attempt begins at the newest checkpoint."""
    attempted = list[Path]()

    def note(run: Path, limit_s: float) -> list[str]:
        attempted.append(run)
        return []

    monkeypatch.setattr(closing, "page_lines", note)
    run = failed_run(tmp_path / "run", goes_on=True)

    def has_page(restarts: int = 3, environment: Mapping[str, str] = MappingProxyType({})) -> bool:
        attempted.clear()
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            end_of(run, RuntimeError("a CUDA error"), restarts)
        return attempted == [run]

    assert has_page(), "there is no checkpoint"
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    assert has_page(restarts=0) and not has_page()
    assert not has_page(restarts=0, environment={supervisor.NOTES: "1"})
    for restarts in ("0", "2"):
        torchrun = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "TORCHELASTIC_MAX_RESTARTS": restarts}
        assert has_page(environment=torchrun) == (restarts == "0")


def test_a_run_has_no_page_where_there_is_no_time_for_it_or_nothing_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> list[str]:
        raise AssertionError("a page was attempted")

    monkeypatch.setattr(closing, "page_lines", refused)
    monkeypatch.setattr(closing, "DISK_S", 0.2)
    for name in ("SIGTERM", "SIGUSR1"):
        assert not end_of(failed_run(tmp_path / name, state="interrupted", cause=name), SystemExit(143))
    (empty := failed_run(tmp_path / "empty")).joinpath("metrics.jsonl").unlink()
    assert not end_of(empty, ValueError("before the first step"))
    (blocked := failed_run(tmp_path / "blocked")).joinpath("run.json").unlink()
    os.mkfifo(blocked / "run.json")  # as on a disk that does not answer
    assert not end_of(blocked, ValueError("of the recipe"))
    with pytest.raises(ValueError, match="its settings"), page_of_failed(3):
        raise ValueError("its settings: there is no run")
    assert not capsys.readouterr().out


def test_a_signal_ends_the_page_and_not_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(closing, "page_lines", interrupted)
    assert not end_of(failed_run(tmp_path / "run"), KeyError("of the recipe"))


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (
            BufferSettings(2),
            ["Asynchronous", "2 versions newer", "lag <= 2", "at most 8 groups, then the trainer waits"],
        ),
        (BufferSettings(1, late="drop"), ["1 version newer", "lag <= 1", "is dropped"]),
        (BufferSettings(0), ["Synchronous", "lag <= 0"]),
        (BufferSettings(None), ["without a bound", "any age"]),
        (BufferSettings(2, replay=3), ["each trained up to 3 times"]),
    ],
)
def test_the_schedule_is_explained(buffer: BufferSettings, words: list[str]) -> None:
    first, second = schedule(32, 8, buffer).splitlines()
    assert first.startswith("Each step trains on 32 prompts x 8 episodes = 256 episodes")
    assert not [word for word in words if word not in second], second
