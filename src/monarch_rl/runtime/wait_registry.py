"""Per-process registry of the process's actors, their waits, their progress, and their helper processes.

The process's actors write it; the process monitor (``runtime/monitor.py``) reads it on another thread, so that it can
be reported while an actor's event loop is blocked. There is one registry per process, because processes are the units
that fail.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from monarch_rl.runtime import timeline
from monarch_rl.runtime.device_work import GpuOperation

CONTROLLER = "controller"
"""Name of the recipe's own process in waits. It waits for all others, and only forwards messages."""
BEAT_S = 0.25
"""Seconds between two heartbeats of an event loop. Each one wakes its process: at 0.1 s that took 0.14 % of a core in
every process of a run, including idle ones."""
PAUSE_S = 1.0
"""Lag in seconds from which an event loop counts as paused: its process was stopped, had no core, or was blocked."""
WAITS_PER_PROCESS = 16
"""Maximum number of reported waits on the same process: the oldest distinct ones. An actor may have hundreds."""


class Wait(NamedTuple):
    """A wait that has not ended."""

    waiter: str
    """Name of the waiting actor: ``"trainer rank 1"``."""
    what: str
    """What is awaited; completes "waits for ...": ``"the batch of step 41"``."""
    on: str
    """Who has to deliver it: the name of a process (``"generator 1"``), of all of a kind (``"rollout workers"``), or of
    something outside the run (``stall.OUTSIDE``). Empty if no single party does."""
    since: float
    """Start of the wait, ``time.monotonic()`` of this machine."""
    deadline_s: float
    """Seconds after which the wait ends with an error; infinite if something else enforces the deadline."""


@dataclass(slots=True)
class Progress:
    """How often the run advanced in some way, and when it last did."""

    count: int
    """Number of times so far."""
    last: float
    """Last time, ``time.monotonic()``."""


class Heartbeat:
    """Measures the lag of an event loop: the seconds by which a sleep of :data:`BEAT_S` ends late."""

    def __init__(self) -> None:
        self.last_beat = time.monotonic()
        """When the loop last ran, ``time.monotonic()``."""
        self.lags: deque[float] = deque(maxlen=4096)
        """Lags since the last :meth:`take_lags`, in seconds."""
        self._paused_s = 0.0

    async def run(self) -> None:
        """Beat while the loop runs."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT_S)
            self.last_beat = time.monotonic()
            lag = max(0.0, self.last_beat - before - BEAT_S)
            self.lags.append(lag)
            if lag >= PAUSE_S:
                self._paused_s += lag

    def overdue_s(self) -> float:
        """Seconds by which the next beat is overdue: the loop has been blocked for that long."""
        return max(0.0, time.monotonic() - self.last_beat - BEAT_S)

    def paused_s(self) -> float:
        """Total seconds for which the loop should have run but did not, in pauses of at least :data:`PAUSE_S`."""
        overdue_s = self.overdue_s()
        return self._paused_s + (overdue_s if overdue_s >= PAUSE_S else 0.0)

    def take_lags(self) -> list[float]:
        """Remove and return the lags since the last call."""
        taken = []
        while self.lags:
            taken.append(self.lags.popleft())
        return taken


_names: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, str] = weakref.WeakKeyDictionary()
_heartbeats: dict[str, tuple[Heartbeat, asyncio.Task[None], int]] = {}
"""By actor name: the heartbeat, its task, and the loop's thread."""
_block_limits: dict[str, float] = {}
_blocking_group: int | None = None
_more_waits: dict[str, Callable[[], Sequence[Wait]]] = {}
_helpers: dict[int, str] = {}
_helpers_operations: dict[int, Callable[[], GpuOperation | None]] = {}
_waits: dict[int, Wait] = {}
_progress: dict[str, Progress] = {}
_numbers = itertools.count()


def register(
    name: str, more_waits: Callable[[], Sequence[Wait]] | None = None, block_limit_s: float = math.inf
) -> None:
    """Name the actor of the running event loop, and monitor the loop. A second call with the same name changes nothing.

    Args:
        name: name in messages, such as ``"trainer rank 1"``.
        more_waits: returns waits of this actor that it does not await, such as leases that others hold. Called on
            another thread, at any time.
        block_limit_s: seconds for which the loop may be blocked before the watch replaces the process, although it is
            at work.
    """
    loop = asyncio.get_running_loop()
    _names[loop] = name
    _block_limits[name] = block_limit_s
    if more_waits is not None:
        _more_waits[name] = more_waits
    if name not in _heartbeats or _heartbeats[name][1].done():
        heartbeat = Heartbeat()
        _heartbeats[name] = heartbeat, loop.create_task(heartbeat.run()), threading.get_ident()


def name_loop(name: str) -> None:
    """Name the running event loop without registering an actor: waits on this loop use the name."""
    _names[asyncio.get_running_loop()] = name


def unregister(name: str) -> None:
    """Undo :func:`register`, on the same event loop."""
    if name in _heartbeats:
        _heartbeats.pop(name)[1].cancel()
    _more_waits.pop(name, None)
    _block_limits.pop(name, None)
    _names.pop(asyncio.get_running_loop(), None)


def current_name() -> str:
    """Name of the waiter on this thread: the actor registered on its loop, else the process's first actor, else the
    process."""
    try:
        name = _names.get(asyncio.get_running_loop())
    except RuntimeError:
        name = None
    return name or process_name() or f"process {os.getpid()}"


def registered_name() -> str:
    """The name of the actor registered on the running event loop; empty if there is none."""
    return _names.get(asyncio.get_running_loop(), "")


def paused_s() -> float:
    """Total seconds for which the running event loop was paused; 0 if no actor is registered on it."""
    heartbeat = _heartbeats.get(_names.get(asyncio.get_running_loop(), ""))
    return heartbeat[0].paused_s() if heartbeat is not None else 0.0


def process_name() -> str | None:
    """The name of this process: that of the actor registered first."""
    return next(iter(_heartbeats), None)


def begin_wait(what: str, on: str = "", deadline_s: float = math.inf) -> int:
    """Record the start of a wait; returns its number, for :func:`end_wait`."""
    number, waiter = next(_numbers), current_name()
    _waits[number] = Wait(waiter, what, on, time.monotonic(), deadline_s)
    timeline.begin(waiter, "wait", what, on)
    return number


def end_wait(number: int) -> None:
    """Record the end of a wait."""
    wait = _waits.pop(number)
    timeline.end(wait.waiter, "wait", wait.on)


@contextmanager
def waiting(what: str, on: str = "", deadline_s: float = math.inf) -> Iterator[None]:
    """Record a wait while the block runs. The caller enforces the deadline; :func:`deadlines.within` does both."""
    number = begin_wait(what, on, deadline_s)
    try:
        yield
    finally:
        end_wait(number)


def waits() -> list[Wait]:
    """The waits of this process, oldest first; at most :data:`WAITS_PER_PROCESS` distinct ones per waiter and awaited
    process, the oldest."""
    under_way = list(_waits.copy().values())
    for more_waits in list(_more_waits.values()):
        under_way += more_waits()
    shown: dict[tuple[str, str], set[str]] = {}
    selected = []
    for wait in sorted(under_way, key=lambda wait: wait.since):
        whats = shown.setdefault((wait.waiter, wait.on), set())
        if wait.what not in whats and len(whats) < WAITS_PER_PROCESS:
            whats.add(wait.what)
            selected.append(wait)
    return selected


def progress(kind: str) -> None:
    """Record that the run advanced: ``"step trained"``, ``"group submitted"``, ``"version published"``, ..."""
    record = _progress.setdefault(kind, Progress(0, 0.0))
    record.count, record.last = record.count + 1, time.monotonic()


def progress_by_kind() -> dict[str, Progress]:
    """This process's progress so far, by kind."""
    return _progress.copy()


def heartbeats() -> dict[str, tuple[Heartbeat, int]]:
    """By actor name: the heartbeat of its loop, and the loop's thread; without loops that have ended, which would seem
    to be blocked."""
    return {
        name: (heartbeat, thread)
        for name, (heartbeat, beating, thread) in _heartbeats.copy().items()
        if not (beating.done() or beating.get_loop().is_closed())
    }


def note_blocking_group(group: int | None) -> None:
    """Record the group of the episode that blocks an event loop of this process; None: none does, as far as known."""
    global _blocking_group
    _blocking_group = group


def blocking_group() -> int | None:
    """The group last noted by :func:`note_blocking_group`."""
    return _blocking_group


def block_limit_s() -> float:
    """Seconds for which an event loop of this process may be blocked; infinite unless an actor limits it."""
    return min(_block_limits.copy().values(), default=math.inf)


def loops() -> list[asyncio.AbstractEventLoop]:
    """The event loops of registered actors."""
    return list(_names)


def name_of(loop: asyncio.AbstractEventLoop) -> str:
    """The name of the actor registered on ``loop``."""
    return _names.get(loop, "an unregistered actor")


def helper(pid: int, name: str, operation: Callable[[], GpuOperation | None] | None = None) -> None:
    """Record that process ``pid`` of this machine is a helper of this one, called ``name``. Helpers have no monitor:
    the watch inspects them from other processes.

    Args:
        pid: pid of the helper.
        name: name in messages.
        piece: returns the helper's current GPU operation. Called on another thread, at any time.
    """
    _helpers[pid] = name
    if operation is not None:
        _helpers_operations[pid] = operation


def no_helper(pid: int) -> None:
    """Undo :func:`helper`."""
    _helpers.pop(pid, None)
    _helpers_operations.pop(pid, None)


def helpers_operations() -> dict[int, GpuOperation]:
    """Current GPU operations of helpers, by pid."""
    return {pid: operation for pid, read in _helpers_operations.copy().items() if (operation := read()) is not None}


def helpers() -> dict[int, str]:
    """Names of this process's helpers, by pid."""
    return _helpers.copy()
