"""Cost of the processes of tests: CPU-seconds of this process and all of its descendants, including ended ones.

A child of a tracked process is tracked from then on, even if its parent ends before it. If a parent and its child end
between two scans, the order is unknown: the parent is assumed to have waited for the child, as programs that start
processes usually do. Linux only.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SAMPLE_S = 0.25
"""Seconds between two scans of /proc. A process that lives shorter counts if its parent waits for it."""
IDLE_SHARE = 0.1
"""Share of a core below which the processes count as idle between two scans."""
TICKS = os.sysconf("SC_CLK_TCK")
STARTED_BY_TESTS = {
    "sglang::": "an engine of SGLang",
    "monarch._src.actor.bootstrap_main": "a mesh of Monarch",
    "-m\0monarch_rl.runtime.host": "a mesh of Monarch",  # a program that only imports it starts none
    "torch.distributed.run": "ranks of torchrun",
    "bin/torchrun": "ranks of torchrun",
}
"""Part of a command line, with a NUL between its arguments, and what the process belongs to."""


@dataclass(slots=True)
class Descendant:
    """A descendant of this process, as of the last scan."""

    started: str
    """Its start in ticks, which distinguishes it from a later process with the same pid."""
    parent: int
    cpu_s: float = 0.0
    """CPU-seconds of the process and of children that it has waited for."""
    belongs_to: str | None = None
    """The value of :data:`STARTED_BY_TESTS`, if it is one of those."""


class ProcessTree:
    """Scans all descendants of this process periodically, on its own thread."""

    def __init__(self) -> None:
        self._tracked: dict[int, Descendant] = {}
        self._strangers: set[int] = {os.getpid()}
        self._orphans_s = 0.0
        """CPU-seconds of ended processes that no tracked process has waited for."""
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
        return used + self._orphans_s + sum(process.cpu_s for process in self._tracked.values())

    def take_started(self) -> list[str]:
        """The kinds of :data:`STARTED_BY_TESTS` that first appeared since the last call."""
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
        self._adopt(sorted(running - self._strangers - self._tracked.keys()))
        ended = {pid for pid in self._tracked if not self._note(pid)}
        self._orphans_s += sum(self._tracked[pid].cpu_s for pid in ended if self._is_orphan(pid, ended))
        for pid in ended:
            del self._tracked[pid]

    def _is_orphan(self, pid: int, ended: set[int]) -> bool:
        """Whether the topmost of the ``ended`` ancestors of ``pid`` had no tracked parent that waits for it."""
        while (parent := self._tracked[pid].parent) in ended:
            pid = parent
        return parent != os.getpid() and parent not in self._tracked

    def _adopt(self, candidates: list[int]) -> None:
        """Track processes whose parents are tracked; parents may have higher pids than children."""
        parents = {pid: stat[:2] for pid in candidates if (stat := _stat(pid)) is not None}
        found = True
        while found:
            found = False
            for pid, (parent, started) in list(parents.items()):
                if parent == os.getpid() or parent in self._tracked:
                    self._tracked[pid] = Descendant(started, parent)
                    del parents[pid]
                    found = True
        self._strangers |= parents.keys()

    def _note(self, pid: int) -> bool:
        """Update the CPU time of a tracked process; returns whether it still runs."""
        process, stat = self._tracked[pid], _stat(pid)
        if stat is None or stat[1] != process.started:
            return False
        process.parent, _, process.cpu_s = stat
        # A child first has the command line of its parent, and SGLang sets a title later.
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
