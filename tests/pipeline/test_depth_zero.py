"""With max_policy_lag 0 the system is synchronous RL: it makes the updates of a plain loop, also after a resume."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.forking import run_forked
from tests.patience import exit_code

ROOT = Path(__file__).parents[2]
TASK = {
    "name": "spell_backward",
    "config": '{"min_word_len": 3, "max_word_len": 3}',
    "template": "{question}",
    "pass_mark": 0.0,
}
SETTINGS = {"task": TASK, "steps": 3, "groups_per_step": 4, "group_size": 4, "max_new_tokens": 6, "lr": 1e-3, "seed": 5}


PROGRAMS_S = 1200.0
"""Deadline of a program by the clock of ``tests/patience.py``; about 40 s when nothing else runs."""


def run(scratch: Path, *commands: list[str]) -> None:
    """Run Python programs concurrently, because their imports take long; an error of one fails the test."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    programs = []
    try:
        for number, command in enumerate(commands):
            with (log := scratch / f"program{number}.log").open("w") as output:
                command = [sys.executable, *command]
                program = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            programs.append((program, log))
        for program, log in programs:
            assert exit_code(program, seconds=PROGRAMS_S) == 0, log.read_text()[-6000:]
    finally:
        for program, _ in programs:
            program.kill()
            exit_code(program)


def forget_after(folder: Path, step: int) -> None:
    """Remove a run's later checkpoints, as if it had ended after ``step``."""
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@dataclass
class Compared:
    """A run without lag and a plain loop with the same settings."""

    model: Path
    folder: Path
    """Folder of the run."""
    command: list[str]
    """Command of the run."""
    plain: Path
    """File with the weights of the plain loop."""

    def check(self, trained: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Check that the weights of a run are the expected ones."""
        start = weights(self.model)
        assert trained.keys() == expected.keys()
        for name in expected:
            moved = (expected[name] - start[name]).abs().max()
            assert moved > 1e-3, name
            # Adam divides by the gradient's size: where that is almost 0, rounding decides the direction.
            assert (trained[name] - expected[name]).abs().max() < 0.02 * moved, name


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    scratch = tmp_path_factory.mktemp("depth_zero")
    model = scratch / "model"
    # A random model gets almost equal rewards, so that rounding errors would decide its updates.
    size = ["--hidden-size", "64", "--layers", "2", "--steps", "40", "--ranks", "1"]
    task = [part for name, value in TASK.items() for part in (f"--task.{name.replace('_', '-')}", str(value))]
    made = run_forked("trainer", ["tools/make_tiny_model.py", "--output", model, *size, *task], PROGRAMS_S, folder=ROOT)
    assert made.returncode == 0, made.stderr
    arguments = {
        "model": model,
        "output": scratch / "runs",
        "steps": SETTINGS["steps"],
        "groups-per-step": SETTINGS["groups_per_step"],
        "buffer.max-policy-lag": 0,
        "held-out": 4,
        "trainer.ranks": 2,
        "generator.replicas": 1,
        "rollout.group-size": SETTINGS["group_size"],
        "rollout.max-new-tokens": SETTINGS["max_new_tokens"],
        "rollout.seed": SETTINGS["seed"],
        "trainer.lr": SETTINGS["lr"],
        "trainer.lr-warmup-steps": 0,
        "trainer.loss.max-tokens": SETTINGS["max_new_tokens"],
        "checkpoint.every-steps": 1,
        "checkpoint.keep": 3,
    }
    plain = scratch / "plain.safetensors"
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    command = ["recipes/grpo.py", *task, *flags]
    run(scratch, command, ["tests/pipeline/plain_loop.py", str(model), json.dumps(SETTINGS), str(plain)])
    (folder,) = (scratch / "runs").iterdir()
    return Compared(model, folder, command, plain)


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.core
@pytest.mark.timeout(3 * PROGRAMS_S)
def test_depth_zero_makes_the_updates_of_a_plain_synchronous_loop(compared: Compared) -> None:
    rows = [json.loads(line) for line in (compared.folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["lag/max"] for row in rows if "lag/max" in row} == {0}
    assert any(0 < row.get("reward/mean", 0) < 1 for row in rows), "without rewards nothing would be compared"
    compared.check(weights(compared.folder / "model"), load_file(compared.plain))


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(3 * PROGRAMS_S)
def test_a_run_resumed_after_its_first_step_makes_the_same_updates(compared: Compared, tmp_path: Path) -> None:
    trained = weights(compared.folder / "model")
    forget_after(compared.folder, 1)
    run(tmp_path, [*compared.command, "--resume", str(compared.folder)])
    assert json.loads((compared.folder / "resumes.jsonl").read_text())["step"] == 1
    compared.check(weights(compared.folder / "model"), trained)
