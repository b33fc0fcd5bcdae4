"""Remote calls are type-checked: a wrong argument, a wrong answer and an unknown endpoint are errors of mypy."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.patience import run

ROOT = Path(__file__).parents[2]
CALLS = """\
from monarch_rl.buffer.actor import Buffer
from monarch_rl.generator.actor import Generator
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.trainer.actor import Trainer

async def right(trainer: Trainer, generator: Generator, worker: RolloutWorker, buffer: Buffer) -> float:
    await generator.ready.call_one()
    await buffer.trained.call_one(3)
    await worker.evaluate.call_one([0, 1])
    answers = await trainer.update.call(0, batch_deadline_s=1.0)
    return sum(metrics["loss"] for metrics in answers.values())

async def wrong(trainer: Trainer, generator: Generator, worker: RolloutWorker, buffer: Buffer) -> None:
    await trainer.update.call("zero", 1.0)  # a wrong argument type
    await trainer.update.call(0)  # a missing argument
    await buffer.trained.call_one(3, 4)  # an extra argument
    await worker.evaluate.call_one(indexes=[0])  # an unknown name
    metrics: list[float] = await trainer.update.call_one(0, 1.0)  # a wrong answer type
    await generator.generates.call_one()  # an unknown endpoint
"""


def test_mypy_finds_wrong_remote_calls(tmp_path: Path) -> None:
    (file := tmp_path / "calls.py").write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(file)]
    checked = run(command, seconds=400, cwd=ROOT)
    found = {int(line): code for line, code in re.findall(r"calls\.py:(\d+): error: .*\[([a-z-]+)\]", checked.stdout)}
    lines = CALLS.splitlines()
    wrong = lines.index(next(line for line in lines if line.startswith("async def wrong"))) + 1
    codes = ["arg-type", "call-arg", "call-arg", "call-arg", "assignment", "attr-defined"]
    assert found == {wrong + 1 + index: code for index, code in enumerate(codes)}, checked.stdout + checked.stderr
