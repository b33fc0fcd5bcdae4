"""Queues of callers that wait until the buffer's state changes. All run on one event loop, so no lock is needed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from monarch_rl.runtime.deadlines import DeadlineClock, now


class WaitQueue:
    """Callers that wait for one kind of resource, first come first served.

    Code that changes the state calls :meth:`serve`, which tries to serve each waiting caller. Only served callers wake
    up.

    Args:
        alike: if the first caller cannot be served, no other one can.
    """

    def __init__(self, alike: bool = False) -> None:
        self._alike = alike
        self._waiting: deque[tuple[Callable[[], bool], asyncio.Future[None]]] = deque()

    async def wait(self, try_serve: Callable[[], bool], timeout_s: float | None, what: str = "a place in line") -> bool:
        """Wait until ``try_serve`` returns True, at most ``timeout_s`` seconds; return False if it did not.

        ``try_serve`` may have side effects: it returns True once, and what it took belongs to the caller. Its
        exceptions are raised here. The deadline is stretched on a machine that has no free cores for the run, and the
        caller keeps its place in the queue; a warning then names ``what`` is waited for.
        """
        if try_serve():
            return True
        place = try_serve, asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            # Not asyncio.timeout: a caller that is cancelled at the moment it is served would lose what it was given.
            if timeout_s is None:
                await asyncio.wait({place[1]})  # waits: the caller's end cancels it
            else:
                clock = DeadlineClock(timeout_s, what)
                while not place[1].done() and (window_s := clock.next_window_s()) is not None:
                    await asyncio.wait({place[1]}, timeout=window_s)
            if place[1].done():
                place[1].result()
            return place[1].done()
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    def serve(self, everybody: bool = False) -> None:
        """Try to serve the waiting callers, in order; with ``everybody`` all of them, even if they are ``alike``."""
        unserved: deque[tuple[Callable[[], bool], asyncio.Future[None]]] = deque()
        while self._waiting:
            try_serve, answer = self._waiting.popleft()
            try:
                if try_serve():
                    answer.set_result(None)
                    continue
            except Exception as error:
                answer.set_exception(error)
                continue
            unserved.append((try_serve, answer))
            if self._alike and not everybody:
                break
        self._waiting.extendleft(reversed(unserved))


class Interruptions:
    """How often, and for how long in total, a condition was true."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        """Number and total duration of the periods that are over."""
        self._since: float | None = None

    def note(self, is_true: bool) -> None:
        """Record whether the condition is true now."""
        if is_true:
            self._since = self._since or now()
        elif self._since is not None:
            self.count, self.seconds, self._since = self.count + 1, self.seconds + now() - self._since, None
