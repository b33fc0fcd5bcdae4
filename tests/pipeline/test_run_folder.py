"""Names of run folders, and what ``run.json`` says of a run: a real git repository, and programs that are started."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_rl.pipeline import provenance, resume
from monarch_rl.pipeline.run_folder import new_folder, note_hosts, note_state, read_state, recipe_name, recording_state
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.runtime import machine
from monarch_rl.runtime.signals import Interrupts
from tests.patience import run
from tests.pipeline.test_resume import finished_step

PROGRAM = """
import signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from monarch_rl.pipeline.run_folder import recording_state
from monarch_rl.runtime.signals import interrupts
api_key = "correct-horse"
folder, how, resumed_from = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if sys.argv[3] else None
with interrupts() as interrupted, recording_state(folder, interrupted, "mine", resumed_from):
    assert '"running"' in (folder / "run.json").read_text()
    if how == "raises":
        raise KeyError("no such word")
"""
KEY = "hf_aB3dE6gH9jK2mN5pQ8sT1vW4yZ7b"
ROWS = [
    {"step": 0, "held_out/accuracy": 0.5, "held_out/reward": 0.1, "held_out/accuracy_low": 0.4},
    {"step": 1, "reward/mean": 0.2},
    {"step": 1, "held_out/accuracy": None},
    {"step": 2, "held_out/accuracy": 0.75, "held_out/reward": 0.3},
    {"step": 3, "reward/mean": 0.4},
]


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
    done = run(["git", "-C", folder, *identity, *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe in a git repository of its own, committed."""
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "my_recipe.py"
    path.write_text(PROGRAM)
    git(path.parent, "init", "--quiet")
    git(path.parent, "add", "my_recipe.py")
    git(path.parent, "commit", "--quiet", "-m", "a recipe")
    return path


def test_run_json_says_where_a_run_comes_from_and_what_came_of_it(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [sys.executable, str(recipe), str(folder), "ends", "", f"--hub.token={KEY}"]
    done = run(command)
    assert done.returncode == 0, done.stderr
    found = read_state(folder)
    assert KEY not in (folder / "run.json").read_text()
    assert (found["format"], found["name"], found["state"], found["goes_on"]) == (1, "mine", "finished", False)
    assert found["command"][1:] == [*command[1:-1], "--hub.token=[redacted]"]
    assert {type(found[name]) for name in ("started", "ended", "time")} == {float}
    assert found["attempts"] == [{"started": found["started"], "command": found["command"], "resumed_from": None}]
    assert found["recipe"] == {"path": str(recipe), "sha256": hashlib.sha256(recipe.read_bytes()).hexdigest()}
    assert (folder / "recipe.py").read_text() == PROGRAM.replace("correct-horse", "[redacted]")
    assert found["git"] == {"commit": git(recipe.parent, "rev-parse", "HEAD"), "dirty": False}
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "numpy", "sglang"} <= found["packages"].keys() and "version" in found
    (machine,) = found["hosts"]
    assert machine["cores"] == len(os.sched_getaffinity(0)) and machine["memory_gib"] > 0 and machine["name"]
    assert found["steps"] == 3
    assert found["held_out"] == {"metric": "held_out/accuracy", "first": [0, 0.5], "last": [2, 0.75]}

    recipe.write_text(PROGRAM + "# changed\n")
    checkpoint = folder / "checkpoints" / "step-000003"
    assert run([sys.executable, recipe, folder, "raises", checkpoint]).returncode == 1
    again = read_state(folder)
    assert (again["state"], again["cause"]) == ("failed", "KeyError: 'no such word'")
    assert again["started"] == found["started"] and again["ended"] != found["ended"] and again["git"]["dirty"]
    assert again["attempts"][0] == found["attempts"][0] and len(again["attempts"]) == 2
    assert again["attempts"][1]["resumed_from"] == str(checkpoint)
    assert again["recipe"]["sha256"] != found["recipe"]["sha256"]


def test_a_folder_outside_git_a_machine_without_git_and_one_that_hangs_have_no_commit(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provenance.git_state(recipe.parent) is not None
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert provenance.git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_state(recipe.parent) is None and machine.describe()["gpus"] == []
    (tmp_path / "git").write_text(f"#!{sys.executable}\nimport time\ntime.sleep(1000)\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(machine, "PROGRAM_S", 0.2)
    assert provenance.git_state(recipe.parent) is None


def test_gpus_and_their_driver_are_those_that_nvidia_smi_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = "NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15"
    (tmp_path / "nvidia-smi").write_text(f"#!{sys.executable}\nprint('{row}\\n{row}')\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = machine.describe()
    assert (found["gpus"], found["driver"]) == (["NVIDIA H100 80GB HBM3, 81559 MiB"] * 2, "570.86.15")


class Monitor:
    """The monitor of a process on a machine of this name; of a lost process if it is empty."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.report = SimpleNamespace(call_one=self._report)
        self.describe_machine = SimpleNamespace(call_one=self._describe)

    async def _report(self) -> SimpleNamespace:
        if not self._name:
            raise RuntimeError("its process is lost")
        return SimpleNamespace(machine=self._name)

    async def _describe(self) -> dict[str, str]:
        return {"name": self._name}


def test_each_machine_of_a_run_is_recorded_once_the_controller_s_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = machine.own_id()
    monitors: Any = [Monitor(name) for name in (here, "b", "a", here, "", "a", "b")]
    with recording_state(tmp_path, Interrupts()):
        asyncio.run(note_hosts(tmp_path, monitors))
        found = json.loads((tmp_path / "run.json").read_text())
    assert [host["name"] for host in found["hosts"]] == [socket.gethostname(), "b", "a"]
    assert found["state"] == "running" and "its process is lost" in caplog.text
    assert len(json.loads((tmp_path / "run.json").read_text())["hosts"]) == 3


def test_the_held_out_metric_is_the_chosen_one_or_the_first_that_there_is(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert provenance.results(metrics) == {"steps": None, "held_out": None}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"step": 4, "held')  # killed in a line
    assert provenance.results(metrics, "held_out/reward")["held_out"] == {
        "metric": "held_out/reward",
        "first": [0, 0.1],
        "last": [2, 0.3],
    }
    metrics.write_text('{"step": 7, "held_out/sums/reward": 1.0, "held_out/sums/seat/a": 2.0}\n')
    found = provenance.results(metrics)
    assert found == {"steps": 7, "held_out": {"metric": "held_out/sums/reward", "first": [7, 1.0], "last": [7, 1.0]}}


def test_a_name_begins_the_folder_and_no_two_runs_share_one(tmp_path: Path) -> None:
    folders = [new_folder(tmp_path / "runs", "x") for _ in range(3)]
    assert len({*folders}) == 3 and all(folder.is_dir() and folder.name.startswith("x-2") for folder in folders)
    assert new_folder(tmp_path / "runs").name.startswith(f"{recipe_name()}-2")


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "-x", "a b", "a*", "\u00e4", "x" * 101])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"name .* must be .* letters, digits"):
        RunSettings(name=name)
    assert RunSettings(name="lr-1e.5_b").name == "lr-1e.5_b"


def test_auto_resumes_the_newest_run_of_the_name(tmp_path: Path) -> None:
    settings = RunSettings(output=tmp_path, resume="auto")
    found = {}
    for name in ("a", "a-b", recipe_name()):
        found[name] = finished_step(settings, name=name).rename(tmp_path / f"{name}-20261128-211403")
        note_state(found[name], "interrupted", more={"name": name})
    for name, folder in found.items():
        resumed = resume.resolve_resume(replace(settings, name="" if name == recipe_name() else name))
        assert resumed is not None and resumed.run == folder.resolve() and not resumed.differences
    assert resume.resolve_resume(replace(settings, name="b")) is None


def test_keys_in_settings_are_neither_recorded_nor_a_change(tmp_path: Path) -> None:
    settings = RunSettings(output=tmp_path, evaluation=replace(RunSettings().evaluation, best=KEY))
    folder = resume.take_folder(settings, None)
    assert KEY not in (folder / "settings.json").read_text() and "[redacted]" in (folder / "settings.json").read_text()
    earlier = finished_step(settings)  # its manifest was written by a version that kept it
    assert not resume.open_run(earlier, settings).differences


def test_the_cause_of_a_failure_is_recorded_without_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "correct horse")
    note_state(tmp_path, "failed", f"RefusedError: neither 'correct horse' nor {KEY} is a key of this service")
    state = json.loads((tmp_path / "run.json").read_text())
    assert state["cause"] == "RefusedError: neither '[redacted]' nor [redacted] is a key of this service"
