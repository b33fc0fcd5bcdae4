"""Limits the time of an episode's own code; the clock stops during turns of the policy and requests to other models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from monarch_rl.episode.episode import EpisodeTimes
from monarch_rl.errors import JudgeFailed
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.deadlines import DeadlineClock, now


class StoppableClock(Protocol):
    """Interface of :class:`EpisodeClock`."""

    ended: bool
    """Whether the episode is over."""

    def stop(self) -> None: ...

    def resume(self) -> None: ...


class RunningEpisode:
    """The episode that the running code belongs to."""

    __slots__ = ("clock", "group", "times")

    def __init__(self, clock: StoppableClock, group: int, times: EpisodeTimes | None = None) -> None:
        self.clock, self.group = clock, group
        self.times = times or EpisodeTimes()


RUNNING_EPISODE: ContextVar[RunningEpisode | None] = ContextVar("monarch_rl_playing", default=None)


PROBED: ContextVar[bool] = ContextVar("monarch_rl_probed", default=False)
"""Whether the running code is probed before a run (``rollout/probe.py``): no other model is asked then."""
NOT_ASKED = "other models are not asked before the run"


def check_not_probed() -> None:
    """Raise JudgeFailed if the running code is probed."""
    if PROBED.get():
        raise JudgeFailed(NOT_ASKED)


@contextmanager
def episode_clock_stopped() -> Iterator[None]:
    """Stop the clock of the running episode during the block, which waits for something with its own deadline.

    Raises:
        RuntimeError: the episode is over. Code of it that is still running cannot ask other models.
        JudgeFailed: the code is only probed.
    """
    check_not_probed()
    episode = RUNNING_EPISODE.get()
    if episode is None:
        yield
        return
    if episode.clock.ended:
        raise RuntimeError("the episode is over")
    episode.clock.stop()
    try:
        yield
    finally:
        episode.clock.resume()


@contextmanager
def tools_running() -> Iterator[None]:
    """Count the seconds of the block as tool time of the running episode."""
    episode, started = RUNNING_EPISODE.get(), now()
    try:
        yield
    finally:
        if episode is not None:
            episode.times.tool_s += now() - started


# -- the clock of an episode's own code -------------------------------------------------------------------------------

OWN_CODE = "the episode's own code"


class EpisodeClock:
    """Clock of an episode's own code between two turns of the policy. It stops during a turn and while a judge answers,
    and restarts at 0 afterwards.

    Args:
        seconds: limit for the code.
        what: owner of the clock, for the wait registry.
    """

    __slots__ = ("_changed_at", "_seconds", "_stops", "_wait", "_what", "deadline", "ended")

    def __init__(self, seconds: float, what: str = OWN_CODE) -> None:
        self._seconds, self._what = seconds, what
        self._stops = 1
        """Number of callers that have stopped the clock: an episode may ask several judges at once."""
        self.ended = False
        """Whether the episode is over."""
        self.deadline: DeadlineClock | None = None
        """Deadline of the running interval; None while the clock is stopped."""
        self._changed_at = 0.0
        """When it was last stopped or restarted, by :func:`now`."""
        self.resume()

    @property
    def state(self) -> tuple[bool, float]:
        """Whether it runs, and for how many seconds it has been running or stopped."""
        return self.deadline is not None, now() - self._changed_at

    def resume(self) -> None:
        """Restart at 0 once every :meth:`stop` has been matched, unless the episode is over."""
        self._stops -= 1
        if not self._stops and not self.ended:
            self._changed_at = now()
            self._wait = wait_registry.begin_wait(self._what, "an episode's code", self._seconds)
            self.deadline = DeadlineClock(self._seconds, self._what)

    def stop(self) -> None:
        """Stop the clock until a matching call of :meth:`resume`."""
        self._stops += 1
        if self.deadline is not None:
            self._changed_at = now()
            wait_registry.end_wait(self._wait)
            self.deadline = None

    def end(self) -> None:
        """Stop the clock for good."""
        self.stop()
        self.ended = True
