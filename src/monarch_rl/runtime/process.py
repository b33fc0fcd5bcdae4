"""What a process sets for itself: how its life is tied to others, a quick end, its title, its garbage collector.

Imports nothing heavy: it is imported before Monarch. Linux only: elsewhere nothing is tied.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import setproctitle

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
    forget()
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


# -- Monarch's threads at the end of a process ------------------------------------------------------------------------

MONARCH_THREAD = "monarch-pytokio"
"""Name of the threads in which Monarch calls Python, as the system has it."""
MONARCH_END_S = 10.0
"""Seconds for them to end; with a core for each they take milliseconds."""


def monarch_threads() -> int:
    """How many of them this process has; 0 where the system does not say."""
    found = 0
    with suppress(OSError):  # not Linux
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended
                found += Path(f"/proc/self/task/{thread}/comm").read_text().strip() == MONARCH_THREAD
    return found


def let_end() -> None:
    """Wait until they have ended. Monarch's own exit handler gives them a second. On a machine without cores that is
    too little, and a thread of Rust that asks for the interpreter while that is taken apart aborts the process."""
    deadline = time.monotonic() + MONARCH_END_S
    while monarch_threads() and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_at_exit() -> None:
    """Register :func:`let_end` for the end of this process. Before Monarch is imported, because the last that was
    registered is called first."""
    atexit.register(let_end)


def forget() -> None:
    """This process ends without taking the interpreter apart."""
    atexit.unregister(let_end)


# -- Python's collector of reference cycles, kept away from what never becomes garbage --------------------------------


def freeze_heap() -> None:
    """Exempt all objects that exist now from garbage collection. Call it when a process is set up.

    Imports alone make hundreds of thousands of objects, which live as long as the process. Each full collection looks
    at all of them: that was more than half of the CPU time of a rollout worker.
    """
    gc.collect()  # what is garbage already, such as tensors that a set-up left in a cycle, must not stay forever
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # at the end objects are to go in the usual order, before their modules


def thaw_heap() -> None:
    """Undo :func:`freeze_heap`, where much of what it exempted was replaced. Not in a forked process: what its fork
    server has frozen shares its pages with that, and the next collection would copy them."""
    gc.unfreeze()


def leave_heap() -> None:
    """Collect nothing at the end of this process: what cycles hold goes with it. Call it early, before other functions
    are registered for the end, which then run before.

    The interpreter collects several times while it takes its modules apart: most of what the end of a controller took.
    """
    atexit.register(_leave)


def _leave() -> None:
    gc.freeze()
    gc.disable()


# -- the title, which ``ps`` shows ------------------------------------------------------------------------------------


def prepare_titles() -> None:
    """Have ``setproctitle`` find this process's command line, before the environment is changed: later it cannot.

    A title that is longer than the command line would overwrite the environment that others read; not after this.
    """
    before = os.environ.get("SPT_NOENV")
    os.environ["SPT_NOENV"] = "1"
    setproctitle.getproctitle()
    del os.environ["SPT_NOENV"]
    if before is not None:
        os.environ["SPT_NOENV"] = before


def show_title(title: str) -> None:
    """Have ``ps`` show ``monarch_rl::`` and ``title``."""
    prepare_titles()
    setproctitle.setproctitle(f"monarch_rl::{title}")
