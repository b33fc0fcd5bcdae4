"""The fork server: the environment of forked processes, their lifetime, and reports of their exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.forking import fork_client
from monarch_rl.runtime.forking.fork_client import NoForkServer, exit_code, fork
from monarch_rl.runtime.forking.fork_context import ForkContext
from monarch_rl.runtime.forking.fork_server import Preload, differing_when_loaded, start_server
from monarch_rl.runtime.forking.preloading import ForkServer
from tests import patience
from tests.patience import wait_until
from tests.runtime.launched import gone

PROGRAM = "tests.runtime.forked_program"
PRELOADS = [
    Preload("numbers", ("numpy",)),
    Preload("small", ("tests.runtime.preloaded",), after="numbers"),
    Preload("threads", ("tests.runtime.starts_a_thread",), after="numbers"),
    Preload("broken", ("tests.runtime.does_not_exist",)),
    Preload("slow", ("tests.runtime.waits_for_a_file",)),
    Preload("unwatched", ("tests.runtime.fails_to_watch",)),
]
DEADLINE_S = 60.0


class Server:
    """A running server, as a host starts it."""

    def __init__(self, name: str) -> None:
        self.process = start_server(name, PRELOADS)

    def family(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def stage(self, pid: int) -> psutil.Process:
        """The stage that forked process ``pid``."""
        parent = psutil.Process(pid).parent()
        assert parent is not None
        return parent


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IMPORT_WHEN_THERE_IS", str(tmp_path / "imported"))
    name = f"monarch_rl-fork-test-{uuid.uuid4().hex}"
    monkeypatch.setenv(fork_client.ADDRESS_VARIABLE, name)
    started = Server(name)
    yield started
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in started.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    patience.exit_code(started.process)


def seen(out: Path) -> Any:
    wait_until(out.exists, "the forked process")
    return json.loads(out.read_text())


def begin(monkeypatch: pytest.MonkeyPatch, out: Path, action: str) -> None:
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("FORKED", action)


def test_a_process_inherits_the_environment_of_its_owner(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    numbers, counts = set(), set()
    limits, cores = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    os.sched_setaffinity(0, {min(cores)})
    for index in range(3):
        reader, writer = os.pipe()
        os.write(writer, b"hello")
        os.close(writer)
        begin(monkeypatch, tmp_path / f"out{index}", "exit 5")
        pid, status = fork("small", PROGRAM, fds=[reader])
        os.close(reader)
        assert exit_code(status) == 5
        os.close(status)
        report = seen(tmp_path / f"out{index}")
        assert report["pid"] == pid and report["preloaded"] and report["given"] == ["hello"]
        assert report["folder"] == str(tmp_path)
        numbers.add(report["random"])
        counts.add(report["open"])
        assert report["files"] == limits[0] - 1 and report["cores"] == [min(cores)]
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.sched_setaffinity(0, cores)
    assert len(numbers) == 3, "numpy generates the same numbers in every forked process"
    assert len(counts) == 1, "descriptors leak from one forked process to the next"


def test_the_owner_gets_the_exit_code_of_a_process(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for action, code in (("raise", 1), ("signal 15", -15), ("signal 9", -9)):
        begin(monkeypatch, tmp_path / action, action)
        _, status = fork("small", PROGRAM)
        assert exit_code(status) == code
        os.close(status)


def test_a_process_dies_with_its_owner(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begin(monkeypatch, tmp_path / "out", "sleep")
    owner = subprocess.Popen([sys.executable, "-m", PROGRAM])
    pid = seen(tmp_path / "out")["pid"]
    assert not gone(pid)
    owner.kill()
    patience.exit_code(owner)
    wait_until(lambda: gone(pid), "the end of a process without an owner")


@pytest.mark.parametrize("lost", ["stage", "root"])
def test_a_process_dies_with_the_server_and_its_owner_is_notified(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str
) -> None:
    begin(monkeypatch, tmp_path / "out", "sleep")
    pid, status = fork("small", PROGRAM)
    seen(tmp_path / "out")
    everything = [process.pid for process in server.family()]
    (server.stage(pid) if lost == "stage" else psutil.Process(server.process.pid)).kill()
    assert exit_code(status) is None
    os.close(status)
    wait_until(lambda: gone(pid), "the end of a process without a server")
    if lost == "root":
        wait_until(lambda: all(map(gone, everything)), "the end of all stages")
    with pytest.raises(NoForkServer):
        fork("small", PROGRAM)


def test_the_server_waits_for_its_forked_processes(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "imported").touch()
    begin(monkeypatch, tmp_path / "out", "sleep")
    pid, status = fork("small", PROGRAM)
    seen(tmp_path / "out")
    assert server.process.stdin is not None
    server.process.stdin.close()
    server.process.terminate()  # as the host ends all its children
    os.kill(pid, signal.SIGTERM)
    assert exit_code(status) == -signal.SIGTERM
    os.close(status)
    assert patience.exit_code(server.process) == 0


def test_variables_that_loaded_libraries_have_read_cannot_change(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin(monkeypatch, tmp_path / "out", "exit 0")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with pytest.raises(NoForkServer, match="refused"):
        fork("small", PROGRAM)
    assert differing_when_loaded({"OMP_A": "1", "B": "1"}, {"OMP_A": "1", "B": "2", "PYTHONX": ""}) == ["PYTHONX"]
    hub = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "SGLANG_RUN_ID": "a"}
    assert differing_when_loaded({}, hub) == ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]


def test_an_abandoned_request_is_not_forked(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server with a slow import must not start a second process beside the one that was started without it."""
    begin(monkeypatch, tmp_path / "given up", "exit 0")
    with pytest.raises(NoForkServer, match="did not answer"):
        fork("slow", PROGRAM, answer_s=0.1)
    (tmp_path / "imported").touch()
    begin(monkeypatch, tmp_path / "next", "exit 3")
    _, status = fork("slow", PROGRAM)
    assert exit_code(status) == 3
    os.close(status)
    assert not (tmp_path / "given up").exists(), "requests are answered in order: this one came first"


def test_a_request_without_descriptors_is_refused_and_later_ones_are_served(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process without all of its descriptors would fail later."""
    begin(monkeypatch, tmp_path / "first", "exit 3")
    pid, status = fork("small", PROGRAM)
    stage = server.stage(pid).pid
    assert exit_code(status) == 3
    os.close(status)
    limits = resource.prlimit(stage, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{stage}/fd")}  # including a few of processes that are just ending
    free = (number for number in itertools.count() if number not in taken)
    lowest = next(itertools.islice(free, fork_client.FIXED_FDS + 5, None))
    resource.prlimit(stage, resource.RLIMIT_NOFILE, (lowest, limits[1]))
    begin(monkeypatch, tmp_path / "refused", "exit 3")
    with pytest.raises(NoForkServer):
        fork("small", PROGRAM, fds=[0] * 20)
    assert not (tmp_path / "refused").exists()
    resource.prlimit(stage, resource.RLIMIT_NOFILE, limits)
    begin(monkeypatch, tmp_path / "next", "exit 3")
    _, status = fork("small", PROGRAM)
    assert exit_code(status) == 3
    os.close(status)


def test_a_process_that_cannot_be_watched_is_ended_and_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin(monkeypatch, tmp_path / "refused", "sleep")
    with pytest.raises(NoForkServer, match="refused"):
        fork("unwatched", PROGRAM)
    begin(monkeypatch, tmp_path / "next", "sleep")
    pid, status = fork("unwatched", PROGRAM)
    assert [child.pid for child in server.stage(pid).children()] == [pid]
    os.kill(pid, signal.SIGKILL)
    assert exit_code(status) == -signal.SIGKILL
    os.close(status)


def test_a_claim_is_taken_once() -> None:
    claim = fork_client.new_claim()
    assert [fork_client.take_claim(claim) for _ in range(3)] == [True, False, False]
    os.close(claim)


@pytest.mark.parametrize("preload", ["threads", "broken"])
def test_a_stage_that_cannot_fork_refuses_at_once(server: Server, preload: str) -> None:
    with pytest.raises(NoForkServer):
        fork(preload, PROGRAM)


def test_the_controller_waits_for_imports(server: Server, tmp_path: Path) -> None:
    """Also if the server cannot import, or does not exist: then processes are started without it."""
    names = frozenset(preload.name for preload in PRELOADS)
    name = os.environ[fork_client.ADDRESS_VARIABLE]
    of_launch = ForkServer(name, names)

    async def test() -> None:
        for preload in ("small", "broken", "no preload"):
            await within(DEADLINE_S, of_launch.imported(preload), preload, on="the server")
        await within(DEADLINE_S, ForkServer("ended", names).imported("small"), "nothing", on="the server")
        waiting = asyncio.ensure_future(of_launch.imported("slow"))
        await within(DEADLINE_S, of_launch.imported("small"), "small", on="the server")
        assert not waiting.done(), "another answer of the server came first"
        (tmp_path / "imported").touch()
        await within(DEADLINE_S, waiting, "slow", on="the server")

    asyncio.run(test())


def stand_in(preload: str = "small") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-IS", fork_client.__file__, preload, PROGRAM]
    return subprocess.Popen(command, process_group=0)


def test_a_stand_in_ends_as_its_process_does(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for action, code in (("exit 4", 4), ("signal 15", -15), ("signal 9", -9)):
        begin(monkeypatch, tmp_path / action, action)
        assert patience.exit_code(stand_in()) == code


def test_a_stand_in_passes_signals_on(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begin(monkeypatch, tmp_path / "out", "tidy")
    process = stand_in()
    report = seen(tmp_path / "out")
    assert report["group"] == process.pid, "Monarch signals the group"
    process.terminate()
    assert patience.exit_code(process) == 7
    assert (tmp_path / "out.tidied").exists()


def test_a_killed_stand_in_ends_its_process(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begin(monkeypatch, tmp_path / "out", "sleep")
    process = stand_in()
    pid = seen(tmp_path / "out")["pid"]
    process.kill()
    patience.exit_code(process)
    wait_until(lambda: gone(pid), "the end of a process without a stand-in")


def answer(connection: Connection, lock: Any) -> None:
    with lock:
        connection.send((os.getpid(), "tests.runtime.preloaded" in sys.modules, connection.recv()))
    sys.exit(3)


@pytest.mark.parametrize("forked", [True, False])
def test_multiprocessing_works_with_and_without_a_fork_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    if not forked:
        monkeypatch.delenv(fork_client.ADDRESS_VARIABLE)
    context = ForkContext("small")
    (here, there), lock = context.Pipe(), context.RLock()
    process = context.Process(target=answer, args=(there, lock))
    process.start()
    here.send("question")
    wait_until(here.poll, "an answer")
    assert here.recv() == (process.pid, forked, "question")
    wait_until(lambda: not process.is_alive(), "its end")
    assert process.exitcode == 3


def start_program(connection: Connection) -> None:
    os.setpgid(0, 0)
    connection.send((subprocess.Popen(["sleep", "600"]).pid, os.fork() or os.getpid()))
    time.sleep(600)


@pytest.mark.parametrize("forked", [True, False])
def test_what_a_killed_process_started_ends_with_its_group(
    server: Server, monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    if not forked:
        monkeypatch.delenv(fork_client.ADDRESS_VARIABLE)
    context = ForkContext("small")
    here, there = context.Pipe()
    process = context.Process(target=start_program, args=(there,))
    process.start()
    started = {*here.recv(), *here.recv()}
    process.kill()
    wait_until(lambda: not process.is_alive(), "its end")
    for pid in started - {process.pid}:
        wait_until(functools.partial(gone, pid), f"the end of process {pid}")
    assert len(started) > 1


def test_multiprocessing_can_kill_its_processes(server: Server) -> None:
    process = ForkContext("small").Process(target=time.sleep, args=(600,))
    process.start()
    process.kill()
    wait_until(lambda: not process.is_alive(), "its end")
    assert process.exitcode == -signal.SIGKILL and gone(process.pid)
