"""Monarch's threads at the end of a process. Imports nothing heavy: it is imported before Monarch."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from pathlib import Path

NAME = "monarch-pytokio"
"""Of Monarch's threads that call Python, as the system has it."""
END_S = 10.0
"""Seconds for them to end; with a core for each they take milliseconds."""


def running() -> int:
    """How many of them this process has; 0 where the system does not say."""
    found = 0
    with suppress(OSError):  # not Linux
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended
                found += Path(f"/proc/self/task/{thread}/comm").read_text().strip() == NAME
    return found


def let_end() -> None:
    """Wait until they have ended. Monarch's own exit handler gives them a second. On a machine without cores that is
    too little, and a thread of Rust that asks for the interpreter while that is taken apart aborts the process."""
    deadline = time.monotonic() + END_S
    while running() and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_at_exit() -> None:
    """Register :func:`let_end` for the end of this process. Before Monarch is imported, because the last that was
    registered is called first."""
    atexit.register(let_end)


def forget() -> None:
    """This process ends without taking the interpreter apart."""
    atexit.unregister(let_end)
