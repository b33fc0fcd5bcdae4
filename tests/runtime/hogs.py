"""Processes that compute all the time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hogs(count: int, core: int | None = None) -> Iterator[None]:
    """Run ``count`` of them at the priority of this process, on any core or on one.

    Each has a session of its own, like hosts: Linux may share cores between sessions first (autogroups).
    """
    loop = ["sh", "-c", "while :; do :; done"]
    started = [subprocess.Popen(loop, start_new_session=True) for _ in range(count)]
    try:
        for hog in started:
            if core is not None:
                os.sched_setaffinity(hog.pid, {core})
        yield
    finally:
        for hog in started:
            hog.kill()
            hog.wait()


def pin(pid: int, core: int) -> None:
    """Pin all threads of a process, and threads that they start, to one core."""
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), {core})
