"""The clock of an episode's own code, which stands still while the episode waits for anything beside its policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import DeadlineClock


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


RUNNING_EPISODE: ContextVar[Playing | None] = ContextVar("monarch_rl_playing", default=None)


@contextmanager
def outside() -> Iterator[None]:
    """The block asks something that has a deadline of its own: it does not count as the episode's own time.

    Raises RuntimeError if the episode is over: code of it that still runs asks nobody any more.
    """
    playing = RUNNING_EPISODE.get()
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


# -- the clock of an episode's own code -------------------------------------------------------------------------------

OWN_CODE = "the episode's own code"


class EpisodeClock:
    """The clock of an episode's own code, from one turn of the policy to the next: it stands still during a turn, and
    while a judge is asked.

    Args:
        seconds: that the code may take.
        what: whose clock it is, for what is shown of waits.
    """

    __slots__ = ("_seconds", "_stops", "_wait", "_what", "clock", "ended")

    def __init__(self, seconds: float, what: str = OWN_CODE) -> None:
        self._seconds, self._what = seconds, what
        self._stops = 1
        """Reasons to stand still: judges may be asked at once."""
        self.ended = False
        """The episode is over."""
        self.clock: DeadlineClock | None = None
        self.go_on()

    def go_on(self) -> None:
        """Start at 0 when no reason to stand still is left, unless the episode is over."""
        self._stops -= 1
        if not self._stops and not self.ended:
            self._wait = wait_registry.begin_wait(self._what, "an episode's code", self._seconds)
            self.clock = DeadlineClock(self._seconds, self._what)

    def stop(self) -> None:
        """Stand still, until :meth:`go_on` is called as often."""
        self._stops += 1
        if self.clock is not None:
            wait_registry.end_wait(self._wait)
            self.clock = None

    def end(self) -> None:
        """Stand still from here on."""
        self.stop()
        self.ended = True
