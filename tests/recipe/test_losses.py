"""Losses without replacement: a run continues without a generator, and ends without any other actor.

Real processes are killed or stopped.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.recipe.running import (
    RUN_S,
    SLOW,
    STAND_IN,
    end_by_signal,
    engines,
    process_named,
    recipe,
    send,
    steps_logged,
    wait_for_line,
    wait_for_more_steps,
    wait_for_step,
)
from tests.runtime.launched import Launched, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

KILLED = r"(Killed\(sig=9\)|exit code -9|process likely crashed|its process \d+ is (gone|dead))"
STOPPED = "(stopped|does not answer)"
LONG = ["--steps=5000", "--recovery.restarts=0"]


def lose_and_check_message(run: Launched, process: str) -> None:
    """Kill a process that cannot be replaced; this must end the run with a message that names it."""
    victim = process_named(run, process)
    before = len(run.output())
    victim.kill()
    assert run.wait(RUN_S) == 1, run.output()
    run.assert_gone()
    mesh, rank = process.split("-")
    by_rank = rf"{mesh}\{{'hosts': 0/1, 'gpus': {rank}/\d\}}> .*\s+.*Killed\(sig=9\)"
    by_process = rf"actor {process}<.*\s+.*The process likely crashed"  # seen on a crowded machine
    shown = f"trainer rank {rank}" if mesh == "trainer" else mesh
    by_watch = rf"{shown} \(process \d+\) has ended"  # seen when Monarch was querying the process's state
    by_stall = rf"{shown} stopped answering \d+ s ago; its process \d+ is (gone|dead)"  # Monarch has not noticed it
    assert re.search(f"{by_rank}|{by_process}|{by_watch}|{by_stall}", run.output()[before:]), run.output()
    if f"mesh {mesh}" in run.output()[before:] and "Killed(sig=9)" in run.output()[before:]:
        flag = {"trainer": "--trainer.tokens-per-microbatch", "buffer": "buffer.max_mib in the recipe"}[mesh]
        assert re.search(f"memory is short.*{flag}", run.output()[before:]), run.output()


@pytest.mark.parametrize(
    ("process", "number", "cause", "ends", "sglang"),
    [
        pytest.param(
            *("generator1-0", signal.SIGKILL, KILLED),
            *(partial(end_by_signal, number=signal.SIGINT, code=130, to_group=True), False),
            marks=pytest.mark.core,
            id="a killed generator, then Ctrl-C",
        ),
        pytest.param(
            *("sglang::scheduler", signal.SIGKILL, KILLED),
            *(partial(end_by_signal, number=signal.SIGKILL, code=-9), True),
            id="a killed engine, then SIGKILL",
        ),
        pytest.param(
            *("generator1-0", signal.SIGSTOP, STOPPED),
            *(partial(lose_and_check_message, process="trainer-1"), True),
            id="a stopped generator, then a lost trainer rank",
        ),
        pytest.param(
            *("sglang::scheduler", signal.SIGSTOP, STOPPED),
            *(partial(lose_and_check_message, process="buffer-0"), True),
            id="a stopped engine, then a lost buffer",
        ),
    ],
)
def test_a_run_continues_without_a_lost_generator_and_leaves_no_process_behind(
    start: Start,
    model: Path,
    tmp_path: Path,
    process: str,
    number: signal.Signals,
    cause: str,
    ends: Callable[[Launched], None],
    sglang: bool,
) -> None:
    command = recipe(model, tmp_path / "runs", *LONG, script=SLOW)
    run = start([sys.executable, *command] if sglang else [sys.executable, STAND_IN, *command])
    wait_for_step(run)
    assert engines(run) == 2 * sglang
    assert len(run.left()) >= 8 + engines(run), "controller, host, 2 trainers, buffer, rollout worker, 2 generators"
    send(run, process, number)
    wait_for_more_steps(run, wait_for_line(run, rf"^generator (\d) is lost \(.*{cause}"))
    semaphores = run.semaphores()
    assert semaphores, "scoring processes have no semaphores"
    ends(run)
    assert not [path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in semaphores], "semaphores were left"
    steps = steps_logged(tmp_path / "runs")
    assert (steps[0]["generator/replicas"], steps[-1]["generator/replicas"]) == (2, 1)
    assert max(step["lag/max"] for step in steps) <= 2
    assert all(step["tokens_per_second"] >= 0 for step in steps)


@pytest.mark.parametrize(("process", "ranks", "engine"), [("trainer-1", 2, []), ("buffer-0", 1, [STAND_IN])])
def test_a_lost_trainer_rank_or_buffer_ends_the_run_even_if_other_actors_may_restart(
    start: Start, model: Path, tmp_path: Path, process: str, ranks: int, engine: list[str]
) -> None:
    """With default settings, and as the first loss. Before it, versions are published while a replica of ``ranks``
    ranks generates, so that trained tokens have a lag."""
    more = ["--steps=5000", "--generator.replicas=1", f"--generator.tp={ranks}"]
    run = start([sys.executable, *engine, *recipe(model, tmp_path / "runs", *more)])
    wait_for_line(run, r"^step \d+/.*\| lag \d\.\d+/[12] ")
    assert engines(run) == (0 if engine else ranks)
    # Later a worker may be lost, because its call to the buffer failed.
    assert "is lost" not in run.output(), run.output()
    lose_and_check_message(run, process)
    assert 1 <= max(step["lag/max"] for step in steps_logged(tmp_path / "runs")) <= 2


def test_losing_the_last_worker_ends_the_run_when_none_may_be_restarted(
    start: Start, model: Path, tmp_path: Path
) -> None:
    run = start([sys.executable, STAND_IN, *recipe(model, tmp_path / "runs", *LONG, script=SLOW)])
    wait_for_step(run)
    process_named(run, "rollout0-0").kill()
    assert run.wait(RUN_S) == 1, run.output()
    run.assert_gone()
    ended = r"AllActorsLost: no rollout worker is left\. The first loss was that of rollout worker 0: .*\s+.*"
    by_monarch = rf"{ended}(Killed\(sig=9\)|process likely crashed)"
    by_watch = r"cannot continue: .*rollout worker 0 stopped answering \d+ s ago; its process \d+ is (gone|dead)"
    assert re.search(f"{by_monarch}|{by_watch}", run.output()), run.output()
