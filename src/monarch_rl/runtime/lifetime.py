"""Tie the life of a process to its parent's. Linux only; elsewhere these do nothing. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send ``number`` to this process when the thread that started it ends.

    ``parent`` is the pid of the starter: if it has already ended, this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:  # it died before the line above
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
