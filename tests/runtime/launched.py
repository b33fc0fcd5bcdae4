"""Starting a script as a user would, and finding every process it brought up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from monarch_rl.runtime.scratch import ScratchFolder

SCRIPT = Path(__file__).with_name("script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
START_S = 120.0
"""Shared cores: a start takes a few seconds when nothing else runs."""


class Launched:
    """A command in a session of its own. All processes below it carry a mark in their environment."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._log = log
        self._scratch = ScratchFolder()
        """The command's temporary directory."""
        environment = {**os.environ, "MONARCH_RL_TEST": self._mark, "OMP_NUM_THREADS": "1", **self._scratch.variables()}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def processes(self) -> dict[psutil.Process, str]:
        """Those that still run, with their command lines: some live for a moment only, and can be asked for it once."""
        running = {}
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MONARCH_RL_TEST") == self._mark:
                    running[process] = " ".join(process.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return running

    def left(self) -> list[str]:
        """The processes that still run, for a message."""
        return [f"{process.pid} {command}" for process, command in self.processes().items()]

    def wait(self, seconds: float = START_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s\n{self.output()}") from None

    def wait_for(self, file: Path) -> str:
        """The text of ``file`` once it is there."""
        deadline = time.monotonic() + START_S
        while not file.exists() or not file.read_text():
            assert self.process.poll() is None, f"ended early\n{self.output()}"
            assert time.monotonic() < deadline, f"no {file.name} after {START_S} s\n{self.output()}"
            time.sleep(0.05)
        return file.read_text()

    def semaphores(self) -> set[int]:
        """Inodes of the semaphores that its processes have now in /dev/shm, where they have other names than those by
        which they were made and mapped."""
        found: set[int] = set()
        for process in self.processes():
            with suppress(OSError):  # it has ended meanwhile
                text = Path(f"/proc/{process.pid}/maps").read_text()
                found |= set(map(int, re.findall(r" (\d+) +/dev/shm/sem\.", text)))
        return found

    def assert_gone(self, seconds: float) -> None:
        """No process may be left after ``seconds``, and no temporary file but torchrun's own folders of logs."""
        deadline = time.monotonic() + seconds
        while remaining := self.left():
            assert time.monotonic() < deadline, f"left after {seconds} s: {remaining}\n{self.output()}"
            time.sleep(0.1)
        files = [path.name for path in self._scratch.path.iterdir() if not path.name.startswith("torchelastic_")]
        assert not files, f"left in the temporary directory: {files}"

    def output(self) -> str:
        """What the command wrote so far."""
        return self._log.read_text()

    def kill(self) -> None:
        """End whatever is left; for the end of a test."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)
        self._scratch.remove()


Start = Callable[[Sequence[str]], Launched]


@contextmanager
def launching(folder: Path) -> Iterator[Start]:
    """Start commands that log into ``folder``; whatever a failed test leaves of them is killed."""
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
