"""How long processes are ready to run and get no core: what tells a starved machine from a run that hangs.

Linux counts for each thread the time that it was ready to run and had no core (``/proc/PID/task/*/schedstat``). The
first thread alone says little: most of a process's work is done by others. A process that waits for another one, or for
nothing, is not ready to run, so its time does not grow.
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
"""Set by ``runtime/host.py`` for all processes of one host: those below it are the run's. Not for users."""
SAME_LOOK_S = 0.2
"""Seconds for which a look at all processes of the run is used again: many waits end at the same time."""


@dataclass(frozen=True, slots=True)
class CoreTime:
    """What a process had of the cores since its threads began, in seconds, over all threads that live."""

    ran_s: float
    queued_s: float
    """Ready to run, without a core."""

    def queued_share(self, before: CoreTime, seconds: float) -> float:
        """The part of the last ``seconds`` that the process would have saved on an idle machine: between 0 and 1.

        One thread that is ready to run all the time, and gets a core half of the time, gives 0.5. Threads that run side
        by side are weighted by what they want.
        """
        queued = max(0.0, self.queued_s - before.queued_s)  # threads that end take their times with them
        ran = max(0.0, self.ran_s - before.ran_s)
        wanted = max(queued + ran, seconds)
        return queued / wanted if wanted > 0 else 0.0


def core_time(pid: int) -> CoreTime:
    """Of a process on this machine; zeros for one that has ended, and where the system is not Linux."""
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
    """The processes of this run on this machine that can be seen from here, with this one."""
    root = int(os.environ.get(HOST_PID_VARIABLE, os.getpid()))
    below: dict[int, list[int]] = defaultdict(list)
    try:
        names = os.listdir("/proc")
    except OSError:  # not Linux
        return [os.getpid()]
    for name in names:
        if name.isdigit():
            # After the command, which may have any characters: state and parent.
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
    """All processes of the run at one time."""

    at: float
    """``time.monotonic()``"""
    processes: Mapping[int, CoreTime]

    def most_starved(self, before: Look) -> tuple[int, float]:
        """The process with the largest :meth:`CoreTime.queued_share` since ``before``, and this share."""
        seconds = self.at - before.at
        shares = [
            (self.processes[pid].queued_share(before.processes[pid], seconds), pid)
            for pid in self.processes.keys() & before.processes.keys()
        ]
        share, pid = max(shares, default=(0.0, os.getpid()))
        return pid, share


_last_look = Look(float("-inf"), {})


def look(pids: Iterable[int] | None = None) -> Look:
    """Look at the processes of the run on this machine, or at ``pids``. Takes some milliseconds."""
    global _last_look
    if pids is not None:
        return Look(time.monotonic(), {pid: core_time(pid) for pid in pids})
    if time.monotonic() - _last_look.at > SAME_LOOK_S:
        _last_look = look(run_processes())
    return _last_look


def warn_if_not_counted() -> None:
    """Log a warning if no starvation can be seen on this machine."""
    if not os.path.exists("/proc/self/schedstat"):
        logger.warning(
            "this system does not count for how long threads wait for a core (/proc/PID/schedstat): deadlines are not "
            "stretched where it has too few cores, and a process that gets none counts as idle"
        )


def _read(path: str) -> bytes:
    """A small file; empty if its process or thread has ended."""
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
