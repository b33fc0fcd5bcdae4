"""A machine of a run is lost with all that ran on it, generators only: the run goes on with the others."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from monarch_rl.runtime.cluster import free_port
from tests.recipe.running import GONE_S, SLOW, random_model, recipe, wait_for_line, wait_for_step
from tests.runtime.launched import START_S, TORCHRUN, Launched, Start

pytestmark = pytest.mark.slow

STOP_S = 60.0
"""Seconds to end a run one of whose hosts does not answer."""


def has_trainer(agent: Launched) -> bool:
    """Whether this agent became the first machine."""
    for line in agent.left():
        with suppress(psutil.NoSuchProcess):  # some live for a moment only
            called = psutil.Process(int(line.split()[0])).environ().get("HYPERACTOR_PROCESS_NAME", "")
            if called.startswith("trainer"):
                return True
    return False


def test_the_run_goes_on_with_the_generators_of_other_machines(start: Start, tmp_path: Path) -> None:
    """Three slots a machine: two trainer ranks and generator 0 on the first, generator 1 on the second."""
    model = random_model(tmp_path / "tiny")
    job = ["--nnodes=2", "--nproc-per-node=3", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    port = free_port()
    job += [f"--rdzv-endpoint=127.0.0.1:{port}"]
    job += recipe(model, tmp_path / "runs", "--steps=5000", "--recovery.restarts=1", script=SLOW)
    # Agents end with the one that holds torchrun's store: the first to come, which also becomes the first machine.
    first = start([*TORCHRUN, *job])
    wait_for_port(port)
    second = start([*TORCHRUN, *job])
    wait_for_step(first)
    assert has_trainer(first) and not has_trainer(second)
    for line in second.left():
        with suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)
    lost = wait_for_line(first, r"^generator 1 is not started again; the run goes on with generator 0")
    step = int(wait_for_line(first, r"^step (\d+)/5000", after=lost)[1])
    wait_for_line(first, rf"^step {step + 5}/5000", after=lost)
    first.process.terminate()
    first.wait(STOP_S)
    first.assert_gone(GONE_S)


def wait_for_port(port: int) -> None:
    """Wait until somebody listens there."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens on port {port} after {START_S} s"
            time.sleep(0.1)
