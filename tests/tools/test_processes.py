"""benchmarks/processes.py: names and resources of the processes of a run, including ended processes."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import wait_until


@pytest.fixture(scope="module")
def processes() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))  # as for benchmarks
        return importlib.import_module("processes")


@pytest.mark.parametrize(
    "title, command, mesh, name",
    [
        ("sglang::scheduler", ["sglang::scheduler"], "", "engine"),
        ("python", ["python", "-m", "monarch_rl.runtime.host", "ipc://x"], "", "host"),
        ("python", ["python", "-m", "monarch_rl.runtime.supervisor", "recipe.py"], "", "supervisor"),
        ("python", ["monarch_rl::fork server, trainer"], "", "fork server"),
        ("python", ["python", "-IS", "fork_client.py", "trainer"], "trainer-1 @ vm", "stand-in"),
        ("python", ["monarch_rl::trainer-1 @ vm"], "trainer-1 @ vm", "trainer 1"),
        ("python", ["monarch_rl::scorer"], "rollout0-0 @ vm", "scorer"),
        ("python", ["python", "-m", "monarch_rl.runtime.actor_process"], "trainer-1 @ vm", "trainer 1"),
        ("python", ["python", "-m", "monarch_rl.runtime.actor_process"], "generator0-0 @ vm", "generator actor 0"),
        ("python", ["python", "-m", "monarch_rl.runtime.actor_process"], "rollout0-0 @ vm", "rollout worker 0"),
        ("python", ["python", "-m", "monarch_rl.runtime.actor_process"], "buffer-0 @ vm", "buffer"),
        ("python", ["python", "-c", "from multiprocessing.spawn import spawn_main"], "rollout0-0 @ vm", "scorer"),
        ("python", ["python", "-c", "import multiprocessing.resource_tracker"], "trainer-0 @ vm", "resource tracker"),
        ("python", ["python", "else"], "", "other"),
    ],
)
def test_processes_are_named_by_their_role(
    processes: Any, title: str, command: list[str], mesh: str, name: str
) -> None:
    environment = {"HYPERACTOR_PROCESS_NAME": mesh} if mesh else {}
    assert processes.name_of(title, command, environment) == name


def test_the_controller_is_the_process_named_in_the_run_folder(processes: Any, tmp_path: Path) -> None:
    here, runs = psutil.Process(), tmp_path / "runs"
    assert processes.named_in(runs, [here]) == [(here, "other")], "there is no folder yet"
    (runs / "grpo-1").mkdir(parents=True)
    (runs / "grpo-1" / "run.json").write_text(json.dumps({"pid": here.pid}))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    gone = psutil.Process(ended.pid)
    ended.wait()
    assert processes.named_in(runs, [here, gone]) == [(here, "controller")]


PARENT = """
import subprocess, sys, time
while time.process_time() < 0.1:  # /proc counts CPU time in steps of 0.01 s, and a fast machine starts Python in less
    pass
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "monarch_rl::scorer"])
print("started", flush=True)
sys.stdin.readline()
"""
"""A process whose child outlives it."""


def test_ended_processes_count_and_orphans_are_still_followed(processes: Any) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None and parent.stdout is not None
    tree = processes.ProcessTree(parent.pid)
    assert parent.stdout.readline() == "started\n"
    tree.look()
    _, scorer = sorted(tree.running(), key=lambda found: found[1])
    assert scorer[1] in ("scorer", "other")  # it may not have called exec yet
    used = tree.cpu_s()["controller"]
    assert used > 0
    assert tree.memory()["controller"] > 1e6
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    tree.look()
    assert [found for found, _ in tree.running()] == [scorer[0]]
    assert tree.cpu_s()["controller"] >= used
    parent.stdin.close()  # the child shares its standard input and ends with it
    wait_until(lambda: not scorer[0].is_running() or scorer[0].status() == psutil.STATUS_ZOMBIE, "the child's end")
    tree.look()
    assert list(tree.running()) == []


def test_roles_add_up(processes: Any) -> None:
    assert processes.by_role({"trainer 1": 1.0, "host": 0.5, "trainer 10": 2.0}) == {"trainer": 3.0, "host": 0.5}


def test_shared_memory_files_are_those_of_the_process_and_growth_is_the_slope_of_its_second_half(
    processes: Any,
) -> None:
    """Files of other programs do not count, even new ones."""
    shared = processes.SHARED_MEMORY
    with tempfile.NamedTemporaryFile(dir=shared) as own, tempfile.NamedTemporaryFile(dir=shared) as foreign:
        own.truncate(4096)
        foreign.truncate(4096)
        with mmap.mmap(own.fileno(), 4096):
            inodes = processes.shared_inodes(os.getpid())
        names = processes.shared_files(inodes)
        assert Path(own.name).name in names and Path(foreign.name).name not in names
    assert Path(own.name).name not in processes.shared_files(inodes)
    look = processes.look_at(os.getpid(), 7)
    assert look.step == 7 and look.mib > 1 and look.threads >= 1
    assert processes.look_at(2**22 - 3, 7) is None, "no such process"
    looks = [processes.Look(step, 100.0 if step < 10 else 0.002 * step, 1, 1) for step in range(20)]
    assert processes.growth(looks) == pytest.approx(2.0)


def test_listening_sockets_are_distinguished_and_gone_when_closed(processes: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens, socket.socket() as silent:
        own = processes.sockets_of(os.getpid())
        inodes = {os.fstat(listens.fileno()).st_ino, os.fstat(silent.fileno()).st_ino}
        assert inodes <= own and inodes & processes.listening_sockets() == {os.fstat(listens.fileno()).st_ino}
    assert not inodes & (processes.listening_sockets() | processes.sockets_of(os.getpid()))
    assert processes.sockets_of(2**22 - 3) == set(), "no such process"
