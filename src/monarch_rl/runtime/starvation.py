"""How long processes are ready to run but have no core. This distinguishes a starved machine from a run that hangs.

Linux counts for each thread the time for which it was ready to run but had no core (``/proc/PID/task/*/schedstat``).
All threads are read, because the first one does little of a process's work. A process that waits for another one, or is
idle, is not ready to run, so this time does not grow.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

logger = logging.getLogger("monarch_rl")

HOST_PID_VARIABLE = "MONARCH_RL_HOST_PID"
"""pid of the host process, whose descendants are the run's processes on this machine. Set by ``runtime/host.py`` for
all processes of one host. Not for users."""
SAME_LOOK_S = 0.2
"""Seconds for which a look at all processes of the run is reused, because many waits end at the same time."""


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Core time of a process in seconds, summed over all threads that are alive, since each began."""

    ran_s: float
    queued_s: float
    """Time ready to run, but without a core."""

    def queued_share(self, before: CoreTime, seconds: float) -> float:
        """The share of the last ``seconds`` that the process would have saved on an idle machine, between 0 and 1.

        A single thread that is always ready to run and gets a core half of the time gives 0.5. Concurrent threads are
        weighted by the core time that they want.
        """
        queued = max(0.0, self.queued_s - before.queued_s)  # the times of threads that have ended are no longer summed
        ran = max(0.0, self.ran_s - before.ran_s)
        wanted = max(queued + ran, seconds)
        return queued / wanted if wanted > 0 else 0.0


def core_time(pid: int) -> CoreTime:
    """Core time of a process on this machine; zeros if it has ended, or the system is not Linux."""
    ran = queued = 0
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return CoreTime(0.0, 0.0)
    for task in tasks:
        fields = _read(f"/proc/{pid}/task/{task}/schedstat").split()
        if len(fields) >= 2:
            ran, queued = ran + int(fields[0]), queued + int(fields[1])
    return CoreTime(ran / 1e9, queued / 1e9)


def run_processes() -> list[int]:
    """pids of the processes of this run on this machine that this process can see, including itself."""
    root = int(os.environ.get(HOST_PID_VARIABLE, os.getpid()))
    below: dict[int, list[int]] = defaultdict(list)
    try:
        names = os.listdir("/proc")
    except OSError:  # not Linux
        return [os.getpid()]
    for name in names:
        if name.isdigit():
            # State and parent follow the command, which may contain any characters.
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if len(fields) >= 2:
                below[int(fields[1])].append(int(name))
    found, open_ends = {root, os.getpid()}, [root]
    while open_ends:
        children = below.pop(open_ends.pop(), [])
        found.update(children)
        open_ends += children
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Look:
    """Core times of all processes of the run at one time."""

    at: float
    """``time.monotonic()``"""
    processes: Mapping[int, CoreTime]

    def most_starved(self, before: Look) -> tuple[int, float]:
        """pid of the process with the largest :meth:`CoreTime.queued_share` since ``before``, and that share."""
        seconds = self.at - before.at
        shares = [
            (self.processes[pid].queued_share(before.processes[pid], seconds), pid)
            for pid in self.processes.keys() & before.processes.keys()
        ]
        share, pid = max(shares, default=(0.0, os.getpid()))
        return pid, share


_last_look = Look(float("-inf"), {})


def look(pids: Iterable[int] | None = None) -> Look:
    """Read the core times of the run's processes on this machine, or of ``pids``. Takes some milliseconds."""
    global _last_look
    if pids is not None:
        return Look(time.monotonic(), {pid: core_time(pid) for pid in pids})
    if time.monotonic() - _last_look.at > SAME_LOOK_S:
        _last_look = look(run_processes())
    return _last_look


def warn_if_not_counted() -> None:
    """Log a warning if starvation cannot be measured on this machine."""
    if not os.path.exists("/proc/self/schedstat"):
        logger.warning(
            "this system does not record how long threads wait for a core (/proc/PID/schedstat). If it has too few "
            "cores, deadlines are not stretched, and a process that gets no core counts as idle"
        )


def _read(path: str) -> bytes:
    """Contents of a small file of /proc; empty if its process or thread has ended."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
