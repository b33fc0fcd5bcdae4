"""What the tests' processes cost: CPU-seconds of this process and all that it has started, also of those that ended.

A process that is a child of a known one is known from then on, also when its parent ends before it. Of a parent and its
child that end between two looks nobody can tell which ended first: the parent is taken to have waited for the child, as
programs that start processes do. Linux only.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SAMPLE_S = 0.25
"""Seconds between two looks at /proc. A process that lives shorter counts if its parent waits for it."""
IDLE_SHARE = 0.1
"""Of a core: below it, between two looks, the processes are taken to have done nothing."""
TICKS = os.sysconf("SC_CLK_TCK")
STARTED_BY_TESTS = {
    "sglang::": "an engine of SGLang",
    "monarch._src.actor.bootstrap_main": "a mesh of Monarch",
    "-m\0monarch_rl.runtime.host": "a mesh of Monarch",  # a program that only imports it starts none
    "torch.distributed.run": "ranks of torchrun",
    "bin/torchrun": "ranks of torchrun",
}
"""What a command line, with a NUL between its arguments, has in it, and what the process belongs to."""


@dataclass(slots=True)
class Descendant:
    """A process below this one, as last seen."""

    started: str
    """Its start in ticks: another process that gets its pid later has another."""
    parent: int
    cpu_s: float = 0.0
    """Its own CPU-seconds and those of the children that it has waited for."""
    belongs_to: str | None = None
    """The value of :data:`STARTED_BY_TESTS`, if it is one of those."""


class ProcessTree:
    """Looks at all processes below this one again and again, on a thread of its own."""

    def __init__(self) -> None:
        self._known: dict[int, Descendant] = {}
        self._strangers: set[int] = {os.getpid()}
        self._orphans_s = 0.0
        """CPU-seconds of processes that have ended and that nobody here has waited for."""
        self._started: list[str] = []
        self._idle_s = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="process tree", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def cpu_s(self) -> float:
        """CPU-seconds so far, user and system."""
        with self._lock:
            self._look()
            return self._used_s()

    def idle_s(self) -> float:
        """Seconds so far in which the processes waited for something other than a core, roughly."""
        with self._lock:
            return self._idle_s

    def _used_s(self) -> float:
        own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        used = sum(usage.ru_utime + usage.ru_stime for usage in own)
        return used + self._orphans_s + sum(process.cpu_s for process in self._known.values())

    def take_started(self) -> list[str]:
        """What of :data:`STARTED_BY_TESTS` was seen for the first time since the last call."""
        with self._lock:
            self._look()
            taken, self._started = self._started, []
            return taken

    def _watch(self) -> None:
        looked, used_s = time.monotonic(), 0.0
        while not self._ended.wait(SAMPLE_S):
            with self._lock:
                self._look()
                now, now_used_s = time.monotonic(), self._used_s()
                if now_used_s - used_s < IDLE_SHARE * (now - looked):  # clock: this measures, and asserts nothing
                    self._idle_s += now - looked
                looked, used_s = now, now_used_s

    def _look(self) -> None:
        running = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= running
        self._adopt(sorted(running - self._strangers - self._known.keys()))
        ended = {pid for pid in self._known if not self._note(pid)}
        self._orphans_s += sum(self._known[pid].cpu_s for pid in ended if self._is_orphan(pid, ended))
        for pid in ended:
            del self._known[pid]

    def _is_orphan(self, pid: int, ended: set[int]) -> bool:
        """Whether the uppermost process of those that ``ended`` above ``pid`` had no parent here that waits for it."""
        while (parent := self._known[pid].parent) in ended:
            pid = parent
        return parent != os.getpid() and parent not in self._known

    def _adopt(self, candidates: list[int]) -> None:
        """Take up processes whose parents are known; parents may have higher pids than children."""
        parents = {pid: stat[:2] for pid in candidates if (stat := _stat(pid)) is not None}
        found = True
        while found:
            found = False
            for pid, (parent, started) in list(parents.items()):
                if parent == os.getpid() or parent in self._known:
                    self._known[pid] = Descendant(started, parent)
                    del parents[pid]
                    found = True
        self._strangers |= parents.keys()

    def _note(self, pid: int) -> bool:
        """Note what a known process has used so far; whether it is still there."""
        process, stat = self._known[pid], _stat(pid)
        if stat is None or stat[1] != process.started:
            return False
        process.parent, _, process.cpu_s = stat
        # A child has its parent's command line first, and SGLang sets a title later.
        if process.belongs_to is None and (belongs_to := _belongs_to(pid)):
            process.belongs_to = belongs_to
            self._started.append(belongs_to)
        return True


def _stat(pid: int) -> tuple[int, str, float] | None:
    """Parent, start and CPU-seconds of a process; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[1]), fields[19], sum(map(int, fields[11:15])) / TICKS


def _belongs_to(pid: int) -> str | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return None
    return next((what for part, what in STARTED_BY_TESTS.items() if part in command), None)
