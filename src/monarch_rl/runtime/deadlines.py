"""The one way to wait for another process: with a deadline, a name for what is waited for, and who has to deliver it.

The waits under way can be read at any time (``runtime/wait_registry.py``); stall reports are made from them
(``watch/stall.py``). ``tools/lint_waits.py`` finds waits that do not use this module.

A machine that has no cores for the run stretches deadlines (:class:`DeadlineClock`).
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

from monarch_rl.runtime import starvation, wait_registry

T = TypeVar("T")

CALL_DEADLINE_S = 60.0
"""Seconds for a call that waits for no other process."""
DISK_S = 600.0
"""Seconds to begin to read or write a model, and for what does not grow with it."""
SLOW_BYTES_PER_S = 50e6
"""What the slowest disk or network brings that a run is to live with: half of an ethernet of 1 GBit/s."""


def bytes_s(nbytes: int) -> float:
    """Seconds for bytes to be read, written or sent where that is slow."""
    return nbytes / SLOW_BYTES_PER_S


def disk_limit_s(nbytes: int) -> float:
    """Seconds to load or save a model of this many bytes."""
    return DISK_S + bytes_s(nbytes)


class DeadlineExceeded(TimeoutError):
    """A wait exceeded its deadline. The message says who waited, for what, since when."""

    def __init__(self, message: str, what: str = "", seconds: float = 0.0) -> None:
        super().__init__(message)
        self.what = what
        """What was waited for, in the waiter's words."""
        self.seconds = seconds
        """The deadline, in seconds."""

    def __reduce__(self) -> tuple[type[DeadlineExceeded], tuple[str, str, float]]:
        return type(self), (str(self), self.what, self.seconds)  # so that it can be pickled inside Monarch's errors


class ProcessLost(DeadlineExceeded):
    """The process that was waited for is lost, so that its answer cannot come within the deadline."""


_waits_on: dict[int, tuple[str, asyncio.Future[Any]]] = {}
"""By number: the waits of this process that are under way and name whom they are on; with what they await."""
_lost: dict[int, str] = {}
"""By number: why the process is lost that a wait is on."""


def lose(name: str, why: str) -> None:
    """End all waits of this event loop on the process ``name`` with :class:`ProcessLost`: nobody else may notice for
    minutes that it is lost. Waits that begin later are on the process that takes its place."""
    loop = asyncio.get_running_loop()
    for number, (on, awaited) in list(_waits_on.items()):
        if on == name and awaited.get_loop() is loop and not awaited.done():
            _lost[number] = why
            awaited.cancel()


def now() -> float:
    """Seconds of the running event loop's clock: ``time.monotonic()``, or virtual time (``simulate/clock.py``)."""
    return asyncio.get_running_loop().time()


async def within(
    limit: float | DeadlineClock, awaitable: Awaitable[T], what: str, *, on: str = "", flag: str = ""
) -> T:
    """Await ``awaitable`` for a limited time, by a clock that runs slower while the machine has no cores for it.

    Args:
        limit: the deadline in seconds, or the clock of one that several waits keep together.
        awaitable: what to await. After the deadline, a call to an actor still runs in that actor; only this wait ends.
        what: completes the sentence "waited for ...": names the thing and who has to deliver it, for example
            ``"the gradients of step 3 from trainer rank 1"``.
        on: who has to deliver it: a registered name (:func:`wait_registry.register`), all of a kind
            (``"trainer ranks"``), or the name of something outside the run. The stall report follows these names to the
            cause.
        flag: the setting that the deadline comes from, as on the command line, for the message.

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
            await _done_or_late(task, window_s)
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
    # Not awaited, because an awaitable that ignores its cancellation would turn the deadline into a hang.
    task.cancel()
    task.add_done_callback(retrieve)
    began = time.strftime("%H:%M:%S", time.localtime(since))
    message = f"{_waiter()} waited {seconds:g} s, since {began}, for {what}"
    if clock.passed_s > 1.1 * seconds + wait_registry.PAUSE_S:
        message += f" ({clock.passed_s:.0f} s by the clock; for the rest the run was stopped or had no cores)"
    if flag:
        message += f" (see --{flag})"
    raise DeadlineExceeded(message, what, seconds)


def begun(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    """``asyncio.ensure_future``, but that no frame refers to a future of Monarch. That keeps its error, and the error's
    traceback the frame: a circle that Python's collector does not see through, with all that the callers had."""
    if asyncio.isfuture(awaitable) or asyncio.iscoroutine(awaitable):
        return asyncio.ensure_future(awaitable)
    return asyncio.ensure_future(_result_of([awaitable]))


async def _result_of(held: list[Awaitable[T]]) -> T:
    return await held.pop()  # waits: within() has the deadline


async def ends_in_time(task: asyncio.Future[T], clock: Callable[[], DeadlineClock | None], longest_s: float) -> bool:
    """Wait until ``task`` is done (True) or the deadline of a part of it has passed (False; it goes on then). If the
    wait is cancelled, so is the task.

    Args:
        clock: of the part that the task is at; None while the task waits for what has a deadline itself.
        longest_s: seconds until the clock is asked for again, at most.
    """
    try:
        while not task.done():
            current = clock()
            window_s = longest_s if current is None else current.next_window_s()
            if window_s is None:
                task.add_done_callback(retrieve)
                return False
            await _done_or_late(task, window_s)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(retrieve)
        raise
    return True


async def _done_or_late(task: asyncio.Future[T], seconds: float) -> None:
    """``asyncio.wait({task}, timeout=seconds)``, but late by :func:`_grain_s` at most, and in half the CPU time: a
    rollout worker waits thousands of times a second."""
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
        await waiter  # waits: seconds at most
    finally:
        due.discard(waiter)
        task.remove_done_callback(wake)


_timers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, set[asyncio.Future[None]]]]
_timers = weakref.WeakKeyDictionary()
"""By event loop and time: the waits that end then."""


def _grain_s(seconds: float) -> float:
    """By how much a wait of ``seconds`` may be longer, so that it shares a timer with others: a power of two, at most
    1/64 of it, and less than what counts as a pause of the waiter."""
    return min(math.ldexp(1.0, math.frexp(seconds)[1] - 7), wait_registry.PAUSE_S / 2)


def _due_together(loop: asyncio.AbstractEventLoop, seconds: float) -> set[asyncio.Future[None]]:
    """The waits that end in ``seconds`` from now or little later: a timer for each would be most of what it costs."""
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
    """Retrieve the exception of a task that nobody awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _waiter() -> str:
    task = asyncio.current_task()
    name = getattr(task.get_coro(), "__qualname__", task.get_name()) if task is not None else "a task"
    return f"{wait_registry.current_name()} ({name}, process {os.getpid()})"


class Patience:
    """A deadline for a repeated step, derived from the step's own history.

    Before the first step it is the ceiling, because a first step compiles and warms up. Then it is ``factor`` times the
    longest of the last ``memory`` steps, but not below the floor nor above the ceiling: a run of one-second steps does
    not wait ten minutes for a step that never ends, and a run of slow steps is not interrupted.
    """

    def __init__(self, ceiling_s: float, *, floor_s: float = 120.0, factor: float = 10.0, memory: int = 20) -> None:
        """The default floor leaves time to replace a generator (10 to 60 s) during a step. The default factor allows
        for a step whose weights are sent three times, or whose episodes have become much longer."""
        if ceiling_s <= 0 or floor_s < 0 or factor < 1 or memory < 1:
            raise ValueError(
                f"ceiling_s must be above 0, floor_s not negative, factor and memory at least 1; got {ceiling_s}, "
                f"{floor_s}, {factor}, {memory}"
            )
        self._ceiling_s, self._floor_s, self._factor = ceiling_s, floor_s, factor
        self._recent: deque[float] = deque(maxlen=memory)

    @property
    def limit_s(self) -> float:
        """Seconds that the next step may take."""
        if not self._recent:
            return self._ceiling_s
        return min(self._ceiling_s, max(self._floor_s, self._factor * max(self._recent)))

    def record(self, seconds: float) -> None:
        """Record that a step took ``seconds``."""
        self._recent.append(seconds)

    @contextmanager
    def step(self) -> Iterator[float]:
        """Run the block as a step: yields its deadline, and records its duration if the block does not raise."""
        started = time.monotonic()
        yield self.limit_s
        self.record(time.monotonic() - started)


# -- the clock of a deadline, which runs slower while the machine has no cores for the run ----------------------------
# A deadline bounds how long the awaited processes may take on a machine that has cores for them. Of the time that
# passes, the clock leaves out
#
# - the time for which this event loop was paused: its process was stopped, or had no core itself. So no deadline passes
#   because all processes of a run were stopped and continued;
# - the share of the time for which the most starved process of the run on this machine was ready to run and had no core
#   (``starvation.py``). Which process is awaited is not always known, and others pass on what it answers.
#
# It is read half-way through the deadline, at its end and at the end of each extension. So the waits that end before,
# which are nearly all, pay nothing for it; and the first half counts like the second.

logger = logging.getLogger("monarch_rl")

STRETCH = 10.0
"""A deadline is stretched to this many times itself at most, so that nothing waits without end. Pauses of the waiting
process itself come on top: they are over when it notices them."""
STRETCHED_FROM_S = 1.0
"""Shorter deadlines are kept to the letter: within less, any process may be without a core for a while."""
SMALLEST_EXTENSION = 0.05
"""Of the deadline. Less is not worth another reading."""
SAID_FROM = 0.5
"""Share of the time without a core from which on a process warns: on a busy machine every process waits at times."""
SAID_EVERY_S = 300.0
"""Seconds between two warnings of the same process, at least."""

_said_at = -math.inf


class DeadlineClock:
    """The clock of a wait for ``what`` that begins now, on the running event loop, and may take ``seconds``; or of
    several waits, one after the other, that may take so long together."""

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
        # A simulator's event loop has a time of its own, in which nothing is starved (simulate/clock.py).
        stretchable = seconds >= STRETCHED_FROM_S and not getattr(loop, "virtual", False)
        self._first_s = seconds / 2 if stretchable else seconds
        self._window_s = -1.0  # none yet
        self._lost_s = self._paused_s = self._unmeasured_s = 0.0
        self._pauses_before_s = wait_registry.paused_s() if stretchable else 0.0
        self._look: starvation.Look | None = None

    @property
    def passed_s(self) -> float:
        """Seconds since the wait began, by everybody's clock."""
        return asyncio.get_running_loop().time() - self._began

    def next_window_s(self) -> float | None:
        """Seconds to wait before the next call; None once the deadline has passed, by this clock."""
        if self._window_s < 0:
            passed_s = self.passed_s  # who waits may ask later than the wait began
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
        """Read the clock: the share of the time so far that it leaves out, between 0 and 1. Starvation shows from the
        second reading on."""
        if self._first_s == self.seconds:
            return 0.0
        self._read()
        return min(1.0, self._lost_s / self.passed_s) if self.passed_s > 0 else 0.0

    def _read(self) -> None:
        """Add what was lost since the last reading."""
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
        if share >= SAID_FROM:
            self._warn(f"process {pid} was ready to run and had no core for {share:.0%} of the last {elapsed_s:.0f} s")

    def _new_pauses_s(self, elapsed_s: float) -> float:
        pauses_s = wait_registry.paused_s()
        new_s, self._pauses_before_s = pauses_s - self._pauses_before_s, pauses_s
        # The loop may be nobody's, so that its pauses are not counted.
        late_s = elapsed_s - self._window_s if self._window_s >= 0 else 0.0
        return min(elapsed_s, max(new_s, late_s if late_s >= wait_registry.PAUSE_S else 0.0))

    def _warn(self, why: str) -> None:
        global _said_at
        if time.monotonic() - _said_at >= SAID_EVERY_S:
            _said_at = time.monotonic()
            logger.warning(
                "the machine has too few cores for the run: %s. Deadlines are stretched by that, to %g times at most; "
                "now that of %s, %g s",
                why,
                STRETCH,
                self._what,
                self.seconds,
            )


# -- work on files: on a thread, with a deadline; an event loop reports it as a wait on the disk ----------------------
# ``asyncio.to_thread`` will not do: a thread that a stalled disk holds keeps its event loop and its process from
# ending.

P = ParamSpec("P")


class _DaemonThreads(Executor):
    """A thread for each call, which the end of the process does not wait for."""

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
    """As :func:`on_disk`, on a thread that has no event loop."""
    working = _DaemonThreads().submit(work, *args, **kwargs)
    if not wait([working], seconds).done:
        raise DeadlineExceeded(f"waited {seconds:g} s for the disk: {what}", what, seconds)
    return working.result(0)


async def on_disk(seconds: float, what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``work`` returns.

    Args:
        seconds: the deadline. After it, the thread still works; only this wait ends.
        what: as for :func:`within`.

    Raises :class:`DeadlineExceeded`, and what ``work`` raises.
    """
    working = asyncio.get_running_loop().run_in_executor(_DaemonThreads(), partial(work, *args, **kwargs))
    return await within(seconds, working, what, on="the disk")
