"""The processes of a run: their roles, CPU time, memory and growth.

A look takes a few milliseconds. CPU time that a process uses between the last look and its end is not counted.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

SHARED_MEMORY = Path("/dev/shm")
GOAL_MIB = 5.0
"""MiB by which a process may grow in 1,000 steps."""

MESHES = {
    "trainer": "trainer",
    "generator": "generator actor",
    "rollout": "rollout worker",
    "buffer": "buffer",
    "engine": "engine",
    "scorer": "scorer",
}
"""Roles by the beginning of a process's title, which for actors is the name of their mesh without its number."""
NOT_YET = ("other", "fork server", "stand-in")
"""Names that a process may have before it has its title, or before it starts without the fork server."""
TITLE = re.compile(r"([a-z]+)(\d*)(?:-(\d+))?( @ |$)")
"""Title of an actor's process: mesh, number of the mesh, rank in it, and the host."""


def name_of(title: str, command: list[str], environment: Mapping[str, str]) -> str:
    """Return the role of a process, with its number if there are several, such as ``trainer 1``. A controller cannot be
    recognised by its title: see :func:`named_in`.

    Args:
        title: name of the process; SGLang sets those of its processes, and overwrites their environment.
        command: its command line; for a forked process its title (``runtime/forking/fork_server.py``), such as
            ``monarch_rl::generator0-0 @ host``.
        environment: its environment, in which Monarch puts the name of the mesh, in the same form.
    """
    text = " ".join(command).strip()
    if title.startswith("sglang") or text.startswith("sglang::"):
        return "engine"
    if "fork_client" in text:
        return "stand-in"
    for part, name in (
        ("monarch_rl.runtime.supervisor", "supervisor"),
        ("monarch_rl.runtime.host", "host"),
        ("fork server", "fork server"),
        ("monarch_rl.runtime.forking.fork_server", "fork server"),
        ("resource_tracker", "resource tracker"),
    ):
        if part in text:
            return name
    _, _, forked = text.partition("monarch_rl::")
    found = TITLE.match(forked or environment.get("HYPERACTOR_PROCESS_NAME", ""))
    role = MESHES.get(found[1]) if found else None
    if found is None or role is None:
        return "other"
    if "spawn_main" in text:  # started by multiprocessing without the fork server
        return "scorer" if role == "rollout worker" else "other"
    number = found[2] or (found[3] if role == "trainer" else "")
    return f"{role} {number}" if number else role


def named_in(runs: Path, processes: Iterable[psutil.Process]) -> list[tuple[psutil.Process, str]]:
    """Return the processes of a run with their names, without processes that have just ended.

    Args:
        runs: parent of the run folder, which has the process id of its controller.
    """
    controllers = [json.loads(path.read_text())["pid"] for path in runs.glob("*/run.json")]
    found = list[tuple[psutil.Process, str]]()
    for process in processes:
        with suppress(psutil.Error, OSError):
            name = name_of(process.name(), process.cmdline(), process.environ())
            found.append((process, "controller" if process.pid in controllers else name))
    return found


def by_role(by_name: Mapping[str, float]) -> dict[str, float]:
    """Return the sums over the processes of each role, the largest first."""
    totals: defaultdict[str, float] = defaultdict(float)
    for name, value in by_name.items():
        totals[name.rstrip("0123456789 ")] += value
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


@dataclass
class Seen:
    """A process at the last look."""

    name: str = "other"
    cpu_s: float = 0.0
    running: bool = True


class ProcessTree:
    """The process ``pid``, which is called ``root``, and all its descendants, including ended ones."""

    def __init__(self, pid: int, root: str = "controller") -> None:
        self._root = psutil.Process(pid)
        self._seen = {self._root: Seen(root)}

    def look(self) -> None:
        """Record the processes that exist now; a descendant stays recorded even if it loses its parent."""
        for process in self._there():
            seen = self._seen.setdefault(process, Seen())
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    seen.cpu_s, seen.running = times.user + times.system, process.status() != psutil.STATUS_ZOMBIE
                    if process != self._root and seen.name in NOT_YET and (command := process.cmdline()):
                        seen.name = name_of(process.name(), command, process.environ())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                seen.running = False  # its CPU time at the last look counts

    def _there(self) -> set[psutil.Process]:
        found: set[psutil.Process] = set()
        for known in [known for known, seen in self._seen.items() if seen.running]:
            if known in found:
                continue
            try:
                found |= {known, *known.children(recursive=True)}
            except psutil.NoSuchProcess:
                self._seen[known].running = False
        return found

    def cpu_s(self) -> dict[str, float]:
        """Return CPU-seconds (user and system) up to the last look by name, the largest first."""
        totals: defaultdict[str, float] = defaultdict(float)
        for seen in self._seen.values():
            totals[seen.name] += seen.cpu_s
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def running(self) -> Iterator[tuple[psutil.Process, str]]:
        """The processes that ran at the last look, with their names."""
        return ((process, seen.name) for process, seen in self._seen.items() if seen.running)

    def memory(self) -> dict[str, int]:
        """Return the unique set size (USS) in bytes of the running processes, by name."""
        totals: defaultdict[str, int] = defaultdict(int)
        for process, name in self.running():
            try:
                totals[name] += process.memory_full_info().uss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it has just ended
        return dict(totals)


@dataclass(frozen=True)
class Look:
    """Resources of a process at one time."""

    step: int
    mib: float
    """MiB of its own memory, without files and shared memory."""
    descriptors: int
    threads: int


def look_at(pid: int, step: int) -> Look | None:
    """Return the current resources of a process, or None if it ends meanwhile."""
    folder = Path(f"/proc/{pid}")
    try:
        kib = re.search(r"^Anonymous:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
        descriptors, threads = (len(os.listdir(folder / what)) for what in ("fd", "task"))
    except OSError:
        return None
    return None if kib is None else Look(step, int(kib[1]) / 1024, descriptors, threads)


def growth(looks: Sequence[Look]) -> float:
    """Return MiB per 1,000 steps: the slope of a line through the second half; 0 within one step."""
    half = looks[len(looks) // 2 :]
    if half[-1].step == half[0].step:
        return 0.0
    return 1000 * float(np.polyfit([look.step for look in half], [look.mib for look in half], 1)[0])


def above_goal(slopes: Mapping[str, float]) -> str:
    """Return a sentence about the roles that grow by more than ``GOAL_MIB``."""
    over = [f"{role} {slope:.1f}" for role, slope in slopes.items() if slope > GOAL_MIB]
    return f"above {GOAL_MIB:g} MiB by 1,000 steps: {', '.join(over) or 'none'}"


def shared_inodes(pid: int) -> set[int]:
    """Return the inodes of the files in /dev/shm that a process has mapped now, because semaphores are mapped by other
    names; empty if it ends meanwhile."""
    try:
        return set(map(int, re.findall(r" (\d+) +/dev/shm/", Path(f"/proc/{pid}/maps").read_text())))
    except OSError:
        return set()


def sockets_of(pid: int) -> set[int]:
    """Return the inodes of the open sockets of a process; empty if it ends meanwhile."""
    found = set[int]()
    folder = Path(f"/proc/{pid}/fd")
    try:
        for descriptor in os.listdir(folder):
            with suppress(FileNotFoundError):  # it was closed meanwhile
                if socket := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(folder / descriptor)):
                    found.add(int(socket[1]))
    except OSError:
        return set()
    return found


def listening_sockets() -> set[int]:
    """Return the inodes of all listening TCP sockets of this machine."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {int(row[9]) for row in rows if row[3] == "0A"}


def shared_files(inodes: Iterable[int]) -> list[str]:
    """Return the files in /dev/shm with these inodes; the folder also has files of other programs."""
    wanted, found = set(inodes), list[str]()
    for path in SHARED_MEMORY.iterdir():
        try:
            if path.stat().st_ino in wanted:
                found.append(path.name)
        except FileNotFoundError:
            continue  # it has just been removed
    return found
