"""The one way to wait for another process: with a deadline, and a sentence about what is waited for."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


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


async def within(seconds: float, awaitable: Awaitable[T], what: str) -> T:
    """Await ``awaitable`` for at most ``seconds``.

    ``what`` completes the sentence "waited for ...": name the thing and who owes it, for example
    ``"the gradients of step 3 from trainer rank 1"``. A call to an actor that is given up on goes on over there;
    only this wait ends.

    Raises :class:`DeadlineExceeded`, and whatever the awaitable raises.
    """
    since = time.strftime("%H:%M:%S")
    task = asyncio.ensure_future(awaitable)
    try:
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
    return f"{name} (process {os.getpid()})"
