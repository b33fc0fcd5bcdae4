"""Starts a script as a user would, and finds every process that it started."""

from __future__ import annotations

import codecs
import io
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from monarch_rl.runtime.scratch import ScratchFolder
from tests.patience import exit_code, wait_until

SCRIPT = Path(__file__).with_name("script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
START_S = 300.0
"""Generous because cores are shared: a start takes a few seconds on an idle machine."""
LEAST_S = 60.0
"""Minimum limit of any wait, by the clock of ``tests/patience.py``."""
LOOK_S = 0.25
"""Seconds between two scans of all processes of the machine."""


class Launched:
    """A command in a session of its own. All processes below it carry a mark in their environment."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._log = log
        self._scratch = ScratchFolder()
        """The command's temporary directory."""
        self._scanned: dict[tuple[int, bytes], psutil.Process | None] = {}
        """Processes found by the last scan, by pid and start: the process if it carries the mark, else None."""
        self._text, self._read = "", 0
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        environment = {**os.environ, "MONARCH_RL_TEST": self._mark, "OMP_NUM_THREADS": "1", **self._scratch.variables()}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def processes(self) -> dict[psutil.Process, str]:
        """Running processes with their command lines, which are read at once since some processes are short-lived.

        The environment of a process is read once: reading all of them several times a second would use much of a core.
        """
        scanned, self._scanned = self._scanned, {}
        running = {}
        for pid, start in _running():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if (pid, start) in scanned:
                    process = scanned[pid, start]
                else:
                    process = psutil.Process(pid)
                    if not (environment := process.environ()):  # it is about to run another program, or to end
                        continue
                    if environment.get("MONARCH_RL_TEST") != self._mark:
                        process = None
                self._scanned[pid, start] = process
                if process is not None:
                    running[process] = " ".join(process.cmdline())
        return running

    def left(self) -> list[str]:
        """The running processes, for an error message."""
        return [f"{process.pid} {command}" for process, command in self.processes().items()]

    def wait(self, seconds: float = START_S) -> int:
        """The exit code."""
        return exit_code(self.process, lambda: f"its end\n{self.output()}", max(seconds, LEAST_S))

    def wait_for(self, file: Path) -> str:
        """The text of ``file`` once it exists."""

        def text() -> str:
            ended = self.process.poll() is not None
            found = file.read_text() if file.exists() else ""
            assert found or not ended, f"ended early\n{self.output()}"
            return found

        return wait_until(text, lambda: f"{file.name}\n{self.output()}", START_S)

    def semaphores(self) -> set[int]:
        """Inodes of the semaphores of its processes in /dev/shm, whose names there differ from those at creation and
        mapping."""
        found: set[int] = set()
        for process in self.processes():
            with suppress(OSError):  # it has ended meanwhile
                text = Path(f"/proc/{process.pid}/maps").read_text()
                found |= set(map(int, re.findall(r" (\d+) +/dev/shm/sem\.", text)))
        return found

    def assert_gone(self, seconds: float = START_S) -> None:
        """All processes end, and leave no temporary file except torchrun's log folders."""
        left: list[str] = []

        def gone() -> bool:
            nonlocal left
            left = self.left()
            return not left

        wait_until(gone, lambda: f"the end of {left}\n{self.output()}", max(seconds, LEAST_S), LOOK_S)
        files = [
            path.name
            for path in self._scratch.path.iterdir()
            if not path.name.startswith("torchelastic_") and not path.is_symlink()  # to the compile cache
        ]
        assert not files, f"left in the temporary directory: {files}"

    def output(self) -> str:
        """The output of the command so far. Only new output is read."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            new = log.read()
        self._read += len(new)
        self._text += self._decoder.decode(new)
        return self._text

    def kill(self) -> None:
        """Kill all remaining processes at the end of a test."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        exit_code(self.process)
        self._scratch.remove()


def gone(pid: int) -> bool:
    """Whether the process has ended, even if nobody has waited for it yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _running() -> Iterator[tuple[int, bytes]]:
    """Pid and start time of all running processes of this machine."""
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended meanwhile
            # The state and the start time follow the command, which may have any characters.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] not in (b"Z", b"X"):
                yield pid, fields[19]


Start = Callable[[Sequence[str]], Launched]


@contextmanager
def launching(folder: Path) -> Iterator[Start]:
    """Start commands that log into ``folder``; processes that a failed test leaves behind are killed."""
    started: list[Launched] = []

    def begin(command: Sequence[str]) -> Launched:
        launched = Launched(command, folder / f"log{len(started)}")
        started.append(launched)
        return launched

    try:
        yield begin
    finally:
        for launched in started:
            launched.kill()
