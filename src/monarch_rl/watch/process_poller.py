"""The controller's view of all processes of a run: it polls their monitors, and inspects each process from outside.

Runs on the thread and event loop of ``watch/watch.py``.
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
from typing import TypeVar

import numpy as np
from monarch.actor import ActorError

from monarch_rl.errors import DeadlineExceeded
from monarch_rl.runtime import monitor
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.machine import own_id
from monarch_rl.runtime.monitor import ProcessMonitor, ProcessReport, ProcessState
from monarch_rl.runtime.starvation import CoreTime
from monarch_rl.runtime.wait_registry import CONTROLLER
from monarch_rl.watch.stall import NOT_RUNNING, TRAINER_RANK, Process, RunPicture

logger = logging.getLogger("monarch_rl")

T = TypeVar("T")

ASK_DEADLINE_S = 5.0
"""Seconds for each call that a report needs; all calls are concurrent."""
LAG_ALARM_S = 1.0
"""Event-loop lag in seconds from which an actor is named in the log: requests to it wait that long."""
ALARM_EVERY_S = 60.0
"""Minimum seconds between two log messages about the same actor."""
PLACES_NAMED = 20
"""Maximum number of source lines logged for blocking the same actor, each once."""


@dataclass(slots=True)
class _PolledProcess:
    """A process with a monitor."""

    handle: ProcessMonitor
    process: Process
    last_answer: float | None = None
    """``time.monotonic()`` of its last answer; None before the first one, because the start has its own deadlines."""
    failed: bool = False
    """Whether Monarch has reported its loss."""


@dataclass(slots=True)
class _SeenOperation:
    """A GPU operation, and the state of its process when the operation was first observed."""

    since: float
    """``GpuOperation.since``; identifies the operation."""
    at: float
    """``time.monotonic()`` of the first observation."""
    had: CoreTime
    """Core time of the process at the first observation."""
    unwatched_s: float
    """The poller's total of unwatched seconds at the first observation."""
    others_compiled_s: float = 0.0
    """Seconds since the first observation in which processes that it may wait for compiled."""


class LoopLag:
    """Event-loop lag by kind of actor, collected on one thread and read on another; logs a warning if it is high."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lags: dict[str, list[float]] = defaultdict(list)
        self._alarms: dict[str, float] = {}
        self._places: dict[str, set[str]] = defaultdict(set)
        """Source lines already logged, by process."""

    def note(self, name: str, kind: str, lags: list[float]) -> None:
        """Add ``lags``, in seconds, of the process called ``name``."""
        if not lags:
            return
        with self._lock:
            self._lags[kind] += lags
        worst, now = max(lags), time.monotonic()
        if worst >= LAG_ALARM_S and now - self._alarms.get(name, -math.inf) >= ALARM_EVERY_S:
            self._alarms[name] = now
            logger.warning(
                "the event loop of %s ran %.1f s too late: some code blocks it, or it had no core", name, worst
            )

    def name_line(self, name: str, report: ProcessReport) -> None:
        """Log the source line that blocks the event loop of the process called ``name``, once per line."""
        place = report.blocked_at
        if place and place not in self._places[name] and len(self._places[name]) < PLACES_NAMED:
            self._places[name].add(place)
            logger.warning(
                "%s blocks the event loop of %s, for %.1f s so far: move blocking calls and computation to a thread "
                "(asyncio.to_thread) or to a scoring process",
                place,
                name,
                report.blocked_s,
            )

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call, in milliseconds, by their names in docs/metrics.md."""
        with self._lock:
            taken, self._lags = self._lags, defaultdict(list)
        values = {}
        for kind, lags in taken.items():
            values[f"loop_lag/{kind}_max_ms"] = max(lags) * 1e3
            values[f"loop_lag/{kind}_p99_ms"] = float(np.percentile(lags, 99)) * 1e3
        return values


class ProcessPoller:
    """Polls all processes of ``cluster``, including those spawned later.

    Args:
        cluster: the cluster to poll.
        silence_s: seconds without an answer after which a process is a culprit.
        interval_s: seconds between two polls of a process.
        lag: receives the event-loop lag that the processes report.
    """

    def __init__(self, cluster: Cluster, silence_s: float, interval_s: float, lag: LoopLag) -> None:
        self._cluster, self._silence_s, self._interval_s, self._lag = cluster, silence_s, interval_s, lag
        self._polled: dict[int, _PolledProcess] = {}
        """By ``id`` of the process's handle, which the entry keeps alive."""
        self._cpu_history: dict[tuple[str, int | None], deque[tuple[float, CoreTime]]] = defaultdict(deque)
        """By machine and pid: time and core time at each inspection during the last ``silence_s``."""
        self._not_running_since: dict[tuple[str, int | None], float] = {}
        """By machine and pid: when a process that is in a state of NOT_RUNNING was first seen in one."""
        self._operations: dict[tuple[str, int | None], _SeenOperation] = {}
        """By machine and pid: the last observed GPU operation."""
        self._unwatched_s = 0.0
        """Total seconds for which this process itself did not run."""
        self._polls: set[asyncio.Task[None]] = set()
        self._watched_since = self._inspected_at = time.monotonic()

    def add_new(self) -> None:
        """Start to poll the processes that were spawned since the last call."""
        for mesh, monitors in self._cluster.monitors:
            for rank, handle in enumerate(monitors):
                if id(handle) not in self._polled:
                    polled = _PolledProcess(handle, Process(f"{mesh} {rank}"))
                    self._polled[id(handle)] = polled
                    poll = asyncio.create_task(self._poll(polled, mesh.rstrip("0123456789")))
                    self._polls.add(poll)
                    poll.add_done_callback(self._polls.discard)

    async def _poll(self, polled: _PolledProcess, kind: str) -> None:
        """Poll one process until it is lost, with at most one pending call."""
        process = polled.process
        while True:
            try:
                call = polled.handle.report.call_one()
                report = await within(10 * self._silence_s, call, f"the report of {process.name}", on="Monarch")
            except DeadlineExceeded:
                continue
            except ActorError as error:  # the process answers, so this is a bug in the monitor
                logger.warning("the monitor of %s failed: %s", process.name, error)
                await asyncio.sleep(self._interval_s)
                continue
            except Exception as error:
                logger.debug("%s can no longer be polled: %s", process.name, error)
                polled.failed = True
                return
            process.name, process.pid = report.name or process.name, report.pid
            process.machine, process.report = report.machine, report
            if polled.last_answer is not None:  # the first report has the lags of the process's start
                self._lag.note(process.name, kind, report.lags)
                self._lag.name_line(process.name, report)
            polled.last_answer = time.monotonic()
            await asyncio.sleep(self._interval_s)

    def close(self) -> None:
        """Stop polling."""
        for poll in self._polls:
            poll.cancel()

    def reset_silence(self, lost_s: float = 0.0) -> None:
        """Restart the silence of all processes, because this process itself could not receive answers until now.

        Args:
            lost_s: seconds for which this process did not run. Perhaps no process did, so GPU operations are not
                charged for them.
        """
        self._unwatched_s += lost_s
        self._cpu_history.clear()
        self._not_running_since.clear()
        for polled in self._polled.values():
            polled.last_answer = time.monotonic() if polled.last_answer is not None else None

    async def picture(self) -> RunPicture:
        """All processes now: their last reports, and their states inspected from outside."""
        own = monitor.own_report()
        self._lag.note(CONTROLLER, CONTROLLER, own.lags)
        self._lag.name_line(CONTROLLER, own)
        picture = RunPicture({CONTROLLER: Process(CONTROLLER, own.pid, own.machine, own)}, self._silence_s)
        # Failed ones first: a replacement has the same name, and overwrites the entry of the process that it replaces.
        for polled in sorted(self._polled.values(), key=lambda polled: not polled.failed):
            process, now = polled.process, time.monotonic()
            last_answer = polled.last_answer if polled.last_answer is not None else now
            process.silent_s = max(0.0, now - last_answer - self._interval_s)
            picture.processes[process.name] = process
            if process.report is not None and not polled.failed:  # helpers end with their process
                process.operation = process.report.operation
                if process.operation is not None:  # counted up to its report: the operation may have ended since
                    process.operation_s = process.report.now - process.operation.since
                for pid, name in process.report.helpers.items():
                    helper = picture.processes[name] = Process(name, pid, process.machine)
                    helper.operation = process.report.helpers_operations.get(pid)
                    if helper.operation is not None:
                        helper.operation_s = process.report.now - helper.operation.since
        await self._inspect(picture)
        _leave_out_lost(picture, self._polled, self._cluster)
        self._forget_ended(picture)
        return picture

    def _forget_ended(self, picture: RunPicture) -> None:
        """Forget processes that have ended and were replaced: in a long run there are many."""
        shown = {(process.machine, process.pid) for process in picture.processes.values()}
        for history in (self._cpu_history, self._not_running_since, self._operations):
            for key in history.keys() - shown:
                del history[key]
        in_cluster = _handles(self._cluster)
        for number, polled in list(self._polled.items()):
            is_shown = picture.processes.get(polled.process.name) is polled.process
            if polled.failed and not is_shown and number not in in_cluster:
                del self._polled[number]

    async def _inspect(self, picture: RunPicture) -> None:
        """Set the state of all processes, according to their machines' operating systems."""
        by_machine: dict[str, list[Process]] = defaultdict(list)
        for process in picture.processes.values():
            if process.pid is not None:
                by_machine[process.machine].append(process)
        answers = await asyncio.gather(*[self._states(machine, there) for machine, there in by_machine.items()])
        now = time.monotonic()
        for states, processes in zip(answers, by_machine.values(), strict=True):
            for process in processes:
                process.state = None if process.pid is None else states.get(process.pid)
                self._compare_with_history(process, now)
                self._leave_out_queued(process, now)
        _leave_out_others_compilation(list(picture.processes.values()), self._operations, now, now - self._inspected_at)
        self._inspected_at = now

    def _leave_out_queued(self, process: Process, now: float) -> None:
        """Subtract from the seconds of its GPU operation the time for which the process had no core, and the time
        before this watch started."""
        key = process.machine, process.pid
        if process.operation is None:
            self._operations.pop(key, None)
            return
        process.operation_s = max(0.0, min(process.operation_s, now - self._watched_since))
        if process.state is None:
            return
        had = CoreTime(process.state.cpu_s, process.state.queued_s)
        seen = self._operations.get(key)
        if seen is None or seen.since != process.operation.since:
            self._operations[key] = _SeenOperation(process.operation.since, now, had, self._unwatched_s)
            return
        # A share, not the sum of queued seconds: many threads may be queued at once, and only one waits for the device.
        without_core_s = had.queued_share(seen.had, now - seen.at) * (now - seen.at)
        process.operation_s = max(0.0, process.operation_s - without_core_s - (self._unwatched_s - seen.unwatched_s))

    async def _states(self, machine: str, processes: list[Process]) -> dict[int, ProcessState]:
        """States of processes on one machine, by pid; empty if no monitor on it answers."""
        pids = [process.pid for process in processes if process.pid is not None]
        if machine == own_id():
            return {pid: monitor.state_of(pid) for pid in pids}
        unknown: dict[int, ProcessState] = {}
        return await self._ask_on(machine, lambda there: there.states.call_one(pids), "process states", unknown)

    def _compare_with_history(self, process: Process, now: float) -> None:
        """Set the attributes derived from earlier states: the shares of a core, and ``not_running_s``."""
        if process.state is None:
            process.cpu_share = process.queued_share = process.not_running_s = 0.0
            return
        key = process.machine, process.pid
        if process.state.status in NOT_RUNNING:
            process.not_running_s = now - self._not_running_since.setdefault(key, now)
        else:
            process.not_running_s = 0.0
            self._not_running_since.pop(key, None)
        # Over all of silence_s: on a busy machine a process at work may wait long for a core.
        history = self._cpu_history[key]
        history.append((now, CoreTime(process.state.cpu_s, process.state.queued_s)))
        while history[0][0] < now - self._silence_s:
            history.popleft()
        (begin, before), (_, latest) = history[0], history[-1]
        seconds = now - begin
        # A process counts as at work at its first inspection.
        process.cpu_share = (latest.ran_s - before.ran_s) / seconds if seconds > 0 else 1.0
        process.queued_share = latest.queued_share(before, seconds)

    async def _ask_on(self, machine: str, ask: Callable[[ProcessMonitor], Awaitable[T]], what: str, otherwise: T) -> T:
        """Ask the monitor on ``machine`` that answered most recently; returns ``otherwise`` if it does not answer."""
        there = [polled for polled in self._polled.values() if polled.process.machine == machine and not polled.failed]
        for polled in sorted(there, key=lambda polled: -(polled.last_answer or 0.0))[:1]:
            with suppress(Exception):  # if it does not answer, polling notices its silence
                return await within(ASK_DEADLINE_S, ask(polled.handle), what, on="Monarch")
        return otherwise

    async def stacks(self, process: Process) -> str:
        """The Python stacks of a process: from its own monitor if that answers, else read by another process."""
        if process.name == CONTROLLER:
            return monitor.own_stacks()
        for polled in self._polled.values():
            if polled.process is process and process.silent_s < self._silence_s / 2 and not polled.failed:
                with suppress(Exception):  # it does not answer after all: read them from another process
                    call = polled.handle.stacks.call_one()
                    return await within(ASK_DEADLINE_S, call, f"the stacks of {process.name}", on="Monarch")
        pid = process.pid
        if pid is None:
            return "unknown: the process has never answered\n"
        if process.machine == own_id():
            return await asyncio.to_thread(monitor.stacks_of, pid)
        unknown = "unknown: no process on its machine answers\n"
        return await self._ask_on(process.machine, lambda there: there.stacks_of.call_one(pid), "stacks", unknown)

    async def kill(self, process: Process) -> None:
        """Kill a process on any machine of the run, and stop expecting answers from it."""
        for polled in self._polled.values():
            polled.failed = polled.failed or polled.process is process
        pid = process.pid
        if pid is None:
            return
        if process.machine == own_id():
            monitor.kill(pid)
        else:
            what = f"the end of {process.name}"
            await self._ask_on(process.machine, lambda there: there.kill.call_one(pid), what, None)


def _leave_out_others_compilation(
    processes: list[Process], operations: dict[tuple[str, int | None], _SeenOperation], now: float, since_last_s: float
) -> None:
    """Subtract from the seconds of each GPU operation the time in which another process, for which it may wait,
    compiled kernels within its limit. Only the compiling process itself reports that it compiles.

    A process that exceeds the limit for compilation excuses no other, so processes that hang while they compile do not
    excuse each other.

    Args:
        processes: all processes; ``operation_s`` already excludes the time for which they had no core.
        operations: operations as first observed, by machine and pid.
        now: time of this inspection.
        since_last_s: seconds since the previous inspection.
    """
    compiling = [process for process in processes if process.operation is not None and process.operation.compiles]
    compiling = [process for process in compiling if not process.device_hangs]
    for process in processes:
        seen = operations.get((process.machine, process.pid))
        if process.operation is None or seen is None or seen.since != process.operation.since:
            continue
        if any(other is not process and _may_wait_for(process, other) for other in compiling):
            seen.others_compiled_s += min(since_last_s, now - seen.at)
        process.operation_s = max(0.0, process.operation_s - seen.others_compiled_s)


def _may_wait_for(process: Process, other: Process) -> bool:
    """Whether a process's GPU operation may wait for another process's compilation: trainer ranks on any machines wait
    for each other in collectives, and engines on the same machine for the lock of a kernel's files."""
    ranks = {known.name.startswith(TRAINER_RANK) for known in (process, other)}
    return ranks == {True} or (ranks == {False} and process.machine == other.machine)


def _handles(cluster: Cluster) -> set[int]:
    """``id`` of the handle of each process that was not replaced."""
    return {id(handle) for _, monitors in cluster.monitors for handle in monitors}


def _leave_out_lost(picture: RunPicture, polled_by_handle: dict[int, _PolledProcess], cluster: Cluster) -> None:
    """Remove processes that Monarch has reported as lost, unless they are only stopped.

    A lost process that was not replaced, and that another one waits for, is not removed: Monarch may have reported its
    loss only to this watch, and report it to others two minutes later.
    """
    in_cluster = _handles(cluster)
    waits = [wait for process in picture.processes.values() for wait in process.waits]
    awaited = {process.name for wait in waits for process in picture.waited_on(wait)}
    for number, polled in polled_by_handle.items():
        process = polled.process
        shown = picture.processes.get(process.name) is process
        stays = process.lost and number in in_cluster and process.name in awaited
        if shown and polled.failed and not stays and (process.state is None or process.lost):
            del picture.processes[process.name]
