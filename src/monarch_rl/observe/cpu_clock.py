"""CPU time of parts of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class CpuClock:
    """Adds up the CPU seconds of its threads in :meth:`running` blocks, which may be on several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block, by the clock of its thread."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.add(time.thread_time() - began)

    def add(self, seconds: float) -> None:
        """Count CPU seconds of another process."""
        with self._lock:
            self._seconds += seconds

    def take(self) -> float:
        """The seconds since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds
