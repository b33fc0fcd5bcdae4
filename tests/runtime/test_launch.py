"""The same script under python, torchrun and two torchrun agents, with all of its possible ends."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.runtime.network import free_port
from tests.runtime.conftest import Start
from tests.runtime.launched import SCRIPT, TORCHRUN


def python(mode: str, folder: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), mode, str(folder)]


def torchrun(mode: str, folder: Path) -> list[str]:
    return [*TORCHRUN, "--nproc-per-node=2", str(SCRIPT), mode, str(folder)]


def agent(mode: str, folder: Path, port: int) -> list[str]:
    """One of two agents that simulate two machines with one rank each."""
    job = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    return [*TORCHRUN, *job, f"--rdzv-endpoint=127.0.0.1:{port}", str(SCRIPT), mode, str(folder)]


def check_report(folder: Path, hosts: int, processes: int, forked: bool = False) -> None:
    report: dict[str, Any] = json.loads((folder / "report").read_text())
    trainer, buffer = report["trainer"], report["buffer"]
    assert trainer["extent"] == {"hosts": hosts, "gpus": processes // hosts}
    assert trainer["sums"] == [processes * (processes + 1) / 2] * processes
    assert [seen["RANK"] for seen in trainer["environments"]] == [str(rank) for rank in range(processes)]
    assert buffer["sums"] == [1.0] and buffer["environments"][0]["ROLE"] == "buffer"
    for seen in trainer["environments"] + buffer["environments"]:
        assert seen["MASTER_ADDR"] == "127.0.0.1"
        assert seen["forked"] == str(forked)
        assert {str(folder), str(SCRIPT.parent)} <= set(seen["PYTHONPATH"].split(os.pathsep))
        assert seen["title"] == f"monarch_rl::{seen['HYPERACTOR_PROCESS_NAME']}"
        assert not [name for name in seen if name.startswith("TORCHELASTIC_")]


@pytest.mark.parametrize(
    ("command", "mode"),
    [(python, "work"), (torchrun, "work"), pytest.param(python, "work-forked", marks=pytest.mark.core)],
)
def test_work_on_one_node(start: Start, tmp_path: Path, command: Any, mode: str) -> None:
    run = start(command(mode, tmp_path))
    assert run.wait() == 0, run.output()
    check_report(tmp_path, hosts=1, processes=2, forked=mode == "work-forked")
    assert "Traceback" not in run.output()
    run.assert_gone()


def test_work_on_two_nodes(start: Start, tmp_path: Path) -> None:
    port = free_port()
    agents = [start(agent("work-forked", tmp_path, port)) for _ in range(2)]
    for run in agents:
        assert run.wait() == 0, run.output()
    check_report(tmp_path, hosts=2, processes=2, forked=True)
    for run in agents:
        run.assert_gone()


@pytest.mark.parametrize(
    ("mode", "number", "to_group", "code"),
    [
        pytest.param("wait", signal.SIGINT, True, 130, marks=pytest.mark.core),  # Ctrl-C in a terminal
        ("wait", signal.SIGINT, False, 130),
        ("wait", signal.SIGTERM, False, 143),
        ("wait", signal.SIGKILL, False, -9),
        ("wait-forked", signal.SIGTERM, False, 143),
        pytest.param("wait-forked", signal.SIGKILL, False, -9, marks=pytest.mark.core),
    ],
)
def test_a_signal_leaves_no_process(
    start: Start, tmp_path: Path, mode: str, number: signal.Signals, to_group: bool, code: int
) -> None:
    run = start(python(mode, tmp_path))
    controller = int(run.wait_for(tmp_path / "ready"))
    # A fork server with one preload is two processes, and each forked process has a stand-in.
    assert len(run.left()) == (10 if mode == "wait-forked" else 6), "controller, host, two processes with a child each"
    (os.killpg if to_group else os.kill)(controller, number)
    assert run.wait() == code, run.output()
    run.assert_gone()
    assert (tmp_path / "tidied").exists() == (number != signal.SIGKILL), "finally blocks run unless killed"


def test_a_second_signal_ends_at_once(start: Start, tmp_path: Path) -> None:
    """Whatever still runs. After the grace period, the run would end with the code of the first signal."""
    run = start(python("stuck", tmp_path))
    controller = int(run.wait_for(tmp_path / "ready"))
    os.kill(controller, signal.SIGINT)
    run.wait_for(tmp_path / "stuck")
    os.kill(controller, signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.output()
    run.assert_gone()


@pytest.mark.parametrize("command", [python, pytest.param(torchrun, marks=pytest.mark.core)])
def test_an_exception_leaves_no_process(start: Start, tmp_path: Path, command: Any) -> None:
    run = start(command("raise", tmp_path))
    assert run.wait() == 1, run.output()
    assert "this run fails" in run.output()
    run.assert_gone()


@pytest.mark.parametrize(
    ("target", "number"),
    [("agent", signal.SIGTERM), ("agent", signal.SIGKILL), ("controller", signal.SIGKILL)],
)
def test_a_signal_under_torchrun_leaves_no_process(
    start: Start, tmp_path: Path, target: str, number: signal.Signals
) -> None:
    run = start(torchrun("wait", tmp_path))
    controller = int(run.wait_for(tmp_path / "ready"))
    os.kill(controller if target == "controller" else run.process.pid, number)
    assert run.wait() != 0, run.output()
    run.assert_gone()


@pytest.mark.parametrize(
    ("command", "mode"),
    [pytest.param(python, "wait", marks=pytest.mark.core), (torchrun, "wait"), (python, "wait-forked")],
)
def test_a_lost_host_is_named_and_leaves_no_process(start: Start, tmp_path: Path, command: Any, mode: str) -> None:
    """Its processes have children that are tied to no parent; the host would have ended all of them."""
    run = start(command(mode, tmp_path))
    run.wait_for(tmp_path / "ready")
    (host,) = [process for process, command in run.processes().items() if "-m monarch_rl.runtime.host " in command]
    host.kill()
    assert run.wait() == 1, run.output()
    assert re.search(rf"HostLost: .* {host.pid} .*SIGKILL", run.output()), run.output()
    assert (tmp_path / "tidied").exists(), "finally blocks run"
    run.assert_gone()


def test_a_lost_controller_ends_the_other_node(start: Start, tmp_path: Path) -> None:
    port = free_port()
    agents = [start(agent("wait", tmp_path, port)) for _ in range(2)]
    os.kill(int(agents[0].wait_for(tmp_path / "ready")), signal.SIGKILL)
    for run in agents:
        assert run.wait() != 0, run.output()
        run.assert_gone()
