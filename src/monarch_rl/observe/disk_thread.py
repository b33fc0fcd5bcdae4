"""A thread that writes, so that a disk that stalls stalls nobody else."""

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
"""Pieces of work that wait for the disk: a step makes two. Further ones are refused."""
ANSWER_S = 5.0
"""Seconds for the disk to come to an answer, and at the end to all that waits."""


class DiskThread:
    """Does pieces of work, one after the other. What a piece raises is logged.

    Args:
        name: of the thread.
        last: done when all else is, or was given up.
    """

    def __init__(self, name: str, last: Work) -> None:
        self._last = last
        self._waiting: queue.Queue[tuple[Work, Work] | None] = queue.Queue(WAITING)
        """Each with what is done instead if it is given up."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Work, instead: Work) -> None:
        """Have ``work`` done; returns at once. If the thread has too much to do, ``instead`` is done here and now."""
        try:
            self._waiting.put_nowait((work, instead))
        except queue.Full:
            instead()

    def ask(self, work: Callable[[], T]) -> Future[T]:
        """What ``work`` returns or raises, once all before it is done; OSError if the thread has too much to do."""
        future: Future[T] = Future()

        def fill() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.begin(fill, lambda: future.set_exception(OSError(f"{WAITING} writes wait for the disk")))
        return future

    def close(self) -> None:
        """Do what waits, and end. After :data:`ANSWER_S` what has not begun is given up: whoever opens the files next
        is not to find lines of before among their own."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=ANSWER_S)
        self._thread.join(ANSWER_S)
        if self._thread.is_alive():
            given_up = self._give_up()
            self._waiting.put(None)  # there is room
            logger.warning("%d writes of %s are given up: the disk does not go on", given_up, self._thread.name)

    def _give_up(self) -> int:
        """Take out what waits; returns how much that was."""
        given_up = 0
        with suppress(queue.Empty):
            while True:
                if (piece := self._waiting.get_nowait()) is not None:
                    piece[1]()
                    given_up += 1
        return given_up

    def _work(self) -> None:
        while (piece := self._waiting.get()) is not None:  # waits: as long as the run
            self._do(piece[0])
        self._do(self._last)

    def _do(self, work: Work) -> None:
        try:
            work()
        except Exception:  # the next piece may be another one
            logger.exception("a write of %s failed", self._thread.name)


def answers(asked: Sequence[Future[T]], limit_s: float | None = None) -> list[T]:
    """What several threads answer, each asked by :meth:`DiskThread.ask`: all together within ``limit_s`` seconds.

    Args:
        limit_s: None is :data:`ANSWER_S`.

    Raises OSError if it takes longer, and what the work raises.
    """
    limit_s = ANSWER_S if limit_s is None else limit_s
    until = time.monotonic() + limit_s
    try:
        return [future.result(max(0.0, until - time.monotonic())) for future in asked]
    except TimeoutError:
        raise OSError(f"the disk has not written for {limit_s:g} s") from None
