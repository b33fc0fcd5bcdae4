"""Lines of callers that wait for the buffer's state to change. All on one event loop, so no lock is needed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Line:
    """Those who wait for one kind of thing, first come first served.

    Whoever changes the state calls :meth:`serve`, which tries for everybody in line; only who is served wakes up.

    Args:
        alike: what the first one cannot have, nobody can.
    """

    def __init__(self, alike: bool = False) -> None:
        self._alike = alike
        self._waiting: deque[tuple[Callable[[], bool], asyncio.Future[None]]] = deque()

    async def wait(self, served: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``served`` answers True, at most ``timeout_s`` seconds; False if it did not.

        ``served`` may have effects: it answers True once, and what it took is its caller's. Raises what it raises.
        """
        if served():
            return True
        place = served, asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            # Not asyncio.timeout: cancelled at the moment of being served, a caller would lose what it was given.
            await asyncio.wait({place[1]}, timeout=timeout_s)
            if place[1].done():
                place[1].result()
            return place[1].done()
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    def serve(self, everybody: bool = False) -> None:
        """Try for those in line; for ``everybody`` even if they are alike."""
        left: deque[tuple[Callable[[], bool], asyncio.Future[None]]] = deque()
        while self._waiting:
            served, answer = self._waiting.popleft()
            try:
                if served():
                    answer.set_result(None)
                    continue
            except Exception as error:
                answer.set_exception(error)
                continue
            left.append((served, answer))
            if self._alike and not everybody:
                break
        self._waiting.extendleft(reversed(left))
