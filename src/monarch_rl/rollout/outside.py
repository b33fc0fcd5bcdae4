"""What an episode asks beside its policy: the clock of its own code stands still meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class JudgeFailed(Exception):
    """A judge or another frozen model could not be asked, or did not answer. Where the coroutine does not catch it, it
    costs the episode, and is counted by ``reason``.

    Args:
        reason: short, so that it can be counted.
        report: all that is known.
    """

    def __init__(self, reason: str, report: str = "") -> None:
        super().__init__(f"{reason}: {report}" if report else reason)
        self.reason, self.report = reason, report


class OwnClock(Protocol):
    """The clock of an episode's own code."""

    ended: bool
    """The episode is over."""

    def stop(self) -> None: ...

    def go_on(self) -> None: ...


class Playing:
    """The episode that the running code belongs to."""

    __slots__ = ("clock", "group")

    def __init__(self, clock: OwnClock, group: int) -> None:
        self.clock, self.group = clock, group


PLAYING: ContextVar[Playing | None] = ContextVar("monarch_rl_playing", default=None)


@contextmanager
def outside() -> Iterator[None]:
    """The block asks something that has a deadline of its own: it does not count as the episode's own time.

    Raises RuntimeError if the episode is over: code of it that still runs asks nobody any more.
    """
    playing = PLAYING.get()
    if playing is None:
        yield
        return
    if playing.clock.ended:
        raise RuntimeError("the episode is over")
    playing.clock.stop()
    try:
        yield
    finally:
        playing.clock.go_on()
