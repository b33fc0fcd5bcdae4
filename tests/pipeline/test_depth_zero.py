"""With max_policy_lag 0 the asynchronous system is synchronous RL: the same updates as a plain loop, also resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.forking import run_forked

ROOT = Path(__file__).parents[2]
TASK = {
    "name": "spell_backward",
    "config": '{"min_word_len": 3, "max_word_len": 3}',
    "template": "{question}",
    "pass_mark": 0.0,
}
SETTINGS = {"task": TASK, "steps": 3, "groups_per_step": 4, "group_size": 4, "max_new_tokens": 6, "lr": 1e-3, "seed": 5}


PROGRAMS_S = 1200.0
"""Seconds for programs that run at the same time: some 40 when nothing else runs."""


def run(scratch: Path, *commands: list[str]) -> None:
    """Run programs of Python at the same time: each takes long to import what it needs. Their errors fail the test."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    deadline, programs = time.monotonic() + PROGRAMS_S, []
    try:
        for number, command in enumerate(commands):
            with (log := scratch / f"program{number}.log").open("w") as output:
                command = [sys.executable, *command]
                program = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            programs.append((program, log))
        for program, log in programs:
            assert program.wait(deadline - time.monotonic()) == 0, log.read_text()[-6000:]
    finally:
        for program, _ in programs:
            program.kill()
            program.wait(10)


def forget_after(folder: Path, step: int) -> None:
    """Remove a run's later checkpoints, as if it had ended there."""
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(3 * PROGRAMS_S + 60)
def test_depth_zero_makes_the_updates_of_a_plain_synchronous_loop(tmp_path: Path) -> None:
    """And so does a run that is resumed after its first step."""
    model = tmp_path / "model"
    size = ["--hidden-size", "64", "--layers", "2", "--steps", "40", "--ranks", "1"]
    task = [part for name, value in TASK.items() for part in (f"--task.{name.replace('_', '-')}", str(value))]
    made = run_forked("trainer", ["tools/make_tiny_model.py", "--output", model, *size, *task], PROGRAMS_S, folder=ROOT)
    assert made.returncode == 0, made.stderr
    arguments = {
        "model": model,
        "output": tmp_path / "runs",
        "steps": SETTINGS["steps"],
        "groups-per-step": SETTINGS["groups_per_step"],
        "buffer.max-policy-lag": 0,
        "held-out": 4,
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
    plain = tmp_path / "plain.safetensors"
    recipe = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    run(
        tmp_path,
        ["recipes/grpo.py", *task, *recipe],
        ["tests/pipeline/plain_loop.py", str(model), json.dumps(SETTINGS), str(plain)],
    )
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["lag/max"] for row in rows if "lag/max" in row} == {0}
    assert any(0 < row.get("reward/mean", 0) < 1 for row in rows), "without rewards nothing would be compared"

    start, trained, expected = weights(model), weights(folder / "model"), load_file(plain)
    forget_after(folder, 1)
    run(tmp_path, ["recipes/grpo.py", *task, *recipe, "--resume", str(folder)])
    assert json.loads((folder / "resumes.jsonl").read_text())["step"] == 1
    resumed = weights(folder / "model")
    assert trained.keys() == expected.keys() == resumed.keys()
    for name in expected:
        moved = (expected[name] - start[name]).abs().max()
        assert moved > 1e-3, name
        # Adam divides by the gradient's size: where that is almost 0, rounding decides the direction.
        assert (trained[name] - expected[name]).abs().max() < 0.02 * moved, name
        assert (resumed[name] - trained[name]).abs().max() < 0.02 * moved, name
