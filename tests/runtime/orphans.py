"""A script that checks that the child of an ending process is always found. It adopts orphans, as a host does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading

from monarch_rl.runtime.host import running_descendants
from monarch_rl.runtime.process import adopt_orphans

TIMES = 200
"""A single scan misses one process in 15."""


def is_found() -> bool:
    """Whether every scan finds the child of a process until the process has ended."""
    command = ["sh", "-c", "sleep 600 > /dev/null & echo $!; read _"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    ending = threading.Timer(random.uniform(0.0, 0.01), parent.communicate)
    ending.start()
    found = True
    while found and ending.is_alive():
        found = any(process.pid == child for process in running_descendants())
    os.kill(child, signal.SIGKILL)
    ending.join()
    os.waitpid(child, 0)
    return found


if __name__ == "__main__":
    adopt_orphans()
    assert all(is_found() for _ in range(TIMES)), "a process was missed"
