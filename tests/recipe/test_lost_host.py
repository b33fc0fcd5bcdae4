"""A machine of a run is lost with all that ran on it, generators only: the run goes on with the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from monarch_rl.runtime.cluster import free_port
from tests.recipe.running import keep_environment, random_model, recipe, wait_for_line, wait_for_step
from tests.runtime.launched import TORCHRUN, Launched, Start, launching

pytestmark = pytest.mark.slow

STOP_S = 60.0
"""Seconds to end a run one of whose hosts does not answer."""
GONE_S = 12.0


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    keep_environment(monkeypatch)
    with launching(tmp_path) as begin:
        yield begin


def has_trainer(agent: Launched) -> bool:
    """Whether this agent became the first machine."""
    processes = [psutil.Process(int(line.split()[0])) for line in agent.left()]
    return any(one.environ().get("HYPERACTOR_PROCESS_NAME", "").startswith("trainer") for one in processes)


def test_the_run_goes_on_with_the_generators_of_other_machines(start: Start, tmp_path: Path) -> None:
    """Three slots a machine: two trainer ranks and generator 0 on the first, generator 1 on the second."""
    model = random_model(tmp_path / "tiny")
    job = ["--nnodes=2", "--nproc-per-node=3", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    job += [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    job += recipe(model, tmp_path / "runs", "--steps=500", "--recovery.restarts=1")
    agents = [start([*TORCHRUN, *job]) for _ in range(2)]
    wait_for_line_of_any(agents)
    (first,) = [agent for agent in agents if has_trainer(agent)]
    (second,) = [agent for agent in agents if agent is not first]
    wait_for_step(first)
    for line in second.left():
        os.kill(int(line.split()[0]), signal.SIGKILL)
    lost = wait_for_line(first, r"^generator 1 is not started again; the run goes on with generator 0")
    step = int(wait_for_line(first, r"^step (\d+)/500", after=lost)[1])
    wait_for_line(first, rf"^step {step + 5}/500", after=lost)
    first.process.terminate()
    first.wait(STOP_S)
    first.assert_gone(GONE_S)


def wait_for_line_of_any(agents: list[Launched]) -> None:
    """Wait until the controller, whose ever it is, has made a step."""
    deadline = time.monotonic() + 420
    while not any("\nstep 1/" in agent.output() for agent in agents):
        assert time.monotonic() < deadline, [agent.output() for agent in agents]
        time.sleep(0.2)
