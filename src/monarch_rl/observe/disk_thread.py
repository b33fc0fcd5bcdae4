"""A thread for writing to disk, so that a stalled disk does not block the caller."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

logger = logging.getLogger("monarch_rl")

T = TypeVar("T")
Work = Callable[[], object]

WAITING = 1000
"""Maximum number of queued writes, of which a step makes two. Further ones are refused."""
ANSWER_S = 5.0
"""Seconds for an answer, and at the end for all queued writes."""


class DiskThread:
    """Runs functions one after the other on a thread. Exceptions that they raise are logged.

    Args:
        name: name of the thread.
        last: run at the end, after all queued functions were run or dropped.
        whom: what the functions wait for, in messages.
    """

    def __init__(self, name: str, last: Work, whom: str = "the disk") -> None:
        self._last, self._whom = last, whom
        self._waiting: queue.Queue[tuple[Work, Work] | None] = queue.Queue(WAITING)
        """Each with the function to call instead if it is dropped; None ends the thread."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Work, instead: Work) -> None:
        """Queue ``work`` and return at once. If the queue is full, call ``instead`` in the calling thread."""
        try:
            self._waiting.put_nowait((work, instead))
        except queue.Full:
            instead()

    def ask(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work``; returns a future of its result or exception, which is an OSError if the queue is full."""
        future: Future[T] = Future()

        def fill() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.begin(fill, lambda: future.set_exception(OSError(f"{WAITING} writes already wait for the disk")))
        return future

    def close(self, limit_s: float | None = None) -> None:
        """Run what is queued, and end. What has not begun after ``limit_s`` is dropped: otherwise it might write old
        lines among those of the next process that opens the files.

        Args:
            limit_s: seconds to wait, at most twice; None means :data:`ANSWER_S`.
        """
        limit_s = ANSWER_S if limit_s is None else limit_s
        with suppress(queue.Full):
            self._waiting.put(None, timeout=limit_s)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            given_up = self._give_up()
            self._waiting.put(None)  # does not block: the queue was just emptied
            logger.warning("%d writes of %s are given up: %s does not respond", given_up, self._thread.name, self._whom)

    def _give_up(self) -> int:
        """Empty the queue; returns the number of dropped functions."""
        given_up = 0
        with suppress(queue.Empty):
            while True:
                if (queued := self._waiting.get_nowait()) is not None:
                    queued[1]()
                    given_up += 1
        return given_up

    def _work(self) -> None:
        while (queued := self._waiting.get()) is not None:  # waits: for the whole run
            self._do(queued[0])
        self._do(self._last)

    def _do(self, work: Work) -> None:
        try:
            work()
        except Exception:  # the next write may succeed
            logger.exception("a write of %s failed", self._thread.name)


def answers(asked: Sequence[Future[T]], limit_s: float | None = None) -> list[T]:
    """The results of several :meth:`DiskThread.ask` calls.

    Args:
        asked: futures that :meth:`DiskThread.ask` returned.
        limit_s: deadline in seconds for all of them together; None means :data:`ANSWER_S`.

    Raises OSError after the deadline, and whatever the functions raise.
    """
    limit_s = ANSWER_S if limit_s is None else limit_s
    until = time.monotonic() + limit_s
    try:
        return [future.result(max(0.0, until - time.monotonic())) for future in asked]
    except TimeoutError:
        raise OSError(f"the disk has not written for {limit_s:g} s") from None
