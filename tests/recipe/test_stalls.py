"""Real processes are stopped or blocked in a real run: it ends and names the culprit along the chain of waits.

Recipes run as a user runs them, one run per fault.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.recipe.running import (
    RUN_S,
    SLOW,
    STAND_IN,
    end_by_signal,
    recipe,
    send,
    steps_logged,
    wait_for_line,
    wait_for_more_steps,
    wait_for_step,
)
from tests.runtime.launched import Launched, Start

pytestmark = pytest.mark.slow

BLOCKED = Path(__file__).with_name("blocked.py")
BATCH = r"trainer rank \d has waited \d+ s for the batch of step \d+; buffer has waited \d+ s for "


def ends_with(run: Launched, chain: str, folder: Path) -> str:
    """Wait for the end of the run, check that message and report contain ``chain``, and return the report."""
    assert run.wait(RUN_S) == 1, run.output()
    run.assert_gone()
    (path,) = folder.glob("*/stall-*.txt")
    report = path.read_text()
    for text in (report.splitlines()[0], run.output()):
        assert re.search(chain, text), text
    assert re.search(rf"^monarch_rl\.errors\.Stalled: .*{chain}", run.output(), re.MULTILINE), run.output()
    return report


# Without lag, and with answers that take seconds to generate, the trainer waits for its batch after a step is printed.
TWO_WORKERS = ["--rollout.workers=2", "--rollout.concurrent-groups=4"]  # each has half of the 8 groups of a step
WAITING = ["--steps=5000", "--buffer.max-policy-lag=0", "--rollout.max-new-tokens=100", "--generator.replicas=1"]
ALONE = ["--recovery.restarts=0"]  # a stopped process is not replaced


def test_a_stopped_rollout_worker_is_named_and_replaced_and_sigterm_leaves_no_process(
    start: Start, model: Path, tmp_path: Path
) -> None:
    run = start([sys.executable, STAND_IN, *recipe(model, tmp_path / "runs", *WAITING, *TWO_WORKERS, script=SLOW)])
    send(run, "rollout1-0", signal.SIGSTOP)
    # On a crowded machine the signal may arrive while the step's version is published, before the next groups have
    # started, or while the next step is logged.
    generating = rf"{BATCH}group \d+, held by rollout worker 1 \(\d of 8 groups of the batch are in\)"
    starting = rf"{BATCH}workers to start groups \(\d of 8 groups of the batch are in\)"
    calling = r"controller has waited \d+ s for rollout worker 1 to [^;]+"
    chain = (
        rf"({generating}|{starting}|{calling}|{BATCH}version \d+ to be served, [^;]*; {calling}); "
        r"rollout worker 1 stopped answering \d+ s ago; its process \d+ is stopped"
    )
    back = wait_for_line(run, r"^rollout worker 1 is back after \d+")
    assert re.search(chain, run.output()), run.output()
    (path,) = tmp_path.glob("runs/*/stall-*.txt")
    report = path.read_text()
    assert re.search(chain, report.splitlines()[0]), report
    assert "--- rollout worker 1\nProcess" in report, "no stacks by py-spy"
    assert re.search(r"--- (trainer rank \d|controller)\nthread ", report), "no stacks by the process itself"
    assert re.search(r"^rollout worker 0 \(process \d+\): answers", report, re.MULTILINE), "not every process is listed"
    wait_for_more_steps(run, back)
    assert len(run.left()) >= 8, "controller, host, 2 trainers, buffer, 2 workers, generator"
    end_by_signal(run, signal.SIGTERM, 143)
    assert steps_logged(tmp_path / "runs")


def test_a_stopped_engine_is_named_along_the_chain(start: Start, model: Path, tmp_path: Path) -> None:
    run = start([sys.executable, *recipe(model, tmp_path / "runs", *WAITING, *ALONE)])
    send(run, "sglang::scheduler", signal.SIGSTOP)
    generating = (
        r"group (?P<group>\d+), held by rollout worker 0 \(\d of 8 groups of the batch are in\); "
        r"rollout worker 0 has waited \d+ s for generator 0 to answer (a|\d+) requests? of group (?P=group) .*; "
        r"generator 0 has waited \d+ s for new tokens after \d+ prompt tokens"
    )
    committing = (  # the step's version, if the signal arrives before it is served
        r"version (?P<version>\d+) to be served, .*; "
        r"controller has waited \d+ s for generator 0 to commit version (?P=version); "
        r"generator 0 has waited \d+ s for version (?P=version) to be loaded"
    )
    stopped = r"the engine of generator 0 has been stopped for \d+ s \(process \d+\)"
    chain = rf"{BATCH}({generating}|{committing}); {stopped}"
    report = ends_with(run, chain, tmp_path / "runs")
    assert "--- the engine of generator 0\nProcess" in report, "no stacks by py-spy"


def test_a_blocked_trainer_rank_is_named_with_the_line_that_blocks_it(
    start: Start, model: Path, tmp_path: Path
) -> None:
    """Its event loop sleeps in a Python call, while the process exists and answers."""
    _, *arguments = recipe(model, tmp_path / "runs", "--steps=5000", "--generator.replicas=1")
    run = start([sys.executable, STAND_IN, str(BLOCKED), str(tmp_path), *arguments])
    wait_for_step(run)
    (tmp_path / "go").touch()
    run.wait_for(tmp_path / "blocked")
    blocked = r"trainer rank 1 has blocked its event loop for \d+ s at \S+blocked\.py:\d+"
    chain = rf"{blocked}; its process \d+ uses \d+% of a core"
    report = ends_with(run, chain, tmp_path / "runs")
    stacks = report.split("--- trainer rank 1\n")[1].split("\n--- ")[0]
    assert re.search(r"the loop of trainer rank 1\n(.*\n)*.*blocked\.py.*in snapshots\n\s+time\.sleep", stacks), stacks
