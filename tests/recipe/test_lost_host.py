"""Machines of a run are lost with all their processes: the run continues with a replacement machine or without."""

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
from tests import patience
from tests.recipe.running import RUN_S, SLOW, STAND_IN, random_model, recipe, wait_for_line, wait_for_more_steps
from tests.runtime.launched import TORCHRUN, Launched, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * RUN_S)]


def has_trainer(agent: Launched) -> bool:
    """Return whether this agent became the first machine."""
    for process in agent.processes():
        with suppress(psutil.NoSuchProcess):  # some processes are short-lived
            name = process.environ().get("HYPERACTOR_PROCESS_NAME", "")
            if name.startswith("trainer"):
                return True
    return False


def lose(machine: Launched) -> None:
    """Kill an agent and all its processes; they are stopped first, so that none can react to the end of another."""
    pids = [process.pid for process in machine.processes()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@pytest.mark.parametrize("engine", [[], [STAND_IN]], ids=["SGLang", "stand-in"])
def test_a_run_resumes_with_a_replacement_machine_and_continues_without_lost_generators(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: list[str]
) -> None:
    """Each machine has three slots: two trainer ranks and generator 0 on the first, generator 1 on the second. With
    ``-s`` it prints the times in docs/failures.md."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    model, port = random_model(tmp_path / "tiny"), free_port()
    job = ["--nnodes=2", "--nproc-per-node=3", "--max-restarts=1", "--rdzv-id=lost", "--rdzv-backend=c10d"]
    job += [f"--rdzv-endpoint=127.0.0.1:{port}"]
    flags = ["--steps=5000", "--recovery.restarts=1", "--checkpoint.every-steps=2"]
    job += engine + recipe(model, tmp_path / "runs", *flags, script=SLOW)

    def machine(address: str) -> Launched:
        """Start an agent; machines are ordered by address."""
        return start([*TORCHRUN, f"--local-addr={address}", *job])

    # The first agent to start holds torchrun's store; its end would end all others.
    survivor = machine("127.0.0.2")
    wait_for_port(port)
    lost = machine("127.0.0.1")
    wait_for_line(lost, r"^checkpoint of step \d+ ")
    assert has_trainer(lost) and not has_trainer(survivor)
    lose(lost)
    lost_at, replacement = time.monotonic(), machine("127.0.0.3")
    resumed = wait_for_line(survivor, r"^Resumed after step [1-9]\d* \(resume 1 of this run\)")
    noticed_s = time.monotonic() - lost_at
    wait_for_line(survivor, r"^step \d+/", after=resumed)
    print(f"resumed {noticed_s:.1f} s after the loss, the next step after {time.monotonic() - lost_at:.1f} s")
    wait_for_more_steps(survivor, resumed)
    assert has_trainer(survivor) and not has_trainer(replacement)
    lose(replacement)
    wait_for_more_steps(
        survivor, wait_for_line(survivor, r"^generator 1 is not restarted; the run continues with generator 0")
    )
    survivor.process.terminate()
    survivor.wait(RUN_S)
    survivor.assert_gone()


def wait_for_port(port: int) -> None:
    """Wait until a process listens on this port."""

    def listens() -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", port)) == 0

    patience.wait_until(listens, f"a process that listens on port {port}")
