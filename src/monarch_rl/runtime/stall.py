"""From who waits for whom to a culprit: the chain of a stall, and the sentence that tells it.

Pure functions of a :class:`Picture`, which ``runtime/watch.py`` takes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from monarch_rl.runtime.lookout import Glimpse, ProcessState
from monarch_rl.runtime.presence import Wait

IDLE_SHARE = 0.05
"""Share of a core below which a process counts as doing nothing. One that only answers its lookout uses 0.01
to 0.03."""
CONTROLLER = "controller"
"""The recipe's own process, as it is called in waits. It waits for everybody, and only moves messages."""
OUTSIDE = ("the environment", "the disk", "the start of an engine")
"""What waits may be on that is no process of the run: they have deadlines of their own, and are no stall."""
LOST = ("zombie", "dead", "gone")
"""States of a process that is no more."""
ENDED = ("stopped", "tracing-stop", *LOST)
"""States from which a process does not go on by itself."""
LOST_FACTOR = 2.5
"""A lost process is Monarch's to report, within 2 s, or some 30 s on a crowded machine, and a lost generator costs
nothing but itself. Only a loss that goes unnoticed for longer, in units of ``silence_s``, is a stall."""


GROUP = re.compile(r"\bgroup \d+\b")
"""How waits speak of a group."""


@dataclass(slots=True, eq=False)
class Process:
    """A process of the run as it is known to the watch. Seconds are up to the time of the picture."""

    name: str
    pid: int | None = None
    machine: str = ""
    glimpse: Glimpse | None = None
    """The last thing it told."""
    silent_s: float = 0.0
    """Since it answered last; 0 for helpers, which are not asked."""
    state: ProcessState | None = None
    """None if nobody who answers can look at it."""
    ended_s: float = 0.0
    """Since it was first seen in one of the states :data:`ENDED`."""
    cpu_share: float = 0.0
    """Of a core, over the time without an answer that makes a culprit."""

    @property
    def waits(self) -> list[Wait]:
        return self.glimpse.waits if self.glimpse is not None else []

    @property
    def blocked_s(self) -> float:
        """Since an event loop of it turned last."""
        return self.glimpse.blocked_s if self.glimpse is not None else 0.0

    @property
    def works(self) -> bool:
        """Whether it uses the CPU."""
        return self.cpu_share >= IDLE_SHARE

    @property
    def lost(self) -> bool:
        """Whether it is no more."""
        return self.state is not None and self.state.status in LOST

    def unwell_s(self) -> float:
        """Seconds for which it has not been able to go on; 0 for one that is at work, however long that takes.

        A process that neither answers nor turns its loops but uses the CPU counts as at work: it may be in a long call.
        """
        if self.state is not None and self.state.status in ENDED:
            return max(self.ended_s, self.silent_s)
        return 0.0 if self.works else max(self.silent_s, self.blocked_s)

    def described(self, silence_s: float) -> str:
        """How it is, completing a sentence that begins with its name; ``silence_s``: what counts as no answer."""
        process = f"its process {self.pid}" if self.pid is not None else "its process"
        status = self.state.status if self.state is not None else None
        if self.glimpse is None and status in ENDED:  # helpers are not asked
            return f"has been {_plain(status)} for {self.ended_s:.0f} s (process {self.pid})"
        if self.silent_s >= silence_s or status in ENDED:
            seen = f"; {process} is {_plain(status)}"
            if status is None:
                seen = " and nobody on its machine answers who could look at it"
            elif status not in ENDED:
                seen += f" and uses {self.cpu_share:.0%} of a core"
            return f"stopped answering {self.silent_s:.0f} s ago{seen}"
        cpu = f"{process} uses {self.cpu_share:.0%} of a core"
        if self.blocked_s >= silence_s:
            return f"has blocked its event loop for {self.blocked_s:.0f} s; {cpu}"
        return f"waits for nobody; {cpu}" if not self.waits else f"answers; {cpu}"


@dataclass(slots=True)
class Picture:
    """All processes of a run at one time."""

    processes: dict[str, Process] = field(default_factory=dict)
    silence_s: float = 15.0
    """Seconds without an answer, or in a state that does not end by itself, that make a culprit."""

    def debtors(self, wait: Wait) -> list[Process]:
        """The processes that ``wait`` is on; none if it is on something outside the run, or on nobody in particular.

        ``on`` names one, or those of a kind in the plural (``"trainer ranks"``), or one whose helpers are several.
        """
        if wait.on in self.processes:
            return [self.processes[wait.on]]
        kinds = (f"{wait.on.removesuffix('s')} ", f"{wait.on} (")
        return [found for name, found in self.processes.items() if wait.on and name.startswith(kinds)]

    def culprits(self) -> list[Process]:
        """The processes that cannot go on, the one that is reached first from the trainer at the head."""
        reached = [link.process for link in self._reached()]
        rest = [process for process in self.processes.values() if process not in reached]
        limits = {True: LOST_FACTOR * self.silence_s, False: self.silence_s}
        return [process for process in reached + rest if process.unwell_s() >= limits[process.lost]]

    def chain(self) -> list[Link]:
        """Who waits for whom, from the trainer, or else the controller, to the first culprit.

        Without one it goes to where it ends: who waits for nobody, else who works, else as far as it goes.
        """
        reached = self._reached()
        culprits = self.culprits()
        wanted = [link for link in reached if link.process in culprits[:1]]
        if not wanted and culprits:  # nobody waits for it yet
            return [Link(culprits[0], None, None)]
        ends = [link for link in reached if not link.process.waits] or [link for link in reached if link.process.works]
        link: Link | None = next(iter(wanted or ends or reached[-1:]), None)
        chain: list[Link] = []
        while link is not None:
            chain.insert(0, link)
            link = link.before
        return chain

    def at_work(self) -> bool:
        """Whether somebody that the trainer waits for, directly or not, works, waits for something outside, or is lost,
        of which others will hear."""
        reached = [link.process for link in self._reached() if link.process.name != CONTROLLER]
        return any(
            process.works or process.lost or any(wait.on in OUTSIDE for wait in process.waits) for process in reached
        )

    def _off_the_track(self, before: Wait | None, wait: Wait) -> tuple[bool, bool]:
        """Sorts waits: first those for the group that ``before`` is for; those on one process before those on many."""
        group = GROUP.search(before.what) if before is not None else None
        return group is not None and group[0] not in GROUP.findall(wait.what), wait.on not in self.processes

    def _reached(self) -> list[Link]:
        """Every process that the trainer ranks or the controller wait for, once, by the shortest way, nearest first."""
        names = sorted(self.processes)
        ranks = [name for name in names if name.startswith("trainer rank ") and self.processes[name].waits]
        found: dict[str, Link] = {}
        # All that trainer ranks lead to comes first: the controller waits for nearly everybody.
        for roots in (ranks, [CONTROLLER]):
            open_ends = deque(Link(self.processes[name], None, None) for name in roots if name in self.processes)
            open_ends = deque(link for link in open_ends if link.process.name not in found)
            found |= {link.process.name: link for link in open_ends}
            while open_ends:
                link = open_ends.popleft()
                for wait in sorted(link.process.waits, key=partial(self._off_the_track, link.wait)):
                    for debtor in self.debtors(wait):
                        if debtor.name not in found:
                            found[debtor.name] = Link(debtor, wait, link)
                            open_ends.append(found[debtor.name])
        return list(found.values())


@dataclass(slots=True, eq=False)
class Link:
    """A process in a chain."""

    process: Process
    wait: Wait | None
    """Of the one before, which led here."""
    before: Link | None


def told(chain: Sequence[Link], silence_s: float) -> str:
    """The chain as one sentence: each wait with its seconds, and at the end how the last process is."""
    clauses = []
    for link in chain[1:]:
        assert link.wait is not None and link.before is not None
        clauses.append(_clause(link.wait, link.before.process))
    if chain:
        last = chain[-1].process
        clauses.append(f"{last.name} {last.described(silence_s)}")
    return "; ".join(clauses)


def listed(processes: Iterable[Process], silence_s: float) -> str:
    """Every process and its waits, a line each."""
    lines = []
    for process in processes:
        lines.append(f"{process.name} (process {process.pid}): {process.described(silence_s)}")
        lines += [f"    {_clause(wait, process)} [{wait.on or 'nobody in particular'}]" for wait in process.waits]
    return "\n".join(lines)


def _clause(wait: Wait, owner: Process) -> str:
    since = (owner.glimpse.now - wait.since if owner.glimpse is not None else 0.0) + owner.silent_s
    return f"{wait.owner} has waited {since:.0f} s for {wait.what}"


def _plain(status: str | None) -> str:
    return {"tracing-stop": "stopped by a debugger", "zombie": "dead"}.get(status or "", status or "gone")
