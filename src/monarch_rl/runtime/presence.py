"""What a process can tell of itself: who is in it, what they wait for, what they got done, which processes they run.

Written by the process's own actors as they go, read by its lookout (``runtime/lookout.py``) on another thread, so that
it can be told while an actor's event loop is blocked. Kept per process, since a process is what fails.
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

BEAT_S = 0.05
"""Seconds between two looks at whether an event loop turns."""
KEPT_PER_DEBTOR = 16
"""Waits that are told of those on one and the same process, the oldest that differ: an actor may have hundreds."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait that is under way."""

    owner: str
    """Who waits: ``"trainer rank 1"``."""
    what: str
    """For what, completing "waits for ...": ``"the batch of step 41"``."""
    on: str
    """Who owes it: the name of a process (``"generator 1"``) or of all of a kind (``"rollout workers"``), or of
    something outside the run (``stall.OUTSIDE``). Empty if that is not one party."""
    since: float
    """``time.monotonic()``, in seconds, of this machine."""
    deadline_s: float
    """Seconds after which the wait is given up; infinite if whoever asked keeps the deadline."""


@dataclass(slots=True)
class Mark:
    """Progress of one kind."""

    count: int
    """How often so far."""
    last: float
    """``time.monotonic()`` of the last time."""


class Heart:
    """Notes how late an event loop turns. Lag is the time by which a sleep of :data:`BEAT_S` overslept, in seconds."""

    def __init__(self) -> None:
        self.beat = time.monotonic()
        """When the loop turned last."""
        self.lags: deque[float] = deque(maxlen=4096)
        """Not taken yet."""

    async def run(self) -> None:
        """Beat as long as the loop runs."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT_S)
            self.beat = time.monotonic()
            self.lags.append(max(0.0, self.beat - before - BEAT_S))

    def silent_s(self) -> float:
        """Seconds by which the next beat is overdue: the loop has been blocked for that long."""
        return max(0.0, time.monotonic() - self.beat - BEAT_S)

    def take(self) -> list[float]:
        """The lags since the last call."""
        taken = []
        while self.lags:
            taken.append(self.lags.popleft())
        return taken


_names: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, str] = weakref.WeakKeyDictionary()
_hearts: dict[str, tuple[Heart, asyncio.Task[None], int]] = {}
"""By name: the heart, its task, and the thread of the loop."""
_accounts: dict[str, Callable[[], Sequence[Wait]]] = {}
_helpers: dict[int, str] = {}
_waits: dict[int, Wait] = {}
_marks: dict[str, Mark] = {}
_numbers = itertools.count()


def register(name: str, account: Callable[[], Sequence[Wait]] | None = None) -> None:
    """Say who works on the running event loop, and have the loop watched. Again with the same name changes nothing.

    Args:
        name: plain, as in messages: ``"trainer rank 1"``.
        account: what this actor waits for without awaiting it, such as what others hold of its; called on another
            thread, at any time.
    """
    loop = asyncio.get_running_loop()
    _names[loop] = name
    if account is not None:
        _accounts[name] = account
    if name not in _hearts or _hearts[name][1].done():
        heart = Heart()
        _hearts[name] = heart, loop.create_task(heart.run()), threading.get_ident()


def unregister(name: str) -> None:
    """Undo :func:`enlist`, from the loop that was enlisted."""
    if name in _hearts:
        _hearts.pop(name)[1].cancel()
    _accounts.pop(name, None)
    _names.pop(asyncio.get_running_loop(), None)


def owner() -> str:
    """Who waits on this thread: whoever is enlisted on its loop, else the process's first, else the process itself."""
    try:
        found = _names.get(asyncio.get_running_loop())
    except RuntimeError:
        found = None
    return found or process_name() or f"process {os.getpid()}"


def process_name() -> str | None:
    """The name of this process: that of the first one enlisted."""
    return next(iter(_hearts), None)


@contextmanager
def waiting(what: str, on: str = "", deadline_s: float = math.inf) -> Iterator[None]:
    """Record a wait while the block runs. The caller keeps the deadline; :func:`deadlines.within` does both."""
    number = next(_numbers)
    _waits[number] = Wait(owner(), what, on, time.monotonic(), deadline_s)
    try:
        yield
    finally:
        del _waits[number]


def waits() -> list[Wait]:
    """The waits under way in this process, oldest first; of those on the same process the oldest few that differ."""
    found = list(_waits.copy().values())
    for account in list(_accounts.values()):
        found += account()
    kept: dict[tuple[str, str], set[str]] = {}
    told = []
    for wait in sorted(found, key=lambda wait: wait.since):
        whats = kept.setdefault((wait.owner, wait.on), set())
        if wait.what not in whats and len(whats) < KEPT_PER_DEBTOR:
            whats.add(wait.what)
            told.append(wait)
    return told


def progress(kind: str) -> None:
    """Note that the run got on: ``"step trained"``, ``"group put"``, ``"version published"``, ..."""
    mark = _marks.setdefault(kind, Mark(0, 0.0))
    mark.count, mark.last = mark.count + 1, time.monotonic()


def marks() -> dict[str, Mark]:
    """The progress of this process so far, by kind."""
    return _marks.copy()


def hearts() -> dict[str, tuple[Heart, int]]:
    """By name: the heart of a loop, and the loop's thread."""
    return {name: (heart, thread) for name, (heart, _, thread) in _hearts.copy().items()}


def loops() -> list[asyncio.AbstractEventLoop]:
    """The event loops that somebody is enlisted on."""
    return list(_names)


def name_of(loop: asyncio.AbstractEventLoop) -> str:
    """Who is enlisted on ``loop``."""
    return _names.get(loop, "nobody")


def helper(pid: int, name: str) -> None:
    """Say that process ``pid`` of this machine works for this one, under ``name``; it is looked at from outside."""
    _helpers[pid] = name


def no_helper(pid: int) -> None:
    """Undo :func:`helper`."""
    _helpers.pop(pid, None)


def helpers() -> dict[int, str]:
    """Processes that work for this one, by pid."""
    return _helpers.copy()
