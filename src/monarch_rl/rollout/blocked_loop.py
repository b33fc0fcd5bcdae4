"""Ends the code of an episode that blocks the event loop of its worker: a loop without an ``await``, for example.

The loop cannot end it, because it does not run. A thread raises ``LoopBlocked`` in the code instead. That reaches
Python code only: a call into C, such as ``time.sleep``, has to return first. A worker that stays blocked is replaced
(``watch/stall.py``).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

from monarch_rl.errors import LoopBlocked
from monarch_rl.rollout.play import CALLS_EPISODE
from monarch_rl.runtime import monitor, wait_registry
from monarch_rl.runtime.starvation import CoreTime, core_time

TICK_S = 1.0
"""Seconds between two looks at the event loop."""
GRACE_S = 30.0
"""Seconds after the deadline for the code to end. Then the watch replaces the worker."""


class LoopGuard:
    """Raises ``LoopBlocked`` in code that blocks the event loop of an actor of this process.

    Args:
        name: registered name of the actor.
        limit_s: seconds after which the code is ended; time in which the process had no core does not count.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._name, self._limit_s = name, limit_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"guard of {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self) -> None:
        beat, blocked_s, looked, had = -1.0, 0.0, time.monotonic(), CoreTime(0.0, 0.0)
        tick_s = min(TICK_S, self._limit_s / 4)
        while not self._ended.wait(tick_s):
            moment, before = time.monotonic(), looked
            looked, registered = moment, wait_registry.heartbeats().get(self._name)
            if registered is None:
                continue
            heartbeat, thread = registered
            if heartbeat.last_beat != beat:
                beat, blocked_s, had = heartbeat.last_beat, 0.0, core_time(os.getpid())
                wait_registry.note_blocking_group(None)
                continue
            # A tick that took much longer: this process was stopped as a whole.
            passed_s = min(moment - before, 2 * tick_s)
            has = core_time(os.getpid())
            blocked_s += passed_s * (1 - has.queued_share(had, moment - before))
            had = has
            others_code, group = _code_on(thread)
            wait_registry.note_blocking_group(group)
            if blocked_s >= self._limit_s and others_code:
                # At each tick again, because code may catch it. The loop cannot go on between the line above and this
                # one: that takes microseconds, and Python switches threads only every few milliseconds.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(LoopBlocked))


def _code_on(thread: int) -> tuple[bool, int | None]:
    """Whether the thread runs code of an episode or a recipe, and not only this package's; and the episode's group, if
    it is an episode. Installed environments are known by their episode alone."""
    others_code, frame = False, sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is CALLS_EPISODE:
            return True, frame.f_locals["rollout"].group
        others_code = others_code or monitor.is_user_code(frame)
        frame = frame.f_back
    return others_code, None
