"""Find the culprit of a stall: the chain of waits that leads to it, and the sentence that describes the chain.

Pure functions of a :class:`RunPicture`, which ``watch/process_poller.py`` creates.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from monarch_rl.runtime.device_work import GpuOperation
from monarch_rl.runtime.monitor import ProcessReport, ProcessState
from monarch_rl.runtime.wait_registry import CONTROLLER, Wait

IDLE_SHARE = 0.05
"""Share of a core below which a process counts as idle. A process in which only the monitor answers uses 0.01 to
0.03."""
STARVED_SHARE = 0.3
"""A process is starved if it was ready to run without a core for at least this share of the time, and used less than
:data:`IDLE_SHARE` of a core. The share is near 1 for a process with work to do, and lower if two take turns."""
TRAINER_RANK = "trainer rank "
"""Prefix of the names of trainer ranks."""
OUTSIDE = ("an episode's code", "the disk", "the start of an engine")
"""Values of ``Wait.on`` that are not processes of the run. Such waits have their own deadlines and are not stalls."""
LOST = ("zombie", "dead", "gone")
"""States of a process that has ended."""
NOT_RUNNING = ("stopped", "tracing-stop", *LOST)
"""States that a process does not leave on its own."""
LOST_FACTOR = 2.5
"""A loss counts as a stall only if it goes unnoticed for this many times ``silence_s``: Monarch reports a lost process
within 3 s, or within two minutes if it was just asking for its state, and the loss of a generator costs only itself."""

GROUP = re.compile(r"\bgroup \d+\b")
"""Name of a group in the descriptions of waits."""


@dataclass(slots=True, eq=False)
class Process:
    """The watch's data about a process of the run. Seconds are counted up to the time of the picture."""

    name: str
    pid: int | None = None
    machine: str = ""
    report: ProcessReport | None = None
    """Its last report."""
    silent_s: float = 0.0
    """Seconds since its last answer; 0 for helpers, which are not polled."""
    state: ProcessState | None = None
    """None if no monitor on its machine answers."""
    not_running_s: float = 0.0
    """Seconds since it was first seen in one of the states :data:`NOT_RUNNING`."""
    cpu_share: float = 0.0
    """Share of a core that it used over the last ``RunPicture.silence_s`` seconds."""
    queued_share: float = 0.0
    """Share of these seconds for which it was ready to run but had no core."""
    operation: GpuOperation | None = None
    """GPU operation in progress at its last report."""
    operation_s: float = 0.0
    """Seconds that the GPU operation has taken, excluding time for which the process was ready to run but had no
    core."""

    @property
    def waits(self) -> list[Wait]:
        return self.report.waits if self.report is not None else []

    @property
    def blocked_s(self) -> float:
        """Seconds since its slowest event loop last ran."""
        return self.report.blocked_s if self.report is not None else 0.0

    @property
    def uses_cpu(self) -> bool:
        """Whether it is at work rather than idle."""
        return self.cpu_share >= IDLE_SHARE

    @property
    def starved(self) -> bool:
        """Whether it is ready to use the CPU and hardly gets it: it waits for the machine, not for another process."""
        return not self.uses_cpu and self.queued_share >= STARVED_SHARE

    @property
    def device_hangs(self) -> bool:
        """Whether its GPU operation has exceeded its limit. CPU use does not show this: a thread that waits for a hung
        device uses a core, too."""
        return self.operation is not None and self.operation_s >= self.operation.limit_s

    @property
    def at_work(self) -> bool:
        """Whether it uses the CPU or is starved, and its device does not hang."""
        return (self.uses_cpu or self.starved) and not self.device_hangs

    @property
    def lost(self) -> bool:
        """Whether it has ended."""
        return self.state is not None and self.state.status in LOST

    @property
    def blocked_too_long(self) -> bool:
        """Whether an event loop has been blocked for longer than its actor allows. Time without a core is left out."""
        if self.report is None:
            return False
        blocked_s = (self.blocked_s + self.silent_s) * (1 - self.queued_share)
        return blocked_s >= self.report.block_limit_s

    def hung_s(self) -> float:
        """Seconds for which the process has been stopped or lost, or its device has hung, or it has been silent or
        blocked without being at work.

        A process that uses the CPU, or is ready to but has no core, is at work for any length of time, even if it does
        not answer and its event loops do not run, because it may be in a long call. The exceptions are a process whose
        GPU operation has exceeded its limit, and one whose event loop has been blocked for longer than its actor
        allows: a rollout worker's, by an episode's code.
        """
        if self.state is not None and self.state.status in NOT_RUNNING:
            return max(self.not_running_s, self.silent_s)
        if self.device_hangs:
            return self.operation_s
        if self.blocked_too_long:
            return self.blocked_s + self.silent_s
        return 0.0 if self.at_work else max(self.silent_s, self.blocked_s)

    def describe(self, silence_s: float) -> str:
        """The process's state; completes a sentence that begins with its name.

        Args:
            silence_s: seconds without an answer from which it counts as silent.
        """
        process = f"its process {self.pid}" if self.pid is not None else "its process"
        cpu = f"uses {self.cpu_share:.0%} of a core"
        if self.starved:
            cpu += f" and was ready to use one for {self.queued_share:.0%} of the time"
        status = self.state.status if self.state is not None else None
        if self.device_hangs and self.operation is not None and status not in NOT_RUNNING:
            late = f"has waited {self.operation_s:.0f} s for its device to end {self.operation.what}"
            return f"{late}, longer than the limit of {self.operation.limit_s:.0f} s; {process} {cpu}"
        if self.report is None and status in NOT_RUNNING:  # helpers are not polled
            return f"has been {_plain(status)} for {self.not_running_s:.0f} s (process {self.pid})"
        if self.silent_s >= silence_s or status in NOT_RUNNING:
            seen = f"; {process} is {_plain(status)}"
            if status is None:
                seen = " and no process on its machine answers that could inspect it"
            elif status not in NOT_RUNNING:
                seen += f" and {cpu}"
            return f"stopped answering {self.silent_s:.0f} s ago{seen}"
        if self.blocked_s >= silence_s:
            at = f" at {self.report.blocked_at}" if self.report is not None and self.report.blocked_at else ""
            return f"has blocked its event loop for {self.blocked_s:.0f} s{at}; {process} {cpu}"
        return f"waits for no process; {process} {cpu}" if not self.waits else f"answers; {process} {cpu}"


@dataclass(slots=True)
class RunPicture:
    """All processes of a run at one time."""

    processes: dict[str, Process] = field(default_factory=dict)
    silence_s: float = 15.0
    """Seconds without an answer, or in a state of :data:`NOT_RUNNING`, from which a process is a culprit."""

    def waited_on(self, wait: Wait) -> list[Process]:
        """The processes that ``wait`` is on; empty if it is on something outside the run, or on no single party.

        ``wait.on`` names one process, all of a kind in the plural (``"trainer ranks"``), or several helpers by the part
        of their names before the parenthesis.
        """
        if wait.on in self.processes:
            return [self.processes[wait.on]]
        kinds = (f"{wait.on.removesuffix('s')} ", f"{wait.on} (")
        return [process for name, process in self.processes.items() if wait.on and name.startswith(kinds)]

    def culprits(self) -> list[Process]:
        """The processes that cannot continue, the first one that the trainer's waits reach first.

        Processes with a hung device come last, because their devices may wait for one of the others. Among them, the
        one that has hung for longest comes first, because the other devices wait for it in NCCL.
        """
        reached = [link.process for link in self._reached()]
        rest = [process for process in self.processes.values() if process not in reached]
        limits = {True: LOST_FACTOR * self.silence_s, False: self.silence_s}
        found = [process for process in reached + rest if process.hung_s() >= limits[process.lost]]
        return sorted(found, key=lambda process: (process.device_hangs, -process.operation_s * process.device_hangs))

    def starved(self) -> list[Process]:
        """The starved processes, worst first."""
        starved = [process for process in self.processes.values() if process.starved]
        return sorted(starved, key=lambda process: -process.queued_share)

    def chain(self) -> list[WaitLink]:
        """The waits from the trainer, or else from the controller, to the first culprit.

        Without a culprit the chain ends at a process that is silent or blocked, although it is at work, else at one
        that waits for no other, else at one at work, else at the last one reached.
        """
        reached = self._reached()
        culprits = self.culprits()
        to_culprit = [link for link in reached if link.process in culprits[:1]]
        if not to_culprit and culprits:  # no process waits for it yet
            return [WaitLink(culprits[0], None, None)]
        # A blocked process does not notice that its own waits are over, so these lead to innocent ones.
        ends = [link for link in reached if max(link.process.silent_s, link.process.blocked_s) >= self.silence_s]
        ends = ends or [link for link in reached if not link.process.waits]
        ends = ends or [link for link in reached if link.process.at_work]
        link: WaitLink | None = next(iter(to_culprit or ends or reached[-1:]), None)
        chain: list[WaitLink] = []
        while link is not None:
            chain.insert(0, link)
            link = link.before
        return chain

    def at_work(self) -> bool:
        """Whether any process is starved, or the trainer waits, directly or not, for one that uses the CPU, waits for
        something outside the run, or is lost, which Monarch will report."""
        if self.starved():  # even if no process waits for it: it may have to forward a message
            return True
        reached = [link.process for link in self._reached() if link.process.name != CONTROLLER]
        return any(
            (process.uses_cpu and not process.device_hangs)
            or process.lost
            or any(wait.on in OUTSIDE for wait in process.waits)
            for process in reached
        )

    def recipe_waits(self) -> bool:
        """Whether the controller answers, and neither it nor any trainer rank waits: then the recipe's own code is busy
        or waiting between two calls of the run."""
        controller = self.processes.get(CONTROLLER)
        if controller is None or controller.report is None:
            return False
        ranks = [process for name, process in self.processes.items() if name.startswith(TRAINER_RANK)]
        return not any(process.waits for process in [controller, *ranks])

    def _order(self, before: Wait | None, wait: Wait) -> tuple[bool, bool]:
        """Sort key: waits for the same group as ``before`` come first; waits on one process before waits on several."""
        group = GROUP.search(before.what) if before is not None else None
        return group is not None and group[0] not in GROUP.findall(wait.what), wait.on not in self.processes

    def _reached(self) -> list[WaitLink]:
        """The trainer ranks that wait, the controller, and every process that they wait for, directly or not: each
        once, by its shortest chain, nearest first."""
        names = sorted(self.processes)
        ranks = [name for name in names if name.startswith(TRAINER_RANK) and self.processes[name].waits]
        links: dict[str, WaitLink] = {}
        # Trainer ranks first: the controller waits for nearly all processes.
        for roots in (ranks, [CONTROLLER]):
            queue = deque(WaitLink(self.processes[name], None, None) for name in roots if name in self.processes)
            queue = deque(link for link in queue if link.process.name not in links)
            links |= {link.process.name: link for link in queue}
            while queue:
                link = queue.popleft()
                for wait in sorted(link.process.waits, key=partial(self._order, link.wait)):
                    for process in self.waited_on(wait):
                        if process.name not in links:
                            links[process.name] = WaitLink(process, wait, link)
                            queue.append(links[process.name])
        return list(links.values())


@dataclass(slots=True, eq=False)
class WaitLink:
    """A process in a chain."""

    process: Process
    wait: Wait | None
    """The wait of the previous process on this one; None for the first of a chain."""
    before: WaitLink | None


def describe_chain(chain: Sequence[WaitLink], silence_s: float) -> str:
    """The chain as one sentence: each wait with its duration, then the state of the last process."""
    clauses = []
    for link in chain[1:]:
        assert link.wait is not None and link.before is not None
        clauses.append(_clause(link.wait, link.before.process))
    if chain:
        last = chain[-1].process
        clauses.append(f"{last.name} {last.describe(silence_s)}")
    return "; ".join(clauses)


def list_processes(processes: Iterable[Process], silence_s: float) -> str:
    """Every process and its waits, one line each."""
    lines = []
    for process in processes:
        lines.append(f"{process.name} (process {process.pid}): {process.describe(silence_s)}")
        lines += [f"    {_clause(wait, process)} [{wait.on or 'no single process'}]" for wait in process.waits]
    return "\n".join(lines)


def _clause(wait: Wait, process: Process) -> str:
    waited_s = (process.report.now - wait.since if process.report is not None else 0.0) + process.silent_s
    return f"{wait.waiter} has waited {waited_s:.0f} s for {wait.what}"


def _plain(status: str | None) -> str:
    return {"tracing-stop": "stopped by a debugger", "zombie": "dead"}.get(status or "", status or "gone")
