"""The lookout: a second actor in every process of a run, which tells how the first one is.

Monarch gives each actor an event loop on a thread of its own, so a lookout answers while the actor beside it is
blocked. It cannot if the whole process is stopped, or if one call holds the interpreter. That is for others on the same
machine to see: the controller, or any other lookout there.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
from monarch.actor import Actor

from monarch_rl.runtime import presence
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.runtime.presence import Mark, Wait

TASKS_SHOWN = 20
"""asyncio tasks of a loop whose place is shown."""
STACKS_DEADLINE_S = 5.0
"""Seconds for py-spy to read another process's stacks; 0.1 is normal."""


@dataclass(frozen=True, slots=True)
class Glimpse:
    """What a process tells of itself. Times are of its machine's ``time.monotonic()``."""

    name: str | None
    """Who is in it; None if nobody has said."""
    pid: int
    machine: str
    """Processes with the same one can look at each other by pid."""
    now: float
    waits: list[Wait]
    marks: dict[str, Mark]
    blocked_s: float
    """Seconds for which its slowest event loop has not turned."""
    lags: list[float]
    """By how many seconds its loops turned too late, since the last glimpse."""
    helpers: dict[int, str]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process from outside."""

    status: str
    """psutil's, such as ``running``, ``sleeping``, ``stopped``, ``zombie``; ``gone`` if there is none."""
    cpu_s: float
    """CPU time that it has used."""


class Lookout(Actor):
    """One process's."""

    @concurrent_endpoint
    async def look(self) -> Glimpse:
        """How this process is."""
        return glimpse()

    @concurrent_endpoint
    async def stacks(self) -> str:
        """The Python stacks of this process."""
        return own_stacks()

    @concurrent_endpoint
    async def states(self, pids: list[int]) -> dict[int, ProcessState]:
        """Other processes of this machine."""
        return {pid: state_of(pid) for pid in pids}

    @concurrent_endpoint
    async def stacks_of(self, pid: int) -> str:
        """The Python stacks of another process of this machine."""
        return await asyncio.to_thread(stacks_of, pid)

    @concurrent_endpoint
    async def kill(self, pid: int) -> None:
        """End another process of this machine."""
        kill(pid)

    @concurrent_endpoint
    async def die(self) -> None:
        """End this process at once; the call fails."""
        kill(os.getpid())


def glimpse() -> Glimpse:
    """How this process is."""
    waits, marks = presence.waits(), presence.marks()  # before the clock is read: no wait is younger than now
    hearts = [heart for heart, _ in presence.hearts().values()]
    return Glimpse(
        presence.process_name(),
        os.getpid(),
        machine(),
        time.monotonic(),
        waits,
        marks,
        max((heart.silent_s() for heart in hearts), default=0.0),
        [lag for heart in hearts for lag in heart.take()],
        presence.helpers(),
    )


def machine() -> str:
    """The machine and its space of process ids, as far as the kernel tells them apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return os.uname().nodename


def state_of(pid: int) -> ProcessState:
    """How a process of this machine is."""
    try:
        process = psutil.Process(pid)
        used = process.cpu_times()
        return ProcessState(str(process.status()), used.user + used.system)
    except psutil.NoSuchProcess:
        return ProcessState("gone", 0.0)


def kill(pid: int) -> None:
    """End a process of this machine, stopped or not; nothing if it is gone."""
    try:
        psutil.Process(pid).kill()
    except psutil.NoSuchProcess:
        return


def own_stacks() -> str:
    """The stacks of all threads of this process, and where the tasks of its event loops are."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    loops = {thread: name for name, (_, thread) in presence.hearts().items()}
    parts = []
    for ident, frame in sys._current_frames().items():
        of = f", the loop of {loops[ident]}" if ident in loops else ""
        parts.append(f"thread {threads.get(ident, ident)}{of}\n{''.join(traceback.format_stack(frame))}")
    for loop in presence.loops():
        tasks = list(asyncio.all_tasks(loop))
        places = [f"  {task.get_name()} {_place(task)}" for task in tasks[:TASKS_SHOWN]]
        parts.append("\n".join([f"{len(tasks)} tasks of {presence.name_of(loop)}", *places, ""]))
    return "\n".join(parts)


def _place(task: asyncio.Task[object]) -> str:
    frames: list[FrameType] = task.get_stack(limit=1)
    where = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "nowhere"
    return f"{getattr(task.get_coro(), '__qualname__', task.get_coro())} at {where}"


def stacks_of(pid: int) -> str:
    """The Python stacks of another process of this machine by py-spy, or why they cannot be had.

    It is not halted for it, so that this works on a stopped process, too.
    """
    beside = Path(sys.executable).with_name("py-spy")  # of a virtual environment that is not activated
    command = [str(beside) if beside.is_file() else "py-spy", "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STACKS_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy could not read process {pid}: {error}\n"
    if done.returncode:
        return f"py-spy could not read process {pid}: {done.stderr.strip()}\n"
    return done.stdout
