"""A process's own settings: whose end it follows, a quick exit, its title and its name in ``console.log``, and its
garbage collector.

Imports nothing heavy, because it is imported before Monarch. Processes end with others on Linux only.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote, unquote

import setproctitle

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_owner: int | None = None
"""pid of the process for which the fork server forked this one."""


def open_standard_streams() -> None:
    """Open ``/dev/null`` in place of standard streams that were closed before the program started (``>&-``): otherwise
    other files get their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
            stream = open(number, "w" if number else "r")  # noqa: SIM115  as long as the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def set_owner(owner: int) -> None:
    """Record that this process was forked by the fork server, which ends it when process ``owner`` ends."""
    global _owner
    _owner = owner


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send signal ``number`` to this process when the thread that started it ends.

    ``parent`` is the pid of the starter: if it has already ended, this process ends at once. Nothing is done if the
    starter had this process forked (``fork_server.py``), because the server already ends it with its owner.
    """
    if parent is not None and parent == _owner:
        return
    _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:  # it died before the line above
        os._exit(1)


def end_group(leader: int) -> None:
    """Kill what a process has left in its own process group, if it made one. Call it once the process has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def signal_name(number: int) -> str:
    """Name of a signal, such as ``SIGKILL``; ``signal 40`` for real-time signals, most of which have no name."""
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
    """End this process: run the exit handlers, but skip the interpreter's finalization.

    With many libraries, finalization takes seconds, joins threads that are not needed, and makes other threads that
    still run fail with tracebacks.
    """
    forget()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # it is closed
            stream.flush()
    os._exit(code)


def exit_code_of(run: Callable[[], object]) -> int:
    """Run a program; returns the exit code that the interpreter would end with. An integer result is an exit code."""
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
"""The operating system's name of the threads in which Monarch calls Python."""
MONARCH_END_S = 10.0
"""Seconds for these threads to end; with a core for each they take milliseconds."""


def monarch_threads() -> int:
    """Number of Monarch's threads in this process; 0 if the system is not Linux."""
    found = 0
    with suppress(OSError):  # not Linux
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended
                found += Path(f"/proc/self/task/{thread}/comm").read_text().strip() == MONARCH_THREAD
    return found


def wait_for_threads() -> None:
    """Wait until Monarch's threads have ended. Monarch's own exit handler waits for a second, which is too short on a
    machine without free cores: a Rust thread that acquires the GIL during finalization aborts the process."""
    deadline = time.monotonic() + MONARCH_END_S
    while monarch_threads() and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_at_exit() -> None:
    """Register :func:`wait_for_threads` as an exit handler. Call it before Monarch is imported, because exit handlers
    run last in, first out."""
    atexit.register(wait_for_threads)


def forget() -> None:
    """Unregister :func:`wait_for_threads`, for a process that skips the interpreter's finalization."""
    atexit.unregister(wait_for_threads)


# -- Python's garbage collector, exempting objects that never become garbage ------------------------------------------


def freeze_heap(collect_after: int | None = None) -> None:
    """Exempt all objects that exist now from garbage collection. Call it once a process is set up.

    Imports alone create hundreds of thousands of objects, which live as long as the process. Each full collection
    visits all of them, which took more than half of the CPU time of a rollout worker.

    Args:
        collect_after: number of new objects, minus freed ones, after which Python looks for garbage among them; every
            other time also among older ones. None keeps Python's own thresholds (``gc.get_threshold``).
    """
    gc.collect()  # existing garbage, such as tensors that the set-up left in a cycle, must not be frozen
    gc.freeze()
    if collect_after is not None:
        gc.set_threshold(collect_after, 2, 2)  # full collections about as often as by default
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # so that objects are freed in the usual order at exit, before their modules


def thaw_heap() -> None:
    """Undo :func:`freeze_heap`, after many of the exempted objects were replaced. Not for a forked process: it shares
    memory pages with the objects that its fork server froze, and the next collection would copy them."""
    gc.unfreeze()


def leave_heap() -> None:
    """Disable garbage collection at the end of this process, whose memory is freed anyway. Call it early: exit handlers
    that are registered later run before it.

    The interpreter collects several times during finalization, which took most of the time for a controller to end.
    """
    atexit.register(_leave)


def _leave() -> None:
    gc.freeze()
    gc.disable()


# -- the process title that ``ps`` shows ------------------------------------------------------------------------------


def prepare_titles() -> None:
    """Let ``setproctitle`` locate this process's command line, which it can only do before the environment changes.

    Also prevents a title longer than the command line from overwriting the environment that other processes read.
    """
    before = os.environ.get("SPT_NOENV")
    os.environ["SPT_NOENV"] = "1"
    setproctitle.getproctitle()
    del os.environ["SPT_NOENV"]
    if before is not None:
        os.environ["SPT_NOENV"] = before


def show_title(title: str) -> None:
    """Make ``ps`` show ``monarch_rl::{title}``."""
    prepare_titles()
    setproctitle.setproctitle(f"monarch_rl::{title}")


# -- the name of a process in ``console.log`` --------------------------------------------------------------------------

CONSOLE_VARIABLE = "MONARCH_RL_CONSOLE"
"""Environment variable that the controller's ``observe/console_relay.py`` sets: the inode numbers of its pipes for
standard output and error, and the folder of named pipes, separated by colons."""
BELL = "bell"
"""Named pipe in that folder by which the relay learns of a new one."""
_MESH = re.compile(r"([a-z]+?)(\d*)(?:-(\d+))?(?: @ .*)?")
"""Title of an actor's process: mesh, number of the mesh, rank in it, and the host."""
_NAMES = {"generator": "generator", "rollout": "rollout worker", "buffer": "buffer"}


def print_as_titled(title: str) -> None:
    """:func:`print_as` the actor or engine whose process has this title; another process keeps the name of the one that
    started it."""
    found = _MESH.fullmatch(title)
    if found is None:
        return
    mesh, number, rank = found.groups()
    if mesh == "trainer":
        print_as(f"trainer rank {rank or 0}")
    elif mesh in _NAMES:
        print_as(f"{_NAMES[mesh]} {number}".rstrip())
    elif mesh == "engine":
        print_as("engine", of_starter=True)


def print_as(name: str, of_starter: bool = False) -> None:
    """Have ``console.log`` name this process as the one that prints what it and its children print.

    For this it gets a named pipe to the console relay in place of the one that it inherited. A stream that goes
    elsewhere stays, and so do both if the relay has ended.

    Args:
        of_starter: append the name of the process from which this one inherited its output, as in "engine of
            generator 0".
    """
    *inodes, folder = os.environ.get(CONSOLE_VARIABLE, "").split(":", 2)
    if not folder:
        return
    replaced = dict[str, int]()
    for number in (1, 2):
        with suppress(OSError):  # the relay or its folder is gone, or the descriptor is closed
            link = os.readlink(f"/proc/self/fd/{number}")
            where, _, inherited = link.rpartition("/")
            if where == folder:
                console, _, starter = inherited.split("-", 2)
            elif link in (pipes := [f"pipe:[{inode}]" for inode in inodes]):
                console, starter = str(pipes.index(link) + 1), ""  # 1 for both if they are the same
            else:
                continue
            whole = f"{name} of {unquote(starter)}" if of_starter and starter else name
            if console not in replaced:
                replaced[console] = _named_pipe(folder, console, whole)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os.dup2(replaced[console], number)
    for descriptor in replaced.values():
        os.close(descriptor)


def _named_pipe(folder: str, console: str, name: str) -> int:
    """Make a named pipe that the relay reads, and return a descriptor for writing. Raises OSError."""
    path, fresh = f"{folder}/{console}-{os.getpid()}-{quote(name, safe=' ')}", f"{folder}/.{console}-{os.getpid()}"
    os.mkfifo(fresh, 0o600)
    writer = -1
    try:
        # For reading, too: it opens although nobody reads yet, and outlives a relay that is killed.
        writer = os.open(fresh, os.O_RDWR)
        bell = os.open(f"{folder}/{BELL}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.rename(fresh, path)
            os.write(bell, b"\n")
        finally:
            os.close(bell)
    except OSError:
        with suppress(OSError):
            os.unlink(fresh)
        if writer >= 0:
            os.close(writer)
        raise
    return writer
