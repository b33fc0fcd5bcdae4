"""How the lives of processes are tied together, and a quick end. Imports nothing heavy.

Linux only: elsewhere nothing is tied.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from monarch_rl.runtime import client_threads

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_owner: int | None = None
"""The pid of the process for which the fork server has forked this one."""


def set_owner(owner: int) -> None:
    """Note that this process is forked: the fork server ends it when process ``owner`` ends."""
    global _owner
    _owner = owner


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send ``number`` to this process when the thread that started it ends.

    ``parent`` is the pid of the starter: if it has already ended, this process ends at once. If it had this process
    forked (``fork_server.py``), the two are tied already, and nothing is done.
    """
    if parent is not None and parent == _owner:
        return
    _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:  # it died before the line above
        os._exit(1)


def signal_name(number: int) -> str:
    """Such as SIGKILL; `signal 40` for one of the real-time signals, most of which have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_quickly(code: int) -> NoReturn:
    """End this process: run what is registered for its end, but do not take the interpreter apart.

    That takes seconds with many libraries, joins threads that nobody needs, and those that go on meanwhile fail with
    tracebacks.
    """
    client_threads.forget()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # it is closed
            stream.flush()
    os._exit(code)


def exit_code_of(run: Callable[[], object]) -> int:
    """Run a program; the exit code that the interpreter would end with. A program's own result is an exit code, too."""
    try:
        result = run()
    except SystemExit as end:
        result = end.code
        if not isinstance(result, int | None):
            print(result, file=sys.stderr)
            return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return result if isinstance(result, int) else 0
