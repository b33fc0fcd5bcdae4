"""The clock of an episode's own code."""

from __future__ import annotations

from monarch_rl.runtime import presence
from monarch_rl.runtime.deadline_clock import DeadlineClock

OWN_CODE = "the episode's own code"


class OwnTime:
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
            self._wait = presence.begin_wait(self._what, "an episode's code", self._seconds)
            self.clock = DeadlineClock(self._seconds, self._what)

    def stop(self) -> None:
        """Stand still, until :meth:`go_on` is called as often."""
        self._stops += 1
        if self.clock is not None:
            presence.end_wait(self._wait)
            self.clock = None

    def end(self) -> None:
        """Stand still from here on."""
        self.stop()
        self.ended = True
