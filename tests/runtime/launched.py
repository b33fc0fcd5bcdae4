"""Starting a script as a user would, and finding every process it brought up."""

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
"""Shared cores: a start takes a few seconds when nothing else runs."""
LEAST_S = 60.0
"""What any wait has at least, by the clock of ``tests/patience.py``."""
LOOK_S = 0.25
"""Between two looks at all processes of the machine."""


class Launched:
    """A command in a session of its own. All processes below it carry a mark in their environment."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._log = log
        self._scratch = ScratchFolder()
        """The command's temporary directory."""
        self._known: dict[tuple[int, bytes], psutil.Process | None] = {}
        """Processes that the last look found, by pid and start: itself if it carries the mark, else None."""
        self._text, self._read = "", 0
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        environment = {**os.environ, "MONARCH_RL_TEST": self._mark, "OMP_NUM_THREADS": "1", **self._scratch.variables()}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def processes(self) -> dict[psutil.Process, str]:
        """Those that still run, with their command lines: some live for a moment only, and can be asked for it once.

        The environment of a process is read once: to read it for all of a machine, several times a second, would take
        a good part of a core from the command.
        """
        known, self._known = self._known, {}
        running = {}
        for pid, start in _running():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if (pid, start) in known:
                    process = known[pid, start]
                else:
                    process = psutil.Process(pid)
                    if not (environment := process.environ()):  # it is about to run another program, or to end
                        continue
                    if environment.get("MONARCH_RL_TEST") != self._mark:
                        process = None
                self._known[pid, start] = process
                if process is not None:
                    running[process] = " ".join(process.cmdline())
        return running

    def left(self) -> list[str]:
        """The processes that still run, for a message."""
        return [f"{process.pid} {command}" for process, command in self.processes().items()]

    def wait(self, seconds: float = START_S) -> int:
        """The exit code."""
        return exit_code(self.process, lambda: f"its end\n{self.output()}", max(seconds, LEAST_S))

    def wait_for(self, file: Path) -> str:
        """The text of ``file`` once it is there."""

        def text() -> str:
            ended = self.process.poll() is not None
            found = file.read_text() if file.exists() else ""
            assert found or not ended, f"ended early\n{self.output()}"
            return found

        return wait_until(text, lambda: f"{file.name}\n{self.output()}", START_S)

    def semaphores(self) -> set[int]:
        """Inodes of the semaphores that its processes have now in /dev/shm, where they have other names than those by
        which they were made and mapped."""
        found: set[int] = set()
        for process in self.processes():
            with suppress(OSError):  # it has ended meanwhile
                text = Path(f"/proc/{process.pid}/maps").read_text()
                found |= set(map(int, re.findall(r" (\d+) +/dev/shm/sem\.", text)))
        return found

    def assert_gone(self, seconds: float = START_S) -> None:
        """All processes end, and leave no temporary file but torchrun's own folders of logs."""
        left: list[str] = []

        def gone() -> bool:
            nonlocal left
            left = self.left()
            return not left

        wait_until(gone, lambda: f"the end of {left}\n{self.output()}", max(seconds, LEAST_S), LOOK_S)
        files = [
            path.name
            for path in self._scratch.path.iterdir()
            if not path.name.startswith("torchelastic_") and not path.is_symlink()  # to what is compiled, and stays
        ]
        assert not files, f"left in the temporary directory: {files}"

    def output(self) -> str:
        """What the command wrote so far. Only what is new is read."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            new = log.read()
        self._read += len(new)
        self._text += self._decoder.decode(new)
        return self._text

    def kill(self) -> None:
        """End whatever is left; for the end of a test."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        exit_code(self.process)
        self._scratch.remove()


def gone(pid: int) -> bool:
    """Whether the process has ended, also if nobody has waited for it yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _running() -> Iterator[tuple[int, bytes]]:
    """Pid and time of the start of all processes of this machine that have not ended."""
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended meanwhile
            # After the command, which may have any characters: the state, and later the time of the start.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] not in (b"Z", b"X"):
                yield pid, fields[19]


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
