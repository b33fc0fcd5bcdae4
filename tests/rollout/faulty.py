"""Rollout workers in a process of their own, whose episodes may harm it: ``faulty.py FOLDER``

It prints a line of JSON with, for each fault, what the worker did, how it ended, and what was reported.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from monarch_rl.episode.admission_steps import AdmissionSteps
from monarch_rl.episode.episode import Ticket
from monarch_rl.episode.failure import Failure
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.messages import ToolCall
from monarch_rl.rollout.run_tools import run_tools
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.worker import Resources, RolloutWorker
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.monitor import own_report
from monarch_rl.simulate.handles import LocalMesh
from monarch_rl.tasks.task import Policy, Task

GROUPS, SIZE = 40, 2
DEADLINE_S = 1.0
"""Of episodes that never end."""
PRINTED = 10**7
OPENED = "/dev/zero"
LEFT_OPEN: list[Any] = []
PROGRAM = "the program of the faults"
sys.modules[PROGRAM] = sys.modules[__name__]
HUNG = threading.Event()
"""Set once the worker has ended."""
CLOSED: list[int] = []
LOOPED: set[int] = set()
BLOCKED_AT: list[tuple[str, int]] = []
"""The blocking line that the monitor of the process reported, and the group of its episode."""


class Generator:
    """Answers with the end token."""

    def __init__(self, end: int) -> None:
        self._end = end

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        await asyncio.sleep(0.001)
        return Completion(np.asarray([self._end]), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")


class Buffer:
    """Admits each group once, and ends the run after ``ends_after`` groups."""

    def __init__(self, ends_after: int) -> None:
        self.admitted, self.submitted, self.dropped = 0, 0, 0
        self._ends_after = ends_after
        self.failures: list[Failure] = []
        self.ended = asyncio.Event()

    async def admit_many(self, worker: str, limit: int, timeout_s: float) -> list[Ticket]:
        if self.admitted == GROUPS:
            await self.ended.wait()
            return []
        self.admitted += 1
        return [Ticket(self.admitted - 1, self.admitted - 1, AdmissionSteps(1))]

    async def submit_if_room(self, *groups: bytes) -> list[bool]:
        self.submitted += len(groups)
        self._check()
        return [True] * len(groups)

    async def drop(self, group_id: int, reason: str, tokens: int, attempt: int) -> None:
        self.dropped += 1
        self._check()

    async def note_failure(self, failure: Failure) -> None:
        self.failures.append(failure)

    def _check(self) -> None:
        if self.submitted + self.dropped == self._ends_after:
            self.ended.set()


async def forks(item: int, policy: Policy) -> float:
    """Both copies continue, wait, and return."""
    await policy.reply("a")
    os.fork()
    await policy.reply("b")
    return float(item)


async def prints(item: int, policy: Policy) -> float:
    await policy.reply("a")
    for _ in range(PRINTED // GROUPS // SIZE // 100):
        print("." * 99)
    return float(item)


async def leaks(item: int, policy: Policy) -> float:
    await policy.reply("a")
    LEFT_OPEN.extend(open(OPENED) for _ in range(5))  # noqa: SIM115  this is the fault
    return float(item)


async def leaks_at_once(item: int, policy: Policy) -> float:
    """Exhaust the descriptors within the first groups."""
    await policy.reply("a")
    LEFT_OPEN.extend(open(OPENED) for _ in range(150))  # noqa: SIM115  this is the fault
    return float(item)


async def calls_tools_that_hang(item: int, policy: Policy) -> float:
    def search() -> str:
        """Wait forever."""
        sys.modules[PROGRAM].HUNG.wait()  # not a copy that is sent
        return ""

    await policy.reply("a")
    await run_tools([ToolCall("search")], [search], deadline_s=0.01)
    return float(item)


async def stays(item: int, policy: Policy) -> float:
    """The first episodes still run when the run ends; closing their resources takes a while."""
    await policy.reply("a")
    try:
        if item == 0:
            await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.05)
        if item == 0:
            CLOSED.append(item)
    return float(item)


async def blocks(item: int, policy: Policy) -> float:
    """One episode blocks all others until a monitor reports it."""
    await policy.reply("a")
    if item == 0 and not BLOCKED_AT:
        seen = threading.Event()
        threading.Thread(target=look, args=[seen]).start()
        seen.wait(600)
    return float(item)


def look(seen: threading.Event) -> None:
    """From another thread, as a monitor does."""
    while not (report := own_report()).blocked_at or report.blocking_group is None:
        time.sleep(0.05)
    BLOCKED_AT.append((report.blocked_at, report.blocking_group))
    seen.set()


async def never_ends(item: int, policy: Policy) -> float:
    """One episode loops without an await; another one also catches every Exception."""
    await policy.reply("a")
    if item in (0, 1) and item not in LOOPED:
        LOOPED.add(item)
        if item == 0:
            while True:  # without an exception
                pass
        while True:
            with suppress(Exception):
                json.loads("[1, 2, 3]")
    return float(item)


FAULTS = (forks, prints, leaks, leaks_at_once, calls_tools_that_hang, stays, blocks, never_ends)
EPISODES = {function.__name__: function for function in FAULTS}


async def run_worker(fault: str, folder: str) -> dict[str, Any]:
    HUNG.clear()
    template = ChatTemplate(folder)
    task = Task(lambda cursor: cursor, EPISODES[fault])
    limit_s = DEADLINE_S if fault == "never_ends" else 300.0
    settings = RolloutSettings(concurrent_groups=2, group_size=SIZE, episode_deadline_s=limit_s)
    buffer = Buffer(GROUPS - (fault == "stays"))
    worker = RolloutWorker(settings, ByValue(task), folder, "rollout worker 0")
    handle: Any = LocalMesh([buffer])
    worker.connect(handle, Generator(template.stop_token_ids[0]), Resources(template, task, Scorer(1, 600.0)))  # type: ignore[arg-type]
    worker.guard_process()
    actor: Any = LocalMesh([worker])
    ended = ""
    try:
        await actor.run.call_one()
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    closed = len(CLOSED)
    HUNG.set()
    for thread in threading.enumerate():
        if thread.name == "tool":
            thread.join()
    while LEFT_OPEN:
        LEFT_OPEN.pop().close()
    stats = await actor.stats.call_one()
    await actor.close.call_one()
    return {
        "submitted": buffer.submitted,
        "failed": stats.failed,
        "failures": [asdict(failure) for failure in buffer.failures],
        "ended": ended,
        "closed": closed,
        "blocked_at": BLOCKED_AT[-1:],
    }


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    output = os.dup(1)  # a line of its own, whatever episodes print
    results = {fault: asyncio.run(run_worker(fault, sys.argv[1])) for fault in EPISODES}
    with suppress(ChildProcessError):
        while True:  # hangs if a forked copy is still alive
            os.wait()
    os.write(output, f"\n{json.dumps(results)}\n".encode())


if __name__ == "__main__":
    main()
