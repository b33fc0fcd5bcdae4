"""benchmarks/trl.py: the measurements of a run, and that both sides get the same settings."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.algorithms.losses import Aggregation
from tests import patience
from tests.patience import wait_until
from tools.make_tiny_model import Settings as ModelSettings
from tools.make_tiny_model import write_random_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def processes() -> Any:
    return _imported("trl_processes")


@pytest.fixture(scope="module")
def trl() -> Any:
    return _imported("trl")


def _imported(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))  # the benchmark imports its own modules
        return importlib.import_module(name)


RUN = """
import json, os, pathlib, subprocess, sys, time
looks, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])

def looked_at():
    before = looks.stat().st_size
    while looks.stat().st_size < before + 2:  # a look that began before now may have missed it
        time.sleep(0.01)

if len(sys.argv) > 3:
    while time.process_time() < 1.0: pass
    looked_at()
    (folder / f"used-{sys.argv[3]}").write_text(str(time.process_time()))
    os._exit(0)
with (folder / "metrics.jsonl").open("w", buffering=1) as lines:
    lines.write(json.dumps({"step": 0, "held_out/accuracy": 0.5}) + "\\n")
    for step in range(1, 4):
        subprocess.run([sys.executable, *sys.orig_argv[1:], str(step)])
        lines.write(json.dumps({"step": step, "time/step_s": 1.0, "reward/mean": step / 4}) + "\\n")
        looked_at()
"""
"""A run of three steps, each computed by a process that has ended when the step is logged."""


def test_cpu_time_of_processes_that_have_ended_counts(
    processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, steps_in = tmp_path / "looks", processes.steps_in
    looks.touch()
    (folder := tmp_path / "run").mkdir()

    def look(there: Path) -> list[dict[str, Any]]:
        """Record that a look begins."""
        with looks.open("a") as file:
            file.write(".")
        return list(steps_in(there))

    monkeypatch.setattr(processes, "steps_in", look)
    command = [sys.executable, "-c", RUN, str(looks), str(folder)]
    found = processes.measure(command, {"A": "b"}, tmp_path, "controller", [1, 3], 600.0)
    assert [row["step"] for row in found.steps] == [1, 2, 3]
    assert sorted(found.cpu_s) == [1, 3]
    children = found.cpu_s[3]["other"] - found.cpu_s[1]["other"]
    used = sum(float((folder / f"used-{step}").read_text()) for step in (2, 3))
    assert 2 * 0.95 <= children <= used + 0.1, "each process used a second, and no more than it reported"
    assert found.wall_s[1] < found.wall_s[3] < found.total_s
    assert found.total_cpu_s >= sum(found.cpu_s[3].values())


def test_a_run_that_fails_is_shown(processes: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(RuntimeError, match="exit code 1:\nno such model"):
        processes.measure(command, {}, tmp_path, "controller", [1], 300.0)


def test_a_run_that_does_not_end_is_ended(processes: Any, tmp_path: Path) -> None:
    program = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    with pytest.raises(RuntimeError, match="3 s"):
        processes.measure([sys.executable, "-c", program], {}, tmp_path, "controller", [1], 3.0)
    text = (tmp_path / "log").read_text()
    if text:  # otherwise it was ended before it began
        with pytest.raises(ProcessLookupError):
            os.kill(int(text), 0)


def test_a_run_ends_with_the_driver(tmp_path: Path) -> None:
    run = "import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    driver = "import pathlib, sys, trl_processes\n"
    driver += f"command = [sys.executable, '-c', {run!r}]\n"
    driver += f"trl_processes.measure(command, {{}}, pathlib.Path({str(tmp_path)!r}), 'run', [1], 600.0)"
    process = subprocess.Popen([sys.executable, "-c", driver], env=os.environ | {"PYTHONPATH": _path()})
    try:
        wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().endswith("\n"), "its pid")
    finally:
        process.kill()
        process.wait()
    pid = int((tmp_path / "log").read_text())
    wait_until(lambda: _has_ended(pid), "the end of the run")


def _path() -> str:
    return os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])


def _has_ended(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_all_aggregations_and_some_advantages_have_a_name_in_trl(trl: Any) -> None:
    sides = sys.modules["trl_sides"]
    assert set(sides.LOSS_TYPES) == set(get_args(Aggregation))
    assert set(sides.REWARD_SCALES) <= set(ADVANTAGES)


def test_trl_gets_the_settings_of_the_recipe(trl: Any, tmp_path: Path) -> None:
    sides = sys.modules["trl_sides"]
    job = sides.JOBS["syllogism"]
    arguments = sides.recipe_arguments(job, tmp_path, 3, 7)
    described = sides.describe(arguments, sides.sides(0)["trl2"], 3, 40, tmp_path)
    assert described["task"]["name"] == "syllogism"
    assert described["task"]["seed"] == 3
    assert (described["steps"], described["groups_per_step"], described["group_size"]) == (7, 4, 8)
    assert (described["lr"], described["lr_warmup_steps"], described["max_new_tokens"]) == (1e-5, 5, 8)
    assert (described["loss_type"], described["scale_rewards"], described["threads"]) == ("dr_grpo", "none", 2)
    assert json.loads(json.dumps(described)) == described | {"betas": [0.9, 0.95]}


def test_measurements_leave_out_the_first_steps(trl: Any, processes: Any) -> None:
    steps = [{"time/step_s": 9.0 if step < 2 else 0.5, "reward/mean": step / 10} for step in range(10)]
    cpu_s = {1: {"TRL": 7.0}, 2: {"TRL": 8.0}, 10: {"TRL": 12.0, "helpers": 0.8}}
    measured = processes.Measured(steps, cpu_s, {1: 10.0, 2: 19.0, 10: 23.0}, 25.0, 14.0, 0.1)
    side = sys.modules["trl_sides"].Side("TRL", threads=1)
    summary = trl.Result(side, measured, 2, {"accuracy": 0.5, "reward": 0.6}).summarise(samples_per_step=4)
    assert summary["step_s"] == 0.5
    assert summary["step_cpu_s_by_part"] == pytest.approx({"TRL": 0.5, "helpers": 0.1})
    assert summary["step_cpu_s"] == pytest.approx(0.6)
    assert (summary["first_step_s"], summary["first_step_cpu_s"]) == (10.0, 7.0)
    assert summary["reward_by_samples"] == pytest.approx({"8": 0.05, "20": 0.3, "32": 0.6, "40": 0.85})
    shown = trl.table({"TRL": [summary]}, [0.25])
    assert "| seconds a step | 0.500 |" in shown
    assert "| held out (before: 25.0%) | 50.0% |" in shown


PADDED = """
import json, sys, torch
from trl_evaluate import answer
from transformers import AutoModelForCausalLM
from monarch_rl.model.chat import ChatTemplate
folder, prompts = sys.argv[1], ["cat -> ", "elephant -> ", "a -> ", "word -> "]
model, template = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ChatTemplate(folder)
together = answer(model, template, prompts, 6)
print(json.dumps([together, [answer(model, template, [prompt], 6)[0] for prompt in prompts]]))
"""
"""A separate program, because SGLang patches transformers in the process of the tests."""


@pytest.mark.slow
def test_padding_changes_no_answer_of_the_evaluation(tmp_path: Path) -> None:
    write_random_model(tmp_path, ModelSettings(hidden_size=32, layers=1))
    command = [sys.executable, "-c", PADDED, str(tmp_path)]
    variables = os.environ | {"PYTHONPATH": _path()}
    done = patience.run(command, env=variables, seconds=400)
    assert done.returncode == 0, done.stderr[-2000:]
    together, alone = json.loads(done.stdout.splitlines()[-1])
    assert together == alone
    assert len(set(together)) > 1
