"""The one way to wait for another process: with a deadline, a sentence about what is waited for, and who owes it.

What is being waited for can be asked at any time (``runtime/presence.py``); the stall report is made of it
(``runtime/stall.py``). ``tools/lint_waits.py`` finds waits that go another way.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from monarch_rl.runtime import presence

T = TypeVar("T")


CALL_DEADLINE_S = 60.0
"""Seconds for a call that waits for nobody else."""


class DeadlineExceeded(TimeoutError):
    """A wait that took too long. The message names who waited, for what, since when."""

    def __init__(self, message: str, what: str = "", seconds: float = 0.0) -> None:
        super().__init__(message)
        self.what = what
        """What was waited for, as the waiter put it."""
        self.seconds = seconds
        """The deadline, in seconds."""

    def __reduce__(self) -> tuple[type[DeadlineExceeded], tuple[str, str, float]]:
        return type(self), (str(self), self.what, self.seconds)  # it crosses processes inside Monarch's errors


def now() -> float:
    """Seconds of the running event loop's clock: ``time.monotonic()``, or virtual time (``simulate/clock.py``)."""
    return asyncio.get_running_loop().time()


async def within(seconds: float, awaitable: Awaitable[T], what: str, *, on: str = "") -> T:
    """Await ``awaitable`` for at most ``seconds``.

    Args:
        seconds: the deadline.
        awaitable: a call to an actor that is given up on goes on over there; only this wait ends.
        what: completes the sentence "waited for ...": name the thing and who owes it, for example
            ``"the gradients of step 3 from trainer rank 1"``.
        on: who owes it, as it calls itself (:func:`presence.register`), or all of a kind (``"trainer ranks"``), or the
            name of something outside the run. Along these names a stall is followed to its cause.

    Raises :class:`DeadlineExceeded`, and whatever the awaitable raises.
    """
    since = time.strftime("%H:%M:%S")
    task = asyncio.ensure_future(awaitable)
    try:
        with presence.waiting(what, on, seconds):
            done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        return task.result()
    # Not awaited: an awaitable that ignores its cancellation must not turn a deadline into a hang.
    task.cancel()
    task.add_done_callback(_retrieve)
    message = f"{_waiter()} waited {seconds:g} s, since {since}, for {what}"
    raise DeadlineExceeded(message, what, seconds)


def _retrieve(task: asyncio.Future[T]) -> None:
    """Take the exception of a task nobody waits for any more, so that asyncio does not report it as lost."""
    if not task.cancelled():
        task.exception()


def _waiter() -> str:
    task = asyncio.current_task()
    name = getattr(task.get_coro(), "__qualname__", task.get_name()) if task is not None else "a task"
    return f"{presence.owner()} ({name}, process {os.getpid()})"


class Patience:
    """A deadline for a step that repeats, judged by the step's own history.

    Before the first step it is the ceiling, for whatever a first step compiles and warms up. Then it is ``factor``
    times the longest of the last ``memory`` steps, but never below the floor nor above the ceiling: a run of one-second
    steps does not wait ten minutes for one that never ends, and a run of slow steps is left alone.
    """

    def __init__(self, ceiling_s: float, *, floor_s: float = 120.0, factor: float = 10.0, memory: int = 20) -> None:
        """The default floor leaves time to replace a generator (10 to 60 s) in the middle of a step; the factor, for
        a step that is sent its weights three times, or whose episodes have become much longer."""
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

    def saw(self, seconds: float) -> None:
        """A step took ``seconds``."""
        self._recent.append(seconds)

    @contextmanager
    def step(self) -> Iterator[float]:
        """The block is a step; gives its deadline, and remembers how long it took if it ends well."""
        started = time.monotonic()
        yield self.limit_s
        self.saw(time.monotonic() - started)
