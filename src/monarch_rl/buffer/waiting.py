"""Lines of callers that wait until the buffer's state changes. All on one event loop, so no lock is needed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from monarch_rl.runtime.deadlines import DeadlineClock, now


class Line:
    """Callers that wait for one kind of thing, first come first served.

    Code that changes the state calls :meth:`serve`, which tries to serve each caller in line. Only served callers
    wake up.

    Args:
        alike: if the first caller cannot be served, no other can.
    """

    def __init__(self, alike: bool = False) -> None:
        self._alike = alike
        self._waiting: deque[tuple[Callable[[], bool], asyncio.Future[None]]] = deque()

    async def wait(self, served: Callable[[], bool], timeout_s: float | None, what: str = "a place in line") -> bool:
        """Wait until ``served`` returns True, at most ``timeout_s`` seconds; return False if it did not.

        ``served`` may have effects: it returns True once, and what it took belongs to its caller. Raises what it
        raises. The deadline is stretched on a machine that has no cores for the run, which keeps the place in line;
        ``what`` is waited for, and named in a warning then.
        """
        if served():
            return True
        place = served, asyncio.get_running_loop().create_future()
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
        """Try to serve the callers in line; with ``everybody`` all of them, even if they are alike."""
        unserved: deque[tuple[Callable[[], bool], asyncio.Future[None]]] = deque()
        while self._waiting:
            served, answer = self._waiting.popleft()
            try:
                if served():
                    answer.set_result(None)
                    continue
            except Exception as error:
                answer.set_exception(error)
                continue
            unserved.append((served, answer))
            if self._alike and not everybody:
                break
        self._waiting.extendleft(reversed(unserved))


class Interruptions:
    """How often, and for how long together, something was so."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        """Of those that are over."""
        self._since: float | None = None

    def note(self, is_so: bool) -> None:
        """Say whether it is so now."""
        if is_so:
            self._since = self._since or now()
        elif self._since is not None:
            self.count, self.seconds, self._since = self.count + 1, self.seconds + now() - self._since, None
