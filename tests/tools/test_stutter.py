"""tools/stutter.py: all processes of a command stop and continue, and none is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.patience import exit_code, wait_until

STUTTER = Path(__file__).parents[2] / "tools" / "stutter.py"
SHORT = ["--hogs", "0", "--every-s", "0.1", "--stop-s", "1"]
ALL = ["root", "child", "between", "daemon"]

COMMAND = """
import os, pathlib, subprocess, sys, time

name, folder = sys.argv[1], pathlib.Path(sys.argv[2])

def start(other):
    command = [sys.executable, "-S", __file__, other, folder]
    subprocess.Popen(command, env={}, start_new_session=True) if other == "daemon" else subprocess.Popen(command)

if below := {"root": "child", "child": "between", "between": "daemon"}.get(name):
    start(below)
(folder / f"{name}.new").write_text(str(os.getpid()))
(folder / f"{name}.new").rename(folder / name)
ends = folder / ("orphan" if name == "between" else "end")
with (folder / f"{name}.log").open("wb", buffering=0) as log:
    while not ends.exists():
        log.write(b".")
        time.sleep(0.01)
sys.exit(3 if name == "root" else 0)
"""
"""A chain of four processes; the last one has its own session and not its parent's environment."""


class Stuttering:
    """The tool with a command of four processes, which write their progress until a file ``end`` exists (for "between":
    a file ``orphan``)."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder = folder
        (folder / "command.py").write_text(COMMAND)
        command = [sys.executable, "-S", folder / "command.py", "root", folder]
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(STUTTER), *flags, "--", *map(str, command)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pids(self) -> dict[str, int]:
        """Return the process ids, once all processes have started."""
        wait_until(lambda: all((self._folder / name).exists() for name in ALL), "the command's processes")
        return {name: int((self._folder / name).read_text()) for name in ALL}

    def progress(self, name: str) -> int:
        return (self._folder / f"{name}.log").stat().st_size

    def stops(self) -> list[str]:
        return [line for line in self.output.read_text().splitlines() if " processes stop for " in line]

    def wait_until_stopped(self, *names: str) -> None:
        """Wait for a moment in which all of them are stopped."""
        pids = [self.pids()[name] for name in names]
        wait_until(lambda: all(status(pid) == psutil.STATUS_STOPPED for pid in pids), self.output.read_text)

    def wait_for_progress(self, *names: str) -> None:
        """Wait until each of them makes progress."""
        before = {name: self.progress(name) for name in names}
        wait_until(lambda: all(self.progress(name) > before[name] for name in names), self.output.read_text)

    def end(self) -> int:
        """Let the command end; returns the tool's exit code."""
        (self._folder / "end").touch()
        return exit_code(self.process, self.output.read_text)


@contextmanager
def stuttering(folder: Path, *flags: str) -> Iterator[Stuttering]:
    started = Stuttering(folder, *flags)
    try:
        yield started
    finally:
        for end in ("end", "orphan"):
            (folder / end).touch()
        started.process.send_signal(signal.SIGTERM)
        exit_code(started.process)


def status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def is_gone(pid: int) -> bool:
    return status(pid) in ("gone", psutil.STATUS_ZOMBIE)  # another process collects an orphan's zombie


def test_all_processes_stop_and_continue_and_the_exit_code_is_passed_on(tmp_path: Path) -> None:
    """This includes a process that has lost its parent and the command's environment."""
    with stuttering(tmp_path, *SHORT, "--seed", "7", "--times", "2") as started:
        started.wait_until_stopped(*ALL)
        started.wait_for_progress(*ALL)
        (tmp_path / "orphan").touch()
        wait_until(lambda: is_gone(started.pids()["between"]), "the end of the daemon's parent")
        started.wait_until_stopped("root", "child", "daemon")
        started.wait_for_progress("root", "child", "daemon")
        assert started.end() == 3
    *_, last, count = started.output.read_text().splitlines()
    assert last.startswith("stutter: exit code 3") and last.endswith("seed 7")
    assert count == "stutter: passed 0 of 2", "the first failure is the end"
    wait_until(lambda: all(map(is_gone, started.pids().values())), "the end of the command's processes")


def test_repetitions_have_seeds_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, str(STUTTER), "--hogs", "0", "--times", "2", "--seed", "4", "--", "true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert exit_code(process) == 0 and process.stdout is not None
        first, *runs, count = process.stdout.read().splitlines()
    assert first.startswith("stutter: commit ") and count == "stutter: passed 2 of 2"
    assert [line.rsplit(maxsplit=1)[-1] for line in runs] == ["4", "5"]


def test_a_process_stopped_by_somebody_else_stays_stopped(tmp_path: Path) -> None:
    with stuttering(tmp_path, *SHORT) as started:
        child = started.pids()["child"]

        def left_alone() -> bool:
            """If the tool has already stopped it, the tool continues it, so try again."""
            os.kill(child, signal.SIGSTOP)
            return any(line.endswith(", 1 stopped before") for line in started.stops())

        wait_until(left_alone, started.output.read_text)
        progress, stops = started.progress("child"), len(started.stops())
        wait_until(lambda: len(started.stops()) > stops + 1, "two more stops")
        started.wait_for_progress("root", "between", "daemon")
        assert status(child) == psutil.STATUS_STOPPED and started.progress("child") == progress
        os.kill(child, signal.SIGCONT)
        started.wait_for_progress("child")


def test_an_interrupt_leaves_neither_a_stopped_process_nor_a_hog(tmp_path: Path) -> None:
    with stuttering(tmp_path, "--every-s", "0.1", "--stop-s", "100000") as started:
        wait_until(started.stops, started.output.read_text)
        below = {process.pid: process.cmdline() for process in psutil.Process(started.process.pid).children(True)}
        hogs = {pid for pid, command in below.items() if any("PR_SET_PDEATHSIG" in part for part in command)}
        assert len(hogs) == len(os.sched_getaffinity(0)) < len(below)
        assert {status(pid) for pid in below.keys() - hogs} == {psutil.STATUS_STOPPED}
        started.process.send_signal(signal.SIGTERM)
        assert exit_code(started.process, started.output.read_text) == 128 + signal.SIGTERM
    wait_until(lambda: all(map(is_gone, below)), "the end of all processes")


def test_hogs_end_with_the_tool(tmp_path: Path) -> None:
    with stuttering(tmp_path, "--every-s", "1000") as started:
        started.pids()
        hogs = [
            process.pid
            for process in psutil.Process(started.process.pid).children()
            if any("PR_SET_PDEATHSIG" in part for part in process.cmdline())
        ]
        assert hogs
        started.process.kill()
        wait_until(lambda: all(map(is_gone, hogs)), "the end of the hogs")
