"""How long an engine was busy."""

from __future__ import annotations

import time


class BusyClock:
    """Seconds in which at least one request was in the engine and no commit was going on."""

    def __init__(self) -> None:
        self._requests = 0
        self._paused = False
        self._since = 0.0
        self._total = 0.0
        self._request_seconds = 0.0

    @property
    def requests(self) -> int:
        return self._requests

    @property
    def seconds(self) -> float:
        self._count()
        return self._total

    @property
    def request_seconds(self) -> float:
        """Those seconds, each counted once for every request that was in the engine."""
        self._count()
        return self._request_seconds

    def enter(self) -> None:
        self._count()
        self._requests += 1

    def leave(self) -> None:
        self._count()
        self._requests -= 1

    def pause(self) -> None:
        self._count()
        self._paused = True

    def resume(self) -> None:
        self._count()
        self._paused = False

    def _count(self) -> None:
        """Add the time since the last call, in which nothing has changed."""
        now = time.perf_counter()
        if not self._paused and self._requests:
            self._total += now - self._since
            self._request_seconds += self._requests * (now - self._since)
        self._since = now
