"""A run whose episodes ask a frozen model: its engine is killed, and the run continues."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.recipe.running import end_by_signal, process_named, wait_for_line, wait_for_more_steps
from tests.runtime.launched import Launched, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def youngest_engine(run: Launched) -> psutil.Process:
    """Return the SGLang scheduler that was started last."""
    engines = [process for process, command in run.processes().items() if "sglang::scheduler" in command]
    return max(engines, key=psutil.Process.create_time)


def test_a_lost_judge_is_replaced_and_its_requests_are_retried(start: Start, model: Path, tmp_path: Path) -> None:
    """First the actor's process is killed, then only its engine. Episodes that wait for the only judge are not lost;
    new engines have the weights that were loaded last (``judged.py`` checks them)."""
    script = Path(__file__).with_name("judged.py")
    small = ["--held-out=8", "--groups-per-step=4", "--rollout.group-size=4", "--trainer.ranks=1", "--steps=5000"]
    folders = [f"--model={model}", f"--output={tmp_path / 'runs'}"]
    small += ["--generator.replicas=1", "--trainer.lr=1e-2", "--trainer.loss.kl-coefficient=0.01"]
    run = start([sys.executable, str(script), *folders, *small])
    found: re.Match[str] | None = wait_for_line(run, r"^step 3/")
    for find in (lambda run: process_named(run, "frozen_judge0-0"), youngest_engine):
        find(run).kill()
        found = wait_for_line(run, r"^frozen judge 0 is back after", after=found)
        wait_for_more_steps(run, found)
    end_by_signal(run, signal.SIGINT, 130, to_group=True)
    (file,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    last = rows[-1]
    assert (last["recovery/lost"], last["recovery/returned"]) == (2, 2)
    assert not [name for name in last if name.startswith("dropped/")], "no episode is lost with a judge"
    episodes = 16 * last["step"]
    assert last["frozen/judge/requests"] > episodes, (
        "three requests per episode; requests of a lost engine are not counted"
    )
    assert last["frozen/judge/read_tokens"] > 4 * episodes and last["frozen/judge/drawn_tokens"] > 0
    started, later = (row["trainer/kl_reference"] for row in rows[:2])
    assert started < 1e-9 < 1e-6 < later, "a stage fills the column of reference log-probs"
    assert 0 < rows[0]["frozen/judge/device_s"] < last["frozen/judge/device_s"]
