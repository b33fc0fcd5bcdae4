"""An asyncio event loop in virtual time: instead of sleeping until its next timer, it advances its clock to it.

Code that takes time only from its event loop (``asyncio.sleep``, ``asyncio.timeout``, ``loop.call_at``, ``within``,
``now``) runs on it unchanged, with the same order of events as in real time but without the waits. Nothing depends on
the machine, so runs are deterministic.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

from monarch_rl.errors import NothingLeft

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Jump(selectors.SelectSelector):
    """A selector that does not wait, but advances the clock by the timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft(f"deadlock at {self.clock:g} s of virtual time: all tasks wait and no timer is set")
        self.clock += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop. Its clock starts at 0. It serves no sockets, and executors run functions at once."""

    virtual = True
    """Deadlines on this loop are never stretched, whatever the machine does (``runtime/deadlines.py``)."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.clock

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Call ``func`` at once: work on a thread takes no virtual time, and the clock must not advance meanwhile."""
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
