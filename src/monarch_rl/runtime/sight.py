"""What the controller sees of all processes of a run: it asks their lookouts, and looks at each from outside.

For ``runtime/watch.py``, on whose thread and event loop all of this runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from monarch.actor import ActorError

from monarch_rl.runtime import lookout
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import DeadlineExceeded, within
from monarch_rl.runtime.lookout import Glimpse, ProcessState
from monarch_rl.runtime.stall import CONTROLLER, ENDED, Picture, Process

logger = logging.getLogger("monarch_rl")

ASK_DEADLINE_S = 5.0
"""Seconds for whatever is asked for a report; all is asked at once."""
LAG_ALARM_S = 1.0
"""Event-loop lag above which an actor is named in the log: requests to it wait as long."""
ALARM_EVERY_S = 60.0
"""An actor is named at most this often."""


@dataclass(slots=True)
class _Watched:
    """A process with a lookout, and what is known of it."""

    handle: Any
    process: Process
    heard: float | None = None
    """``time.monotonic()`` of its last answer; None before the first one: starting has deadlines of its own."""
    failed: bool = False
    """Monarch has said that it is lost."""


class LoopLag:
    """Event-loop lag by kind of actor, from one thread to another, and the alarm."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lags: dict[str, list[float]] = defaultdict(list)
        self._alarms: dict[str, float] = {}

    def note(self, name: str, kind: str, lags: list[float]) -> None:
        """``lags``, in seconds, of the process called ``name``."""
        if not lags:
            return
        with self._lock:
            self._lags[kind] += lags
        worst, now = max(lags), time.monotonic()
        if worst >= LAG_ALARM_S and now - self._alarms.get(name, -math.inf) >= ALARM_EVERY_S:
            self._alarms[name] = now
            logger.warning("the event loop of %s turned %.1f s too late: something blocks it", name, worst)

    def metrics(self) -> dict[str, float]:
        """Since the last call, by the names of docs/metrics.md."""
        with self._lock:
            taken, self._lags = self._lags, defaultdict(list)
        values = {}
        for kind, lags in taken.items():
            values[f"loop_lag/{kind}_max_ms"] = max(lags) * 1e3
            values[f"loop_lag/{kind}_p99_ms"] = float(np.percentile(lags, 99)) * 1e3
        return values


class Sight:
    """All processes of ``cluster``, new ones as they are spawned.

    Args:
        cluster: whose processes.
        silence_s: seconds without an answer that make a culprit.
        interval_s: seconds between two looks.
        lag: where event-loop lag is noted.
    """

    def __init__(self, cluster: Cluster, silence_s: float, interval_s: float, lag: LoopLag) -> None:
        self._cluster, self._silence_s, self._interval_s, self._lag = cluster, silence_s, interval_s, lag
        self._watched: dict[tuple[int, int], _Watched] = {}
        """By the place of its mesh among the cluster's, and its rank there."""
        self._used: dict[tuple[str, int | None], deque[tuple[float, float]]] = defaultdict(deque)
        """By machine and pid: when it was seen from outside during the last ``silence_s``, and its CPU seconds then."""
        self._ended: dict[tuple[str, int | None], float] = {}
        """By machine and pid: when it was first seen in one of the states ENDED, in which it still is."""
        self._asking: set[asyncio.Task[None]] = set()

    def meet_new(self) -> None:
        """Begin to ask processes that were spawned since the last call."""
        for place, (mesh, ranks) in enumerate(self._cluster.lookouts):
            for rank, handle in enumerate(ranks):
                if (place, rank) not in self._watched:
                    found = _Watched(handle, Process(f"{mesh} {rank}"))
                    self._watched[place, rank] = found
                    asking = asyncio.create_task(self._ask(found, mesh.rstrip("0123456789")))
                    self._asking.add(asking)
                    asking.add_done_callback(self._asking.discard)

    async def _ask(self, watched: _Watched, kind: str) -> None:
        """Ask one process how it is, again and again; one that does not answer is not asked twice at a time."""
        process = watched.process
        while True:
            try:
                call = watched.handle.look.call_one()
                found: Glimpse = await within(
                    10 * self._silence_s, call, f"{process.name} to say how it is", on="Monarch"
                )
            except DeadlineExceeded:
                continue
            except ActorError as error:  # it answers, and we have a bug
                logger.warning("%s cannot say how it is: %s", process.name, error)
                await asyncio.sleep(self._interval_s)
                continue
            except Exception as error:
                logger.debug("%s cannot be asked any more: %s", process.name, error)
                watched.failed = True
                return
            process.name, process.pid = found.name or process.name, found.pid
            process.machine, process.glimpse = found.machine, found
            if watched.heard is not None:  # what comes first is of the start
                self._lag.note(process.name, kind, found.lags)
            watched.heard = time.monotonic()
            await asyncio.sleep(self._interval_s)

    def close(self) -> None:
        """Ask no more."""
        for asking in self._asking:
            asking.cancel()

    def forgive(self) -> None:
        """Count silences from now on: until now this process was not in a state to hear."""
        self._used.clear()
        self._ended.clear()
        for watched in self._watched.values():
            watched.heard = time.monotonic() if watched.heard is not None else None

    async def picture(self) -> Picture:
        """All processes now, each seen from outside, too."""
        own = lookout.glimpse()
        self._lag.note(CONTROLLER, CONTROLLER, own.lags)
        picture = Picture({CONTROLLER: Process(CONTROLLER, own.pid, own.machine, own)}, self._silence_s)
        # One that was started anew has the name of the one it replaces.
        for watched in sorted(self._watched.values(), key=lambda found: not found.failed):
            process, now = watched.process, time.monotonic()
            heard = watched.heard if watched.heard is not None else now
            process.silent_s = max(0.0, now - heard - self._interval_s)
            picture.processes[process.name] = process
            if process.glimpse is not None and not watched.failed:  # helpers end with whom they help
                for pid, name in process.glimpse.helpers.items():
                    picture.processes[name] = Process(name, pid, process.machine)
        await self._look_from_outside(picture)
        for watched in self._watched.values():  # what Monarch lost is its to report, unless it is only stopped
            state = watched.process.state
            here = picture.processes.get(watched.process.name) is watched.process
            if here and watched.failed and (state is None or watched.process.lost):
                del picture.processes[watched.process.name]
        return picture

    async def _look_from_outside(self, picture: Picture) -> None:
        by_machine: dict[str, list[Process]] = defaultdict(list)
        for process in picture.processes.values():
            if process.pid is not None:
                by_machine[process.machine].append(process)
        answers = await asyncio.gather(*[self._states(machine, found) for machine, found in by_machine.items()])
        now = time.monotonic()
        for states, processes in zip(answers, by_machine.values(), strict=True):
            for process in processes:
                process.state = states.get(process.pid)
                self._compare(process, now)

    async def _states(self, machine: str, processes: list[Process]) -> dict[int | None, ProcessState]:
        """The processes of one machine, by pid; empty if nobody there answers."""
        pids = [process.pid for process in processes if process.pid is not None]
        if machine == lookout.machine():
            return {pid: lookout.state_of(pid) for pid in pids}
        return dict(await self._through(machine, lambda there: there.states.call_one(pids), "a look at processes", {}))

    def _compare(self, process: Process, now: float) -> None:
        """Set what follows from how the process was before."""
        if process.state is None:
            process.cpu_share = process.ended_s = 0.0
            return
        key = process.machine, process.pid
        if process.state.status in ENDED:
            process.ended_s = now - self._ended.setdefault(key, now)
        else:
            process.ended_s = 0.0
            self._ended.pop(key, None)
        # Over all of the time that makes a culprit: on a crowded machine a process at work waits long for a core.
        used = self._used[key]
        used.append((now, process.state.cpu_s))
        while used[0][0] < now - self._silence_s:
            used.popleft()
        seconds = now - used[0][0]
        # Seen for the first time it counts as at work.
        process.cpu_share = (used[-1][1] - used[0][1]) / seconds if seconds > 0 else 1.0

    async def _through(self, machine: str, ask: Callable[[Any], Awaitable[Any]], what: str, otherwise: Any) -> Any:
        """What the lookout on ``machine`` that was heard of last answers."""
        there = [found for found in self._watched.values() if found.process.machine == machine and not found.failed]
        for watched in sorted(there, key=lambda found: -(found.heard or 0.0))[:1]:
            with suppress(Exception):  # that it does not answer is seen by its silence
                return await within(ASK_DEADLINE_S, ask(watched.handle), what, on="Monarch")
        return otherwise

    async def stacks(self, process: Process) -> str:
        """The Python stacks of a process, told by itself if it answers, else read from outside."""
        if process.name == CONTROLLER:
            return lookout.own_stacks()
        for watched in self._watched.values():
            if watched.process is process and process.silent_s < self._silence_s / 2 and not watched.failed:
                with suppress(Exception):  # it does not answer after all: look from outside
                    call = watched.handle.stacks.call_one()
                    return str(await within(ASK_DEADLINE_S, call, f"the stacks of {process.name}", on="Monarch"))
        pid = process.pid
        if pid is None:
            return "it has never answered\n"
        if process.machine == lookout.machine():
            return await asyncio.to_thread(lookout.stacks_of, pid)
        missing = "nobody on its machine answers\n"
        return str(await self._through(process.machine, lambda there: there.stacks_of.call_one(pid), "stacks", missing))

    async def kill(self, process: Process) -> None:
        """End a process, wherever it runs, and expect nothing of it any more."""
        for watched in self._watched.values():
            watched.failed = watched.failed or watched.process is process
        if process.pid is None:
            return
        if process.machine == lookout.machine():
            lookout.kill(process.pid)
        else:
            await self._through(process.machine, partial(_kill, process.pid), f"the end of {process.name}", None)


def _kill(pid: int, there: Any) -> Any:
    return there.kill.call_one(pid)
