"""Waits of tests, by a clock that counts only time in which the waiter itself ran.

A wait ticks every 0.05 s, and a tick counts for 0.25 s at most. So a machine that stalls, or that leaves this process
without a core for longer than that, hardly uses up the limit of a wait; only an event that does not happen while the
waiter runs exhausts it. Limits are generous because they merely end a hang. That an event happens *at once* is asserted
by its cause (the message, the event, a deadline that has not passed), never by a duration.

``tools/lint_clocks.py`` finds waits of tests that measure the wall clock instead.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

T = TypeVar("T")

LIMIT_S = 120.0
"""Seconds, by this clock, after which a wait counts as a hang."""
TICK_S = 0.05
COUNTED_S = 0.25
"""Maximum seconds that a tick counts for."""


class Impatient(AssertionError):
    """An event that a test waited for did not happen."""


class Patience:
    """The clock of one wait: call :meth:`tick` at least every :data:`TICK_S`.

    Args:
        what: the awaited event, for the error message; or a function that describes it on failure.
        seconds: the limit by this clock.
    """

    def __init__(self, what: str | Callable[[], str], seconds: float = LIMIT_S) -> None:
        self._what, self._seconds = what, seconds
        self._passed_s = 0.0
        self._ticked = time.monotonic()

    def tick(self) -> None:
        """Count the time since the last tick. Raises :class:`Impatient` beyond the limit."""
        now = time.monotonic()
        self._passed_s += min(now - self._ticked, COUNTED_S)
        self._ticked = now
        if self._passed_s > self._seconds:
            what = self._what if isinstance(self._what, str) else self._what()
            raise Impatient(f"waited {self._seconds:g} s in vain for {what}")


def wait_until(
    condition: Callable[[], T | None], what: str | Callable[[], str], seconds: float = LIMIT_S, every_s: float = TICK_S
) -> T:
    """Wait until ``condition()`` is true, and return what it returned.

    Args:
        condition: its exceptions end the wait.
        what: completes "waited in vain for ..."; a function is called only on failure.
        seconds: the limit, by the clock of this module.
        every_s: seconds between two calls of an expensive condition; at most :data:`COUNTED_S`.
    """
    patience = Patience(what, seconds)
    while not (found := condition()):
        patience.tick()
        time.sleep(every_s)
    return found


async def until(condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = LIMIT_S) -> Any:
    """:func:`wait_until` in a coroutine; ``condition`` may be one, too. It works in virtual time, without delay."""
    patience = Patience(what, seconds)
    while True:
        answer = condition()
        found = await answer if inspect.isawaitable(answer) else answer
        if found:
            return found
        patience.tick()
        await asyncio.sleep(TICK_S)


async def patiently(awaitable: Awaitable[T], what: str = "an awaitable", seconds: float = LIMIT_S) -> T:
    """Await it and return its result; beyond the limit, by the clock of this module, cancel it."""
    task = asyncio.ensure_future(awaitable)
    patience = Patience(what, seconds)
    try:
        while not (await asyncio.wait({task}, timeout=TICK_S))[0]:
            patience.tick()
    except BaseException:
        task.cancel()
        raise
    return task.result()


def result_of(future: Future[T], what: str = "a future", seconds: float = LIMIT_S) -> T:
    """``future.result()`` of another thread's future."""
    patience = Patience(what, seconds)
    while True:
        try:
            return future.result(TICK_S)
        except FutureTimeout:
            if future.done():  # the future itself timed out, or was done just after this check
                return future.result()
            patience.tick()


def exit_code(process: subprocess.Popen[Any], what: str | Callable[[], str] = "", seconds: float = LIMIT_S) -> int:
    """``process.wait()``: the exit code."""
    patience = Patience(what or f"the end of {process.args!r}", seconds)
    while True:
        try:
            return process.wait(TICK_S)
        except subprocess.TimeoutExpired:
            patience.tick()


def output_of(process: subprocess.Popen[Any], seconds: float = LIMIT_S) -> tuple[Any, Any]:
    """``process.communicate()``: the output in its pipes until it ended."""
    patience = Patience(f"the end of {process.args!r}", seconds)
    while True:
        try:
            return process.communicate(timeout=TICK_S)
        except subprocess.TimeoutExpired:
            patience.tick()


def run(command: Sequence[Any], *, seconds: float = LIMIT_S, **popen: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(command, capture_output=True, text=True)``; killed beyond the limit.

    Args:
        command: the program and its arguments.
        seconds: the limit, by the clock of this module.
        popen: further arguments of ``subprocess.Popen``.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([str(part) for part in command], **(pipes | popen)) as process:
        try:
            output, errors = output_of(process, seconds)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def join(thread: threading.Thread, seconds: float = LIMIT_S) -> None:
    """``thread.join()`` until the thread has ended."""
    patience = Patience(f"the end of thread {thread.name}", seconds)
    while True:
        thread.join(TICK_S)
        if not thread.is_alive():
            return
        patience.tick()


def happened(event: Any, what: str, seconds: float = LIMIT_S) -> None:
    """``event.wait()`` of ``threading`` or ``multiprocessing``."""
    patience = Patience(what, seconds)
    while not event.wait(TICK_S):
        patience.tick()


def item_of(items: queue.Queue[T], what: str = "an item", seconds: float = LIMIT_S) -> T:
    """``items.get()``."""
    patience = Patience(what, seconds)
    while True:
        try:
            return items.get(timeout=TICK_S)
        except queue.Empty:
            patience.tick()
