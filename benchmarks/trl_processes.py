"""A command and all processes below it: how long each step took, and what CPU time by part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from monarch_rl.runtime.lifetime import die_with_parent

POLL_S = 0.2
"""Seconds between two looks at a run. A mark of CPU time is late by at most that; times of steps are the run's own."""
STOP_DEADLINE_S = 60.0
"""Seconds that a run may take to end its own processes."""


def part_of(name: str, command: list[str], environment: dict[str, str]) -> str:
    """Which part of a system a process is.

    Args:
        name: of the process; SGLang's are named so by SGLang, which also overwrites their environment.
        command: its command line; in a forked process its title (``runtime/fork_server.py``), such as
            ``monarch_rl::generator0-0 @ host``.
        environment: Monarch puts the name of the mesh into it, in the same form.
    """
    if name.startswith("sglang"):
        return "engines"
    text = " ".join(command).strip()
    if "monarch_rl.runtime.host" in text:
        return "host"
    if "fork server" in text or "monarch_rl.runtime.fork_server" in text or "fork_client" in text:
        return "fork servers"
    _, _, title = text.partition("monarch_rl::")
    mesh = (title or environment.get("HYPERACTOR_PROCESS_NAME", "")).split("-")[0].rstrip("0123456789")
    if "resource_tracker" in text:
        return "helpers"
    if "spawn_main" in text:  # started by multiprocessing without the fork server
        return "scorers" if mesh == "rollout" else "helpers"
    parts = {
        "trainer": "trainer",
        "generator": "generator actors",
        "rollout": "rollout worker",
        "buffer": "buffer",
        "scorer": "scorers",
    }
    return parts.get(mesh, "helpers")


class ProcessTree:
    """CPU-seconds of the process ``pid`` (called ``root``) and of all below it, those that have ended included."""

    def __init__(self, pid: int, root: str) -> None:
        self._process, self._root = psutil.Process(pid), root
        self._parts: dict[tuple[int, float], str] = {}
        self._cpu_s: dict[tuple[int, float], float] = {}

    def read(self) -> dict[str, float]:
        """CPU-seconds so far, by part."""
        try:
            there = [self._process, *self._process.children(recursive=True)]
        except psutil.NoSuchProcess:
            there = []
        for process in there:
            self._add(process)
        total: defaultdict[str, float] = defaultdict(float)
        for key, seconds in self._cpu_s.items():
            total[self._parts[key]] += seconds
        return dict(total)

    def _add(self, process: psutil.Process) -> None:
        try:
            with process.oneshot():
                key, times = (process.pid, process.create_time()), process.cpu_times()
                # A process that has just been forked is not yet what it will be.
                if self._parts.get(key, "helpers") == "helpers":
                    known = part_of(process.name(), process.cmdline(), process.environ())
                    self._parts[key] = self._root if process == self._process else known
            self._cpu_s[key] = times.user + times.system
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return  # it has ended: what it had used at the last look counts


@dataclass(frozen=True)
class Measured:
    """One run of one side."""

    steps: list[dict[str, Any]]
    """Lines of ``metrics.jsonl`` that are steps."""
    cpu_s: dict[int, dict[str, float]]
    """CPU-seconds since the launch, by part, at the ends of the steps that were asked for."""
    wall_s: dict[int, float]
    """Seconds since the launch at the ends of those steps."""
    total_s: float
    total_cpu_s: float
    others_cores: float
    """Cores that other processes were busy on meanwhile, on average. On a quiet machine it is near 0."""


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """The steps in the ``metrics.jsonl`` somewhere under ``folder``; complete lines only."""
    found = sorted(folder.rglob("metrics.jsonl"))
    lines = found[0].read_text().split("\n")[:-1] if found else []
    return [row for row in map(json.loads, lines) if "time/step_s" in row]


def measure(
    command: list[str], variables: dict[str, str], folder: Path, root: str, marks: list[int], deadline_s: float
) -> Measured:
    """Run ``command``, which writes ``metrics.jsonl`` under ``folder``; note its CPU time after the steps ``marks``.

    Args:
        variables: of the environment, beside this process's own.
        root: name of the part that the command's own process is.
        deadline_s: seconds that all of it may take.

    Raises:
        RuntimeError: it failed, or took longer; with the end of its output, which is in ``folder/log``.
    """
    cpu_s: dict[int, dict[str, float]] = {}
    wall_s: dict[int, float] = {}
    usage: dict[str, float] = {}
    log, started, busy_s = folder / "log", time.monotonic(), _machine_busy_s()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            preexec_fn=_end_with_driver,  # however the driver ends, no run stays behind
        )
        try:
            tree = ProcessTree(process.pid, root)
            while process.poll() is None:
                if time.monotonic() - started > deadline_s:
                    raise RuntimeError(_failure(command, f"took over {deadline_s:g} s", log))
                done, due = len(steps_in(folder)), [mark for mark in marks if mark not in cpu_s]
                usage = tree.read()
                for mark in due:
                    if done >= mark:
                        cpu_s[mark], wall_s[mark] = usage, time.monotonic() - started
                time.sleep(POLL_S)
        finally:
            end(process)
    if process.returncode:
        raise RuntimeError(_failure(command, f"failed with exit code {process.returncode}", log))
    if missing := [mark for mark in marks if mark not in cpu_s]:
        raise RuntimeError(_failure(command, f"ended before its steps {missing} were seen", log))
    total_s, total_cpu_s = time.monotonic() - started, sum(usage.values())
    others = max(0.0, _machine_busy_s() - busy_s - total_cpu_s) / total_s
    return Measured(steps_in(folder), cpu_s, wall_s, total_s, total_cpu_s, others)


def _machine_busy_s() -> float:
    """CPU-seconds that this machine has been busy since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + times.irq + times.softirq)


def _end_with_driver() -> None:
    die_with_parent(signal.SIGTERM)


def end(process: subprocess.Popen[Any]) -> None:
    """Ask a command that still runs to end, and kill it if it does not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(command: list[str], what: str, log: Path) -> str:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    return f"{' '.join(command)} {what}:\n{tail}"
