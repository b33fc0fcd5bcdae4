"""Start-up: seconds and CPU-seconds from the command to the first optimiser step, by process, and the end's seconds.

Starts the main job with few steps and reads the CPU time of every process below it, until the first step is in
``metrics.jsonl``; "ended" are those that have ended before. Prints the seconds at which the run's folder was there
(settings checked, hosts up), the held-out items were played, and the first step was done; then the seconds from the
last metrics to the end of the last process. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil
from reporting import run_benchmark, short

ROOT = Path(__file__).parents[1]
DEADLINE_S = 600.0
"""Seconds that one run may take."""
LOOK_S = 0.1
"""Seconds between two looks at the processes; what a process uses between the last look and its end is not seen."""


@dataclass(frozen=True)
class Settings:
    """Start the main job and count what that costs (see the top of this file)."""

    command: tuple[str, ...] = (sys.executable, "recipes/grpo.py")
    """What is run, without the arguments that set steps and output."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the recipe."""
    steps: int = 2
    """Optimiser steps."""
    held_out: int = 16
    """Held-out items, played before the first step."""


class Watcher:
    """CPU-seconds of every process below ``root``, by pid."""

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self.names: dict[int, str] = {}
        self.used: dict[int, float] = {}
        self.alive: set[int] = set()

    def look(self) -> None:
        self.alive = set()
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            processes = []
        for process in processes:
            try:
                with process.oneshot():
                    times, name = process.cpu_times(), _name(process)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        self.alive.add(process.pid)
            except psutil.NoSuchProcess:
                continue
            self.used[process.pid] = times.user + times.system
            if name is not None:
                self.names[process.pid] = name

    def by_name(self) -> dict[str, float]:
        """CPU-seconds so far: of each process that runs, and of all that have ended."""
        totals: dict[str, float] = defaultdict(float)
        for pid, seconds in self.used.items():
            totals[self.names.get(pid, "unnamed") if pid in self.alive else "ended"] += seconds
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _name(process: psutil.Process) -> str | None:
    """What a process is called: by its title, or by what its command line says."""
    line = process.cmdline()
    if not line:
        return None
    if "::" in line[0]:
        return line[0].split(" @")[0]
    called = process.environ().get("HYPERACTOR_PROCESS_NAME", "").split(" ")[0]
    if any("fork_client" in word for word in line):
        return "stand-ins"
    known = {"recipes/": "controller", "runtime.host": "host", "runtime.fork_server": "fork server"}
    for word, name in (known | {"resource_tracker": "resource trackers"}).items():
        if any(word in argument for argument in line):
            return name
    return called or line[0]


def measure(s: Settings, scratch: Path) -> dict[str, object]:
    """One run."""
    command = [*s.command, "--steps", str(s.steps), "--held-out", str(s.held_out), "--output", str(scratch)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, *s.arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    watcher, log = Watcher(process.pid), scratch / "log"
    phases: dict[str, float] = {}
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    at_first_step: dict[str, float] = {}
    last_output, ended = started, None
    with log.open("wb") as output:
        while ended is None or watcher.alive:
            now = time.monotonic()
            if now - started > DEADLINE_S:
                process.terminate()
                raise RuntimeError(f"not done after {DEADLINE_S} s: {log.read_text()[-2000:]}")
            if text := process.stdout.read():
                output.write(text)
                output.flush()
                last_output = now
            _note_phases(scratch, phases, now - started)
            watcher.look()
            if "first step" in phases and not at_first_step:
                at_first_step = watcher.by_name()
            if ended is None and process.poll() is not None:
                ended = time.monotonic()
            time.sleep(LOOK_S)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {log.read_text()[-3000:]}")
    saved = next(scratch.glob("*/metrics.jsonl")).stat().st_mtime
    return {
        "wall_s": phases,
        "cpu_s": at_first_step,
        "cpu_s_total": sum(at_first_step.values()),
        "end_s": time.monotonic() - last_output,
        "end_from_last_metrics_s": time.time() - saved,
        "traceback": "Traceback" in log.read_text(),
        "log": log.read_text(),
    }


def _note_phases(scratch: Path, phases: dict[str, float], now: float) -> None:
    for settings in scratch.glob("*/settings.json"):
        phases.setdefault("folder", now)
        metrics = settings.with_name("metrics.jsonl")
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        for line in lines:
            values = json.loads(line)
            phases.setdefault("first step" if "time/step_s" in values else "held-out items played", now)


def main(s: Settings) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(s, Path(scratch))
    print(result.pop("log"))
    print(f"{'CPU-seconds to the first step':32}")
    for name, seconds in result["cpu_s"].items():  # type: ignore[attr-defined]
        print(f"  {name:30}{seconds:8.2f}")
    print(json.dumps({"benchmark": "startup", **short(result)}))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
