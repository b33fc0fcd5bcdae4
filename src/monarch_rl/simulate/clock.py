"""An asyncio event loop in virtual time: where a real one would sleep until its next timer, it sets its clock to it.

Code that knows time only by its event loop (``asyncio.sleep``, ``asyncio.timeout``, ``loop.call_at``, ``within``,
``now``) runs in it unchanged: the same order of events as with real waits in between, without the waits. Nothing
depends on the machine, so a run is the same every time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NothingLeft(RuntimeError):
    """Everybody waits and no timer is set: a real run would hang here."""


class _Jump(selectors.SelectSelector):
    """Does not wait: it moves the clock by the time that it should have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft(f"at {self.clock:g} s of virtual time everybody waits and no timer is set")
        self.clock += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop; its clock starts at 0. It serves no sockets, and threads do their work at once (see below)."""

    virtual = True
    """Deadlines on this loop leave no time out, whatever the machine does (``runtime/deadlines.py``)."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.clock

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Call ``func`` at once: a thread's work takes no virtual time, and the clock must not run ahead of it."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
