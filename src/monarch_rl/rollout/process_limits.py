"""Limits on what episodes' code does to its worker process: printing, open files, forking, alarms, exits. Reaching a
limit is reported."""

from __future__ import annotations

import _signal  # what `from signal import alarm` is pickled as
import asyncio
import errno
import functools
import gc
import mmap
import os
import resource
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from contextlib import suppress
from typing import Any

from monarch_rl.errors import FilesLeaked
from monarch_rl.rollout.scoring import SHOWN_BYTES, WINDOW_S
from monarch_rl.rollout.tracebacks import place_of

FILES_SHARE = 0.9
"""Share of the process's file limit at which it is replaced; the rest is for its own connections."""
FILES_SHOWN = 3
"""Number of kinds of open files that the message names."""


def check_open_files() -> None:
    """Raise FilesLeaked before the process reaches its limit of open files, where nothing else works either."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY or _lowest_free(most) < FILES_SHARE * most:
        return
    gc.collect()  # closes files that only reference cycles hold
    lowest = _lowest_free(most)
    if lowest < FILES_SHARE * most:
        return
    kinds = Counter(_targets()).most_common(FILES_SHOWN)
    named = ", ".join(f"{target} ({count} times)" for target, count in kinds)
    raise FilesLeaked(
        f"{lowest} of {most} files that this process may open are open, most often {named}. Episodes have to close "
        "what they open, by `with`, `async with` or `finally`"
    )


def _lowest_free(most: int) -> int:
    """The lowest free file descriptor: all below it are open."""
    try:
        number = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return most
    os.close(number)
    return number


def _targets() -> list[str]:
    """Targets of the open files; only the kind of sockets and pipes. Empty if no file descriptor is left for listing
    them."""
    targets = []
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the listing itself is closed by now
                targets.append(os.readlink(f"/proc/self/fd/{number}").partition(":[")[0])
    return targets


class BoundedStream:
    """A standard stream to which a process prints at most :data:`SHOWN_BYTES` characters in :data:`WINDOW_S` seconds.

    Args:
        stream: the stream that it replaces.
        owner: name of the printing code, for the message.
    """

    def __init__(self, stream: Any, owner: str) -> None:
        self._stream, self._owner = stream, owner
        self._left, self._window_ends, self._left_out = 0, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Print the text, or the part of it that is within the limit."""
        moment = time.monotonic()
        if moment >= self._window_ends:
            if self._left_out:
                self._stream.write(f"\n[{self._left_out:,} characters that {self._owner} printed were left out]\n")
            self._left, self._window_ends, self._left_out = SHOWN_BYTES, moment + WINDOW_S, 0
        shown = text[: self._left]
        if shown:
            self._stream.write(shown)
        self._left -= len(shown)
        if len(shown) < len(text):
            if not self._left_out:
                limit = f"more than {SHOWN_BYTES // 1024} KiB within {WINDOW_S:g} s"
                self._stream.write(f"\n[{self._owner} has printed {limit}: the rest is left out]\n")
            self._left_out += len(text) - len(shown)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


def bound_printing(owner: str) -> None:
    """Limit what ``print`` writes in this process from now on. Loggers that are already set up are not affected."""
    if not isinstance(sys.stdout, BoundedStream):  # another worker of this process
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError):  # printing what a model wrote must not fail an episode
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        streams: Any = BoundedStream(sys.stdout, owner), BoundedStream(sys.stderr, owner)
        sys.stdout, sys.stderr = streams


_copies: _EndsCopies | None = None


class _EndsCopies:
    """Ends forked copies of this process when they return to its event loop."""

    def __init__(self) -> None:
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._thread = threading.get_ident()
        self._reported = mmap.mmap(-1, 1)
        """One byte that all copies share: whether a copy was reported."""

    def after_fork(self) -> None:
        """In a copy: end it once the code that forked waits or ends. Until then it runs freely: children of
        ``multiprocessing`` never return to the event loop."""
        loop: Any = self._loop()
        if loop is None or threading.get_ident() != self._thread or not loop.is_running():
            return
        stack = list(traceback.walk_stack(sys._getframe()))[::-1]
        place = place_of((frame.f_code.co_filename, line) for frame, line in stack)
        # The original process runs the other ready callbacks; the copy must not, as it has the same connections.
        loop._ready.clear()
        loop.call_soon(self._end, place)

    def _end(self, place: str) -> None:
        if not self._reported[0]:
            self._reported[0] = 1
            with suppress(OSError):
                os.write(2, f"an episode called os.fork() at {place}; the child process will be killed\n".encode())
        os._exit(0)


def end_copies() -> None:
    """End copies of this process (``os.fork``) made by code on the running event loop when they return to that loop.
    They would read from the worker's connections and run its episodes, too."""
    global _copies
    if _copies is None:
        os.register_at_fork(after_in_child=_after_fork)
    _copies = _EndsCopies()


def _after_fork() -> None:
    if _copies is not None:
        _copies.after_fork()


def refuse_alarms() -> None:
    """Refuse to set an alarm in this process: only its main thread, where no episode runs, could handle it, and without
    a handler it ends the process. Processes that episodes start are free to set one."""
    for name in ("alarm", "setitimer"):
        checked = _refused_in(os.getpid(), getattr(_signal, name))
        for module in (signal, _signal):  # the same in both, or a function that uses it could not be pickled
            setattr(module, name, checked)


def _refused_in(pid: int, sets_alarm: Any) -> Any:
    @functools.wraps(sets_alarm)
    def checked(*args: Any) -> Any:
        seconds = args[:1] if sets_alarm.__name__ == "alarm" else args[1:2]
        if os.getpid() == pid and any(seconds):  # 0 cancels an alarm, as libraries do in passing
            raise RuntimeError(
                f"signal.{sets_alarm.__name__} would end the worker, with all of its episodes: use asyncio.timeout "
                "around what is awaited, or policy.in_scorer for a function that sets an alarm"
            )
        return sets_alarm(*args)

    return checked


def survive_exits(loop: Any) -> None:
    """Let an event loop go on after SystemExit or KeyboardInterrupt of a task that an episode has created.

    asyncio stores the exception in the task, so the episode fails with it where it awaits the task. But asyncio also
    raises it out of ``run_forever``, which would end the worker. Handles of the same iteration run in the next one.
    On a main thread it is left to end the process.
    """
    if threading.current_thread() is threading.main_thread():
        return
    run_once = loop._run_once

    def run_once_or_exit() -> None:
        try:
            run_once()
        except (SystemExit, KeyboardInterrupt) as error:
            text = f"a task or callback of an episode raised {error!r}; the worker goes on\n"
            os.write(2, text.encode(errors="replace"))

    loop._run_once = run_once_or_exit
