"""Runs a command and measures the seconds of each step, and the CPU time of all its processes by part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from processes import ProcessTree, by_role

from monarch_rl.runtime.process import die_with_parent

POLL_S = 0.2
"""Interval in seconds of looks at a run. Marks of CPU time are late by at most this; the run itself times its steps."""
STOP_DEADLINE_S = 60.0
"""Deadline in seconds for a run to end its own processes."""


@dataclass(frozen=True)
class Measured:
    """One run of one side."""

    steps: list[dict[str, Any]]
    """Lines of ``metrics.jsonl`` that are steps."""
    cpu_s: dict[int, dict[str, float]]
    """CPU-seconds since the launch, by role, at the ends of the requested steps."""
    wall_s: dict[int, float]
    """Seconds since the launch at the ends of those steps."""
    total_s: float
    total_cpu_s: float
    others_cores: float
    """Mean number of cores used by other processes meanwhile; near 0 on a quiet machine."""


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """The steps in a ``metrics.jsonl`` anywhere under ``folder``; complete lines only."""
    found = sorted(folder.rglob("metrics.jsonl"))
    lines = found[0].read_text().split("\n")[:-1] if found else []
    return [row for row in map(json.loads, lines) if "time/step_s" in row]


def measure(
    command: list[str], variables: dict[str, str], folder: Path, root: str, marks: list[int], deadline_s: float
) -> Measured:
    """Run ``command``, which writes ``metrics.jsonl`` under ``folder``; record its CPU time after the steps ``marks``.

    Args:
        variables: environment variables, in addition to those of this process.
        root: role of the command's own process.
        deadline_s: deadline of the whole command in seconds.

    Raises:
        RuntimeError: the command failed, or took longer; with the end of its output, which is in ``folder/log``.
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
            preexec_fn=_end_with_driver,  # no run outlives the driver
        )
        try:
            tree = ProcessTree(process.pid, root)
            while process.poll() is None:
                if time.monotonic() - started > deadline_s:
                    raise RuntimeError(_failure(command, f"took over {deadline_s:g} s", log))
                done, due = len(steps_in(folder)), [mark for mark in marks if mark not in cpu_s]
                tree.look()
                usage = by_role(tree.cpu_s())
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
    """Return the CPU-seconds that this machine has been busy since it started."""
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
