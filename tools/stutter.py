"""Runs a command, by default all tests, while repeatedly pausing it, as on a busy virtual machine that is paused.

    python tools/stutter.py                                          ./tools/test
    python tools/stutter.py --times 5 -- ./tools/test tests/runtime  five times, or up to the first failure

Alongside the command, processes spin on every core at its priority. At random times all processes of the command,
including pytest, are stopped for a random duration: also those in other sessions and those whose parents have ended. A
process that a test has stopped itself is left to that test.

A process belongs to the command if its environment has the command's mark, or if its parent belongs to the command.
Times and durations are determined by ``--seed``; each repetition has the next seed. The exit code is the command's.
Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
MARK = "MONARCH_RL_STUTTER"
LOOK_S = 0.2
"""Seconds between two looks at /proc. A process without the mark is found if a look sees it before its parent ends."""
STANDS_S = 1.0
"""Maximum seconds to wait until a signal has stopped a process, which a system call may delay."""
END_S = 120.0
"""Seconds for an interrupted command to end its processes before they are killed."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HOG = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it never outlives the process that started it
while os.getppid() == {parent}:
    for _ in range(1_000_000):
        pass
"""


class Interrupted(Exception):
    """This process received a signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass(frozen=True, slots=True)
class Stat:
    """A process according to /proc/PID/stat."""

    pid: int
    parent: int
    state: str
    started: str
    """Start time in ticks; distinguishes the process from later ones with the same pid."""

    @classmethod
    def read(cls, pid: int) -> Stat | None:
        """The current state of a process; None if it does not exist."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        fields = text[text.rindex(")") + 2 :].split()
        return cls(pid, int(fields[1]), fields[0], fields[19])

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"

    @property
    def has_ended(self) -> bool:
        return self.state in "ZX"


@dataclass
class Tree:
    """The processes of a command that have been seen."""

    root: int
    mark: bytes
    """Mark in the environments of the command's processes."""
    known: dict[int, str] = field(default_factory=dict)
    """Start times of the command's processes, by pid."""
    strangers: dict[int, str] = field(default_factory=dict)
    """Start times of other processes, by pid."""

    def look(self) -> dict[int, Stat]:
        """The command's processes that run now, by pid."""
        stats = {stat.pid: stat for name in os.listdir("/proc") if name.isdigit() and (stat := Stat.read(int(name)))}
        for those in (self.known, self.strangers):
            for pid in [pid for pid, started in those.items() if pid not in stats or stats[pid].started != started]:
                del those[pid]
        new = {pid: stat for pid, stat in stats.items() if pid not in self.known and pid not in self.strangers}
        environments = {pid: _environment(pid) for pid in new}
        while found := [
            stat
            for pid, stat in new.items()
            if stat.parent in self.known or pid == self.root or self.mark in environments[pid]
        ]:
            self.known |= {stat.pid: stat.started for stat in found}
            new = {pid: stat for pid, stat in new.items() if pid not in self.known}
        # The environment is empty while a process executes another program, and for kernel threads.
        self.strangers |= {pid: stat.started for pid, stat in new.items() if environments[pid]}
        return {pid: stats[pid] for pid in self.known if not stats[pid].has_ended}


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or it is another user's
        return b""


class Standstill:
    """Stops all processes of a tree, until :meth:`end`."""

    def __init__(self) -> None:
        self._stopped: list[Stat] = []
        self.left_alone: set[int] = set()
        """pids of processes that were already stopped by others."""

    def __len__(self) -> int:
        return len(self._stopped)

    def begin(self, tree: Tree) -> None:
        """Stop parents before their children, so that no parent stops a child meanwhile, and repeat for processes that
        have been started meanwhile."""
        while level := self._next_level(tree.look()):
            for stat in level:
                self._stopped.append(stat)
                _send(stat.pid, signal.SIGSTOP)
            deadline = time.monotonic() + STANDS_S
            while time.monotonic() < deadline and not all(map(_stands, level)):
                time.sleep(0.001)

    def _next_level(self, stats: dict[int, Stat]) -> list[Stat]:
        """The running processes whose parents are stopped or not in the tree."""
        stopped = {stat.pid for stat in self._stopped}
        self.left_alone |= {pid for pid, stat in stats.items() if stat.is_stopped and pid not in stopped}
        waiting = {pid: stat for pid, stat in stats.items() if pid not in stopped | self.left_alone}
        return [stat for stat in waiting.values() if stat.parent not in waiting]

    def end(self) -> None:
        """Continue all processes, children before their parents."""
        while self._stopped:
            stat = self._stopped[-1]
            now = Stat.read(stat.pid)
            if now is not None and now.started == stat.started:
                _send(stat.pid, signal.SIGCONT)
            self._stopped.pop()


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _stands(stat: Stat) -> bool:
    now = Stat.read(stat.pid)
    return now is None or now.started != stat.started or now.is_stopped or now.has_ended


@contextlib.contextmanager
def hogs(number: int) -> Iterator[None]:
    """Run processes that spin at this process's priority, for the duration of the block."""
    command = [sys.executable, "-S", "-c", HOG.format(parent=os.getpid())]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):  # in another session than the command, so that autogroups give each half of the CPU
            started.append(subprocess.Popen(command, process_group=0))
        yield
    finally:
        for hog in started:
            hog.kill()
        for hog in started:
            hog.wait()


def run(command: list[str], stop_s: float, every_s: float, seed: int) -> int:
    """Run the command once; returns its exit code. If interrupted, ends the command and raises :class:`Interrupted`."""
    rng, began = random.Random(seed), time.monotonic()
    mark = f"{os.getpid()}-{began:.6f}"
    # SPT_NOENV, because SGLang's process titles would overwrite the environment that /proc shows.
    environment = os.environ | {MARK: mark, "SPT_NOENV": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    tree, standstill = Tree(process.pid, f"{MARK}={mark}".encode()), Standstill()
    stops = 0
    try:
        at = time.monotonic() + rng.expovariate(1 / every_s)
        while process.poll() is None:
            time.sleep(LOOK_S)
            tree.look()
            if time.monotonic() < at:
                continue
            seconds = rng.uniform(0, stop_s)
            standstill.begin(tree)
            stops += 1
            alone = f", {len(standstill.left_alone)} stopped before" if standstill.left_alone else ""
            say(f"at {time.monotonic() - began:.1f} s {len(standstill)} processes stop for {seconds:.1f} s{alone}")
            time.sleep(seconds)
            standstill.end()
            standstill = Standstill()
            at = time.monotonic() + rng.expovariate(1 / every_s)
    except BaseException as error:
        standstill.end()
        end(process, tree, error.signum if isinstance(error, Interrupted) else signal.SIGTERM)
        raise
    say(f"exit code {process.returncode} after {time.monotonic() - began:.0f} s and {stops} stops, seed {seed}")
    return process.returncode


def end(process: subprocess.Popen[bytes], tree: Tree, signum: int) -> None:
    """Forward a signal, and kill processes that have not ended in time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    for pid in tree.look():
        _send(pid, signal.SIGKILL)
    process.wait()


def say(text: str) -> None:
    print(f"stutter: {text}", flush=True)


def commit() -> str:
    """The commit of this repository, and whether there are uncommitted changes."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    return (found.stdout.strip() or "unknown") + ", with changes" * bool(changed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hogs", type=int, default=1, help="spinning processes per core (default 1)")
    parser.add_argument("--stop-s", type=float, default=40.0, help="longest stop in seconds (default 40)")
    parser.add_argument("--every-s", type=float, default=60.0, help="mean seconds between two stops (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=1, help="number of runs, up to the first failure (default 1)")
    parser.add_argument("command", nargs="*", default=[str(ROOT / "tools" / "test")])
    asked = parser.parse_args(arguments)
    for signum in SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, _interrupt)
    cores = len(os.sched_getaffinity(0))
    say(f"commit {commit()}; {asked.hogs * cores} hogs on {cores} cores; command {' '.join(asked.command)}")
    code = passed = 0
    try:
        with hogs(asked.hogs * cores):
            while code == 0 and passed < asked.times:
                code = run(asked.command, asked.stop_s, asked.every_s, asked.seed + passed)
                passed += code == 0
    except Interrupted as interrupted:
        code = 128 + interrupted.signum
        say(str(interrupted))
    say(f"passed {passed} of {asked.times}")
    return code if code >= 0 else 128 - code


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    for ignored in SIGNALS:  # only the first signal counts
        signal.signal(ignored, signal.SIG_IGN)
    raise Interrupted(signum)


if __name__ == "__main__":
    sys.exit(main())
