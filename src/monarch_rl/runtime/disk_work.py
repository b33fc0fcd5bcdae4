"""Work on files: on a thread, with a deadline; for an event loop also named as the disk in what the watch reports.

``asyncio.to_thread`` will not do: a thread that a stalled disk holds keeps its event loop and its process from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from functools import partial
from typing import Any, ParamSpec, TypeVar

from monarch_rl.runtime.deadlines import DeadlineExceeded, within

P = ParamSpec("P")
T = TypeVar("T")


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
