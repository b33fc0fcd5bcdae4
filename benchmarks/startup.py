"""Seconds and CPU-seconds from the command to the first optimiser step, by process, and seconds of the end.

Starts the main job with few steps and reads the CPU time of every process below it, until the first step is in
``metrics.jsonl``. Prints the seconds at which the run folder existed (settings
checked, hosts up), the held-out items were evaluated, and the first step was done; then the seconds from the last
metrics to the end of each process, and until the model was saved. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from processes import ProcessTree
from reporting import run_benchmark, short

ROOT = Path(__file__).parents[1]
DEADLINE_S = 600.0
"""Deadline of a run in seconds."""
LOOK_S = 0.1
"""Interval in seconds of looks at the processes; CPU time after the last look at a process is not counted."""


@dataclass(frozen=True)
class Settings:
    """Cost of starting the main job (see the top of this file)."""

    command: tuple[str, ...] = (sys.executable, "recipes/grpo.py")
    """Command to run, without the arguments for steps and output."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the recipe."""
    steps: int = 2
    """Optimiser steps."""
    held_out: int = 16
    """Held-out items, evaluated before the first step."""


def measure(s: Settings, scratch: Path) -> dict[str, object]:
    """One run."""
    command = [*s.command, "--steps", str(s.steps), "--held-out", str(s.held_out), "--output", str(scratch)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, *s.arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    tree, log = ProcessTree(process.pid), scratch / "log"
    phases: dict[str, float] = {}
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    at_first_step: dict[str, float] = {}
    last_seen: dict[str, float] = {}
    last_output, ended = started, None
    with log.open("wb") as output:
        while ended is None or any(tree.running()):
            now = time.monotonic()
            if now - started > DEADLINE_S:
                process.terminate()
                raise RuntimeError(f"not done after {DEADLINE_S} s: {log.read_text()[-2000:]}")
            if text := process.stdout.read():
                output.write(text)
                output.flush()
                last_output = now
            _note_phases(scratch, phases, now - started)
            tree.look()
            last_seen |= dict.fromkeys((name for _, name in tree.running()), time.time())
            if "first step" in phases and not at_first_step:
                at_first_step = tree.cpu_s()
            if ended is None and process.poll() is not None:
                ended = time.monotonic()
            time.sleep(LOOK_S)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {log.read_text()[-3000:]}")
    logged = next(scratch.glob("*/metrics.jsonl")).stat().st_mtime
    for model in scratch.glob("*/model"):
        last_seen["(model saved)"] = model.stat().st_ctime
    return {
        "wall_s": phases,
        "cpu_s": at_first_step,
        "cpu_s_total": sum(at_first_step.values()),
        "end_s": time.monotonic() - last_output,
        "end_from_last_metrics_s": time.time() - logged,
        "end_by_process_s": dict(sorted(((name, at - logged) for name, at in last_seen.items()), key=itemgetter(1))),
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
    print(f"{'seconds, last metrics to the end':32}")
    for name, seconds in result["end_by_process_s"].items():  # type: ignore[attr-defined]
        print(f"  {name:30}{seconds:8.2f}")
    print(json.dumps({"benchmark": "startup", **short(result)}))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
