"""How much of its time one side of the pipeline waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class IdleClock:
    """Adds up waiting time; several waits at once count once.

    Args:
        now: seconds; the monotonic clock by default.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now()
        self._idle = 0.0
        self._waits = 0
        self._wait_since = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time within the block is idle."""
        if not self._waits:
            self._wait_since = self._now()
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._idle += self._now() - self._wait_since

    def share(self) -> float:
        """Idle share (0..1) since the last call; nan if no time has passed. A wait that goes on is cut here."""
        now = self._now()
        if self._waits:
            self._idle += now - self._wait_since
            self._wait_since = now
        idle, wall = self._idle, now - self._since
        self._idle, self._since = 0.0, now
        return idle / wall if wall > 0 else float("nan")
