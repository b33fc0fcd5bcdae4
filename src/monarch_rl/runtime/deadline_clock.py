"""The clock of a deadline, which runs slower while the machine has no cores for the run.

A deadline bounds how long the awaited processes may take on a machine that has cores for them. Of the time that passes,
the clock leaves out

- the time for which this event loop was paused: its process was stopped, or had no core itself. So no deadline passes
  because all processes of a run were stopped and continued;
- the share of the time for which the most starved process of the run on this machine was ready to run and had no core
  (``starvation.py``). Which process is awaited is not always known, and others pass on what it answers.

It is read half-way through the deadline, at its end and at the end of each extension. So the waits that end before,
which are nearly all, pay nothing for it; and the first half counts like the second.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from monarch_rl.runtime import presence, starvation

logger = logging.getLogger("monarch_rl")

STRETCH = 10.0
"""A deadline is stretched to this many times itself at most, so that nothing waits without end. Pauses of the waiting
process itself come on top: they are over when it notices them."""
STRETCHED_FROM_S = 1.0
"""Shorter deadlines are kept to the letter: within less, any process may be without a core for a while."""
SMALLEST_EXTENSION = 0.05
"""Of the deadline. Less is not worth another reading."""
SAID_FROM = 0.5
"""Share of the time without a core from which on a process warns: on a busy machine every process waits at times."""
SAID_EVERY_S = 300.0
"""Seconds between two warnings of the same process, at least."""

_said_at = -math.inf


class DeadlineClock:
    """The clock of a wait for ``what`` that begins now, on the running event loop, and may take ``seconds``; or of
    several waits, one after the other, that may take so long together."""

    __slots__ = (
        "_began",
        "_first_s",
        "_look",
        "_lost_s",
        "_paused_s",
        "_pauses_before_s",
        "_read_at",
        "_unmeasured_s",
        "_what",
        "_window_s",
        "seconds",
    )

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds, self._what = seconds, what
        loop = asyncio.get_running_loop()
        self._began = self._read_at = loop.time()
        # A simulator's event loop has a time of its own, in which nothing is starved (simulate/clock.py).
        stretchable = seconds >= STRETCHED_FROM_S and not getattr(loop, "virtual", False)
        self._first_s = seconds / 2 if stretchable else seconds
        self._window_s = -1.0  # none yet
        self._lost_s = self._paused_s = self._unmeasured_s = 0.0
        self._pauses_before_s = presence.paused_s() if stretchable else 0.0
        self._look: starvation.Look | None = None

    @property
    def passed_s(self) -> float:
        """Seconds since the wait began, by everybody's clock."""
        return asyncio.get_running_loop().time() - self._began

    def next_window_s(self) -> float | None:
        """Seconds to wait before the next call; None once the deadline has passed, by this clock."""
        if self._window_s < 0:
            passed_s = self.passed_s  # who waits may ask later than the wait began
            self._window_s = max(self._first_s, passed_s)
            return self._window_s - passed_s
        smallest_s = SMALLEST_EXTENSION * self.seconds
        if self._first_s < self.seconds:
            self._read()
            smallest_s = max(smallest_s, 2 * starvation.SAME_LOOK_S)
        remaining_s = self.seconds - (self.passed_s - self._lost_s)
        if remaining_s < smallest_s or self.passed_s - self._paused_s >= STRETCH * self.seconds:
            return None
        self._window_s = remaining_s
        return self._window_s

    def lost_share(self) -> float:
        """Read the clock: the share of the time so far that it leaves out, between 0 and 1. Starvation shows from the
        second reading on."""
        if self._first_s == self.seconds:
            return 0.0
        self._read()
        return min(1.0, self._lost_s / self.passed_s) if self.passed_s > 0 else 0.0

    def _read(self) -> None:
        """Add what was lost since the last reading."""
        now, look, before = asyncio.get_running_loop().time(), starvation.look(), self._look
        elapsed_s = now - self._read_at
        paused_s = self._new_pauses_s(elapsed_s)
        self._paused_s += paused_s
        self._read_at, self._look = now, look
        if before is None:
            self._lost_s = paused_s
            self._unmeasured_s = elapsed_s - paused_s
            return
        pid, share = look.most_starved(before)
        self._lost_s += max(paused_s, share * elapsed_s) + share * self._unmeasured_s
        self._unmeasured_s = 0.0
        if share >= SAID_FROM:
            self._warn(f"process {pid} was ready to run and had no core for {share:.0%} of the last {elapsed_s:.0f} s")

    def _new_pauses_s(self, elapsed_s: float) -> float:
        pauses_s = presence.paused_s()
        new_s, self._pauses_before_s = pauses_s - self._pauses_before_s, pauses_s
        # The loop may be nobody's, so that its pauses are not counted.
        late_s = elapsed_s - self._window_s if self._window_s >= 0 else 0.0
        return min(elapsed_s, max(new_s, late_s if late_s >= presence.PAUSE_S else 0.0))

    def _warn(self, why: str) -> None:
        global _said_at
        if time.monotonic() - _said_at >= SAID_EVERY_S:
            _said_at = time.monotonic()
            logger.warning(
                "the machine has too few cores for the run: %s. Deadlines are stretched by that, to %g times at most; "
                "now that of %s, %g s",
                why,
                STRETCH,
                self._what,
                self.seconds,
            )
