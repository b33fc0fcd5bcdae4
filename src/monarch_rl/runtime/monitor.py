"""The process monitor: a second actor in every process of a run, which reports on the process.

Monarch runs each actor's event loop on its own thread, so the monitor answers while the first actor is blocked. It
cannot answer if the whole process is stopped, or if one call holds the GIL. Then another process on the same machine
inspects it: the controller, or any other monitor there.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from monarch.actor import Actor

from monarch_rl.runtime import machine, starvation, timeline, wait_registry
from monarch_rl.runtime.device_work import GpuOperation, operation_in_progress
from monarch_rl.runtime.endpoint import concurrent_endpoint, persistent_endpoint
from monarch_rl.runtime.persistent_calls import AnswersCalls
from monarch_rl.runtime.timeline import Span
from monarch_rl.runtime.wait_registry import Progress, Wait

TASKS_SHOWN = 20
"""Number of asyncio tasks per event loop that the stacks include."""
_LIBRARIES = tuple(
    f"{folder}{os.sep}"  # a folder next to it may have a name that begins alike
    for folder in (
        Path(__file__).parents[1],
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
_EVENT_LOOP = (asyncio.events.__file__, asyncio.base_events.__file__)
"""Files of the code that runs an event loop's callbacks."""
STACKS_DEADLINE_S = 5.0
"""Seconds for py-spy to read another process's stacks; normally 0.1."""


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """A process's report on itself. Times are ``time.monotonic()`` of its machine."""

    name: str | None
    """Name of the first actor registered in it; None before the first registration."""
    pid: int
    machine: str
    """Processes with the same value can inspect each other by pid."""
    now: float
    waits: list[Wait]
    progress: dict[str, Progress]
    """By kind."""
    blocked_s: float
    """Seconds since its slowest event loop last ran."""
    lags: list[float]
    """Event-loop lags since the previous report, in seconds."""
    helpers: dict[int, str]
    """Names of its helper processes, by pid."""
    operation: GpuOperation | None = None
    """Its current GPU operation."""
    helpers_operations: dict[int, GpuOperation] = field(default_factory=dict)
    """Current GPU operations of its helper processes, by pid."""
    blocked_at: str = ""
    """File and line at which its slowest event loop is blocked; empty unless that has not run for
    :data:`wait_registry.PAUSE_S`."""
    block_limit_s: float = math.inf
    """Seconds for which its event loops may be blocked, whatever they do."""
    blocking_group: int | None = None
    """Group of the episode that blocks an event loop, if known."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process according to the operating system."""

    status: str
    """psutil's status, such as ``running``, ``sleeping``, ``stopped``, ``zombie``; ``gone`` if there is no such
    process, ``unknown`` if the system denies access."""
    cpu_s: float
    """CPU seconds used so far."""
    queued_s: float = 0.0
    """Seconds for which its threads were ready to run but had no core (``runtime/starvation.py``)."""


@dataclass(frozen=True, slots=True)
class SpanReport:
    """New spans of a process's timeline."""

    machine: str
    """As in :class:`ProcessReport`."""
    now: float
    """``time.monotonic()`` of its machine, as are the times of spans."""
    spans: list[Span]
    dropped: int
    """Number of further spans that were dropped, because nobody took them in time."""
    cpu_s: float
    """CPU seconds since the last report that its process has spent on making spans."""


class ProcessMonitor(AnswersCalls, Actor):
    """Reports on its process, and inspects or kills other processes on its machine."""

    @persistent_endpoint
    async def report(self) -> ProcessReport:
        """Report on this process."""
        return own_report()

    @persistent_endpoint
    async def spans(self, cut_s: float) -> SpanReport:
        """Take the new spans of this process: see :meth:`Timeline.take`."""
        return own_spans(cut_s)

    @concurrent_endpoint
    async def describe_machine(self) -> dict[str, Any]:
        """Describe this machine; starts nvidia-smi."""
        return await asyncio.to_thread(machine.describe)

    @concurrent_endpoint
    async def stacks(self) -> str:
        """The Python stacks of this process."""
        return own_stacks()

    @persistent_endpoint
    async def states(self, pids: list[int]) -> dict[int, ProcessState]:
        """States of other processes on this machine."""
        return {pid: state_of(pid) for pid in pids}

    @concurrent_endpoint
    async def stacks_of(self, pid: int) -> str:
        """The Python stacks of another process on this machine."""
        return await asyncio.to_thread(stacks_of, pid)

    @concurrent_endpoint
    async def kill(self, pid: int) -> None:
        """Kill another process on this machine."""
        kill(pid)

    @concurrent_endpoint
    async def die(self) -> None:
        """Kill this process; the call fails."""
        kill(os.getpid())


def own_report() -> ProcessReport:
    """Report on this process."""
    # Read before the clock, so that no wait begins after ``now``.
    waits, progress = wait_registry.waits(), wait_registry.progress_by_kind()
    operation, helpers_operations = operation_in_progress(), wait_registry.helpers_operations()
    heartbeats = [heartbeat for heartbeat, _ in wait_registry.heartbeats().values()]
    return ProcessReport(
        wait_registry.process_name(),
        os.getpid(),
        machine.own_id(),
        time.monotonic(),
        waits,
        progress,
        max((heartbeat.overdue_s() for heartbeat in heartbeats), default=0.0),
        [lag for heartbeat in heartbeats for lag in heartbeat.take_lags()],
        wait_registry.helpers(),
        operation,
        helpers_operations,
        _blocked_at(),
        wait_registry.block_limit_s(),
        wait_registry.blocking_group(),
    )


def own_spans(cut_s: float) -> SpanReport:
    """Take the new spans of this process: see :meth:`Timeline.take`."""
    spans, dropped = timeline.take(cut_s)
    return SpanReport(machine.own_id(), time.monotonic(), spans, dropped, timeline.cpu_s())


def _blocked_at() -> str:
    """File and line of the innermost user code on the slowest event loop, if that is blocked; empty if it is not, or
    runs no user code. User code is neither a library's nor this package's."""
    slowest = max(wait_registry.heartbeats().values(), key=lambda of_loop: of_loop[0].overdue_s(), default=None)
    if slowest is None or slowest[0].overdue_s() < wait_registry.PAUSE_S:
        return ""
    frame = sys._current_frames().get(slowest[1])
    while frame is not None and frame.f_code.co_filename not in _EVENT_LOOP:
        if is_user_code(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_user_code(frame: FrameType) -> bool:
    """Whether a frame is neither of a library nor of this package."""
    return not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))


def state_of(pid: int) -> ProcessState:
    """The state of a process on this machine."""
    try:
        process = psutil.Process(pid)
        used = process.cpu_times()
        queued_s = starvation.core_time(pid).queued_s
        return ProcessState(str(process.status()), used.user + used.system, queued_s)
    except psutil.NoSuchProcess:
        return ProcessState("gone", 0.0)
    except psutil.AccessDenied:
        return ProcessState("unknown", 0.0)


def kill(pid: int) -> None:
    """Kill a process on this machine, stopped or not. Does nothing if it has ended."""
    try:
        psutil.Process(pid).kill()
    except psutil.NoSuchProcess:
        return


def own_stacks() -> str:
    """The stacks of all threads of this process, and where the tasks of its event loops are."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    loops = {thread: name for name, (_, thread) in wait_registry.heartbeats().items()}
    parts = []
    for ident, frame in sys._current_frames().items():
        loop_of = f", the loop of {loops[ident]}" if ident in loops else ""
        parts.append(f"thread {threads.get(ident, ident)}{loop_of}\n{''.join(traceback.format_stack(frame))}")
    for loop in wait_registry.loops():
        tasks = list(asyncio.all_tasks(loop))
        positions = [f"  {task.get_name()} {_position(task)}" for task in tasks[:TASKS_SHOWN]]
        parts.append("\n".join([f"{len(tasks)} tasks of {wait_registry.name_of(loop)}", *positions, ""]))
    return "\n".join(parts)


def _position(task: asyncio.Task[object]) -> str:
    frames: list[FrameType] = task.get_stack(limit=1)
    line = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "an unknown line"
    return f"{getattr(task.get_coro(), '__qualname__', task.get_coro())} at {line}"


def stacks_of(pid: int) -> str:
    """The Python stacks of another process on this machine, read by py-spy, or why they cannot be read.

    py-spy does not pause the process, so this also works on a stopped process.
    """
    installed = Path(sys.executable).with_name("py-spy")  # for a virtual environment that is not activated
    command = [str(installed) if installed.is_file() else "py-spy", "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=STACKS_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy could not read process {pid}: {error}\n"
    if done.returncode:
        return f"py-spy could not read process {pid}: {done.stderr.strip()}\n"
    return done.stdout
