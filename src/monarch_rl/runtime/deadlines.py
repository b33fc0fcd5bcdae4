"""Waiting for another process: with a deadline, a description of what is awaited, and the name of who delivers it.

All waits on other processes use this module; ``tools/lint_waits.py`` finds those that do not. Current waits can be read
at any time (``runtime/wait_registry.py``); stall reports are built from them (``watch/stall.py``).

Deadlines are stretched while the machine has no cores for the run (:class:`DeadlineClock`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from monarch_rl.errors import DeadlineExceeded, ProcessLost
from monarch_rl.runtime import starvation, wait_registry

T = TypeVar("T")

CALL_DEADLINE_S = 60.0
"""Seconds for a call whose actor waits for no other process."""
DISK_S = 600.0
"""Seconds to start reading or writing a model, plus everything that does not grow with its size."""
SLOW_BYTES_PER_S = 50e6
"""Bandwidth of the slowest disk or network that a run must cope with: less than half of 1 Gbit/s Ethernet."""


def bytes_s(nbytes: int) -> float:
    """Seconds to read, write or send ``nbytes`` at :data:`SLOW_BYTES_PER_S`."""
    return nbytes / SLOW_BYTES_PER_S


def disk_limit_s(nbytes: int) -> float:
    """Deadline in seconds to load or save a model of ``nbytes``."""
    return DISK_S + bytes_s(nbytes)


_waits_on: dict[int, tuple[str, asyncio.Future[Any]]] = {}
"""Current waits of this process that name whom they wait on: (name, awaited future) by wait number."""
_lost: dict[int, str] = {}
"""By wait number: why the process that this wait is on was lost."""


def lose(name: str, why: str) -> None:
    """End all waits of this event loop on the process ``name`` with :class:`ProcessLost`. Without this call, its loss
    may go unnoticed for minutes. Waits that begin later are on the process that replaces it."""
    loop = asyncio.get_running_loop()
    for number, (on, awaited) in list(_waits_on.items()):
        if on == name and awaited.get_loop() is loop and not awaited.done():
            _lost[number] = why
            awaited.cancel()


def now() -> float:
    """The running event loop's clock, in seconds: ``time.monotonic()``, or virtual time (``simulate/clock.py``)."""
    return asyncio.get_running_loop().time()


async def within(
    limit: float | DeadlineClock, awaitable: Awaitable[T], what: str, *, on: str = "", flag: str = ""
) -> T:
    """Await ``awaitable`` with a deadline, on a clock that runs slower while the machine has no cores for the run.

    Args:
        limit: deadline in seconds, or the clock of a deadline that several waits share.
        awaitable: the awaitable. After the deadline only this wait ends; a call to an actor still runs in that actor.
        what: completes the sentence "waited for ...": names the thing and who has to deliver it, for example
            ``"the gradients of step 3 from trainer rank 1"``.
        on: who has to deliver it: a registered name (:func:`wait_registry.register`), all of a kind
            (``"trainer ranks"``), or the name of something outside the run. The stall report follows these names to the
            cause.
        flag: command-line name of the setting that the deadline comes from, for the message.

    Raises :class:`DeadlineExceeded`, :class:`ProcessLost`, and whatever the awaitable raises.
    """
    task = begun(awaitable)
    del awaitable
    clock, passed_s = (limit, limit.passed_s) if isinstance(limit, DeadlineClock) else (DeadlineClock(limit, what), 0.0)
    seconds, since = clock.seconds, time.time() - passed_s
    number = wait_registry.begin_wait(what, on, seconds - passed_s)
    if on:
        _waits_on[number] = on, task
    try:
        while not task.done() and (window_s := clock.next_window_s()) is not None:
            await done_or_late(task, window_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        wait_registry.end_wait(number)
        _waits_on.pop(number, None)
        why_lost = _lost.pop(number, None)
    if why_lost is not None and task.cancelled():
        passed_s = clock.passed_s
        raise ProcessLost(f"{_waiter()} waited {passed_s:.0f} s for {what}: {on} is lost, {why_lost}", what, passed_s)
    if task.done():
        return task.result()
    # Not awaited: an awaitable that ignores its cancellation would turn the deadline into a hang.
    task.cancel()
    task.add_done_callback(retrieve)
    began = time.strftime("%H:%M:%S", time.localtime(since))
    message = f"{_waiter()} waited {seconds:g} s, since {began}, for {what}"
    if clock.passed_s > 1.1 * seconds + wait_registry.PAUSE_S:
        message += f" ({clock.passed_s:.0f} s by the clock; the rest of the time, the run was stopped or had no cores)"
    if flag:
        message += f" (see --{flag})"
    raise DeadlineExceeded(message, what, seconds)


def begun(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    """``asyncio.ensure_future``, except that no frame holds a reference to one of Monarch's futures.

    Such a future keeps its error, whose traceback keeps the frame: a cycle that Python's collector cannot see, which
    would leak everything that the callers hold.
    """
    if asyncio.isfuture(awaitable) or asyncio.iscoroutine(awaitable):
        return asyncio.ensure_future(awaitable)
    return asyncio.ensure_future(_result_of([awaitable]))


async def _result_of(held: list[Awaitable[T]]) -> T:
    return await held.pop()  # waits: within() enforces the deadline


async def ends_in_time(task: asyncio.Future[T], clock: Callable[[], DeadlineClock | None], longest_s: float) -> bool:
    """Wait until ``task`` is done (True) or the deadline of its current part has passed (False; the task continues).
    If the wait is cancelled, so is the task.

    Args:
        clock: returns the clock of the task's current part; None while the task waits for something that has its own
            deadline.
        longest_s: longest time in seconds until ``clock`` is called again.
    """
    try:
        while not task.done():
            current = clock()
            window_s = longest_s if current is None else current.next_window_s()
            if window_s is None:
                task.add_done_callback(retrieve)
                return False
            await done_or_late(task, window_s)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(retrieve)
        raise
    return True


async def done_or_late(task: asyncio.Future[T], seconds: float) -> None:
    """``asyncio.wait({task}, timeout=seconds)``, except that the timeout may be late by up to :func:`_grain_s`. Takes
    half the CPU time, because a rollout worker waits thousands of times per second."""
    if task.done():
        return
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    due = _due_together(loop, seconds)
    due.add(waiter)
    task.add_done_callback(wake)
    try:
        await waiter  # waits: at most `seconds`
    finally:
        due.discard(waiter)
        task.remove_done_callback(wake)


_timers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, set[asyncio.Future[None]]]]
_timers = weakref.WeakKeyDictionary()
"""By event loop and time: the waits that end at that time."""


def _grain_s(seconds: float) -> float:
    """Seconds by which a wait of ``seconds`` may be longer so that it can share a timer with others: a power of two, at
    most 1/64 of the wait, and less than what counts as a pause of the waiter."""
    return min(math.ldexp(1.0, math.frexp(seconds)[1] - 7), wait_registry.PAUSE_S / 2)


def _due_together(loop: asyncio.AbstractEventLoop, seconds: float) -> set[asyncio.Future[None]]:
    """The waits that share the timer ``seconds`` from now or slightly later. They share it because one timer per wait
    would be most of a wait's cost."""
    timers = _timers.get(loop)
    if timers is None:
        timers = _timers[loop] = {}
    grain_s = _grain_s(seconds)
    at = math.ceil((loop.time() + seconds) / grain_s) * grain_s
    due = timers.get(at)
    if due is None:
        due = timers[at] = set()
        loop.call_at(at, _end_waits, timers, at)
    return due


def _end_waits(timers: dict[float, set[asyncio.Future[None]]], at: float) -> None:
    for waiter in timers.pop(at):
        if not waiter.done():
            waiter.set_result(None)


def retrieve(task: asyncio.Future[T]) -> None:
    """Retrieve the exception of a task that is no longer awaited, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _waiter() -> str:
    task = asyncio.current_task()
    name = getattr(task.get_coro(), "__qualname__", task.get_name()) if task is not None else "a task"
    return f"{wait_registry.current_name()} ({name}, process {os.getpid()})"


class Patience:
    """An adaptive deadline for a repeated step, derived from the durations of earlier steps.

    For the first step it is the ceiling, because the first step compiles and warms up. After that it is ``factor``
    times the longest of the last ``memory`` steps, clamped between floor and ceiling: a run of one-second steps does
    not wait ten minutes for a step that never ends, and a run of slow steps is not interrupted.
    """

    def __init__(self, ceiling_s: float, *, floor_s: float = 120.0, factor: float = 10.0, memory: int = 20) -> None:
        """The default floor leaves time to replace a generator (10 to 60 s) within a step. The default factor allows
        for a step whose weights are sent three times, or whose episodes become much longer."""
        if ceiling_s <= 0 or floor_s < 0 or factor < 1 or memory < 1:
            raise ValueError(
                f"ceiling_s must be above 0, floor_s not negative, factor and memory at least 1; got {ceiling_s}, "
                f"{floor_s}, {factor}, {memory}"
            )
        self._ceiling_s, self._floor_s, self._factor = ceiling_s, floor_s, factor
        self._recent: deque[float] = deque(maxlen=memory)

    @property
    def limit_s(self) -> float:
        """Deadline of the next step, in seconds."""
        if not self._recent:
            return self._ceiling_s
        return min(self._ceiling_s, max(self._floor_s, self._factor * max(self._recent)))

    def record(self, seconds: float) -> None:
        """Record that a step took ``seconds``."""
        self._recent.append(seconds)

    @contextmanager
    def step(self) -> Iterator[float]:
        """Run the block as a step: yields its deadline in seconds, and records its duration unless the block raises."""
        started = time.monotonic()
        yield self.limit_s
        self.record(time.monotonic() - started)


# -- the clock of a deadline, which runs slower while the machine has no cores for the run ----------------------------
# A deadline bounds how long the awaited processes may take on a machine that has cores for them. The clock does not
# count
#
# - the time for which this event loop was paused, because its process was stopped or had no core itself. So no deadline
#   expires because all processes of a run were stopped and continued;
# - the share of the time for which the most starved process of the run on this machine was ready to run but had no core
#   (``starvation.py``). The most starved one is used because the awaited process is not always known, and its answer
#   passes through other processes.
#
# The clock is read halfway through the deadline, at its end, and at the end of each extension. Nearly all waits end
# before the first reading, so they pay nothing for it. The second reading also estimates the starvation before the
# first.

logger = logging.getLogger("monarch_rl")

STRETCH = 10.0
"""A deadline is stretched to at most this many times its length, so that no wait is endless. Pauses of the waiting
process itself are added on top: they are over when it notices them."""
STRETCHED_FROM_S = 1.0
"""Deadlines shorter than this are not stretched: any process may be without a core for that long."""
SMALLEST_EXTENSION = 0.05
"""Smallest extension, as a share of the deadline. A shorter one is not worth another reading of the clock."""
WARN_FROM = 0.5
"""Share of the time without a core from which a process warns: on a busy machine every process waits now and then."""
WARN_EVERY_S = 300.0
"""Minimum seconds between two warnings of the same process."""

_warned_at = -math.inf


class DeadlineClock:
    """The clock of a wait for ``what`` that begins now on the running event loop and may take ``seconds``, or of
    several consecutive waits that share this deadline."""

    __slots__ = (
        "_began",
        "_first_s",
        "_look",
        "_lost_s",
        "_paused_s",
        "_pauses_before_s",
        "_read_at",
        "_unmeasured_s",
        "_what",
        "_window_s",
        "seconds",
    )

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds, self._what = seconds, what
        loop = asyncio.get_running_loop()
        self._began = self._read_at = loop.time()
        # A simulator's event loop runs in virtual time, in which nothing is starved (simulate/clock.py).
        stretchable = seconds >= STRETCHED_FROM_S and not getattr(loop, "virtual", False)
        self._first_s = seconds / 2 if stretchable else seconds
        self._window_s = -1.0  # none yet
        self._lost_s = self._paused_s = self._unmeasured_s = 0.0
        self._pauses_before_s = wait_registry.paused_s() if stretchable else 0.0
        self._look: starvation.Look | None = None

    @property
    def passed_s(self) -> float:
        """Seconds of the event loop's clock since the wait began, not stretched."""
        return asyncio.get_running_loop().time() - self._began

    def next_window_s(self) -> float | None:
        """Seconds to wait before the next call; None once the deadline has passed on this clock."""
        if self._window_s < 0:
            passed_s = self.passed_s  # not 0 if the first call comes some time after the wait began
            self._window_s = max(self._first_s, passed_s)
            return self._window_s - passed_s
        smallest_s = SMALLEST_EXTENSION * self.seconds
        if self._first_s < self.seconds:
            self._read()
            smallest_s = max(smallest_s, 2 * starvation.SAME_LOOK_S)
        remaining_s = self.seconds - (self.passed_s - self._lost_s)
        if remaining_s < smallest_s or self.passed_s - self._paused_s >= STRETCH * self.seconds:
            return None
        self._window_s = remaining_s
        return self._window_s

    def lost_share(self) -> float:
        """Read the clock: the share of the time so far that it does not count, between 0 and 1. Starvation is included
        from the second reading on."""
        if self._first_s == self.seconds:
            return 0.0
        self._read()
        return min(1.0, self._lost_s / self.passed_s) if self.passed_s > 0 else 0.0

    def _read(self) -> None:
        """Add the time lost since the last reading."""
        now, look, before = asyncio.get_running_loop().time(), starvation.look(), self._look
        elapsed_s = now - self._read_at
        paused_s = self._new_pauses_s(elapsed_s)
        self._paused_s += paused_s
        self._read_at, self._look = now, look
        if before is None:
            self._lost_s = paused_s
            self._unmeasured_s = elapsed_s - paused_s
            return
        pid, share = look.most_starved(before)
        self._lost_s += max(paused_s, share * elapsed_s) + share * self._unmeasured_s
        self._unmeasured_s = 0.0
        if share >= WARN_FROM:
            self._warn(f"process {pid} was ready to run and had no core for {share:.0%} of the last {elapsed_s:.0f} s")

    def _new_pauses_s(self, elapsed_s: float) -> float:
        pauses_s = wait_registry.paused_s()
        new_s, self._pauses_before_s = pauses_s - self._pauses_before_s, pauses_s
        # Pauses of a loop without a registered actor are not recorded; the lateness of this call shows them.
        late_s = elapsed_s - self._window_s if self._window_s >= 0 else 0.0
        return min(elapsed_s, max(new_s, late_s if late_s >= wait_registry.PAUSE_S else 0.0))

    def _warn(self, why: str) -> None:
        global _warned_at
        if time.monotonic() - _warned_at >= WARN_EVERY_S:
            _warned_at = time.monotonic()
            logger.warning(
                "the machine has too few cores for the run: %s. Deadlines are stretched accordingly, at most %g-fold; "
                "currently the one for %s, %g s",
                why,
                STRETCH,
                self._what,
                self.seconds,
            )


# -- file operations: on a thread, with a deadline; on an event loop they are reported as waits on the disk -----------
# ``asyncio.to_thread`` is not suitable: a thread blocked by a stalled disk would keep its event loop and its process
# from ending.

P = ParamSpec("P")


class _DaemonThreads(Executor):
    """Runs each call on a new daemon thread, which does not delay the end of the process."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        threading.Thread(target=_fill, args=(future, partial(fn, *args, **kwargs)), name="disk", daemon=True).start()
        return future


def _fill(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)


def on_disk_now(seconds: float, what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """:func:`on_disk` for a thread without an event loop."""
    working = _DaemonThreads().submit(work, *args, **kwargs)
    if not wait([working], seconds).done:
        raise DeadlineExceeded(f"waited {seconds:g} s for the disk: {what}", what, seconds)
    return working.result(0)


async def on_disk(seconds: float, what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``work`` on a thread and return its result.

    Args:
        seconds: deadline. After it only this wait ends; the thread keeps running.
        what: as for :func:`within`.

    Raises :class:`DeadlineExceeded`, and whatever ``work`` raises.
    """
    working = asyncio.get_running_loop().run_in_executor(_DaemonThreads(), partial(work, *args, **kwargs))
    return await within(seconds, working, what, on="the disk")
