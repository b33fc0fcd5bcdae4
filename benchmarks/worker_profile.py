"""Where the CPU time of a rollout worker goes, by area, of a run that is under way on this machine.

    pip install py-spy                        # not in the lock
    python benchmarks/cpu_by_process.py --steps 100 &
    python benchmarks/worker_profile.py --seconds 20

Samples the event loop of the first rollout worker that is found; a sample counts for the innermost of its frames that
belongs to an area. Shares hold beside other work, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
from reporting import run_benchmark

TITLE = "monarch_rl::rollout"
AREAS = {
    "tokenizer and chat template": ("transformers/", "monarch_rl/model/"),
    "waits with deadlines": (
        "monarch_rl/runtime/deadline",
        "monarch_rl/runtime/wait_registry.py",
        "monarch_rl/runtime/starvation.py",
    ),
    "scores": ("monarch_rl/rollout/scor", "monarch_rl/rollout/process_limits.py", "monarch_rl/runtime/by_value.py"),
    "requests and answers": ("monarch_rl/generator/", "monarch_rl/runtime/persistent_c"),
    "packing of groups": ("monarch_rl/episode/",),
    "episodes and the worker": ("monarch_rl/rollout/", "monarch_rl/tasks/"),
}
"""Parts of file names, the first that fits counts."""
OTHER = "event loop"


@dataclass(frozen=True)
class Settings:
    """Profile of a rollout worker (see the top of this file)."""

    seconds: int = 20
    rate: int = 200
    """Samples a second."""
    pid: int = 0
    """Of the worker; 0 is the first that is found."""


def main(settings: Settings) -> None:
    pid = settings.pid or worker()
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder, "samples")
        sampling = ["-r", str(settings.rate), "-d", str(settings.seconds), "-f", "raw", "-o", str(samples)]
        subprocess.run(["py-spy", "record", "-p", str(pid), *sampling], check=True, capture_output=True)
        counted = count(samples.read_text().splitlines())
    total = counted.total()
    shares = {area: n / total for area, n in counted.most_common()}
    print(f"{total} samples of a working event loop, {total / settings.rate / settings.seconds:.0%} of a core")
    for area, share in shares.items():
        print(f"  {share:5.1%}  {area}")
    print(json.dumps({"benchmark": "worker_profile", **{area: round(share, 3) for area, share in shares.items()}}))


def worker() -> int:
    """The pid of a rollout worker on this machine."""
    for process in psutil.process_iter(["cmdline"]):
        if any(part.startswith(TITLE) for part in process.info["cmdline"] or []):
            return int(process.pid)
    sys.exit(f"no process of this machine is called {TITLE}: start a run first")


def count(lines: list[str]) -> Counter[str]:
    """Samples by area. A line has the frames of a sample, from the outermost on, and how often it was seen."""
    found: Counter[str] = Counter()
    for line in lines:
        stack, number = line.rsplit(" ", 1)
        frames = stack.split(";")
        if any("_run_once" in frame for frame in frames) and "select (" not in frames[-1]:
            found[area_of(frames)] += int(number)
    return found


def area_of(frames: list[str]) -> str:
    """The area of the innermost frame that has one."""
    for frame in reversed(frames):
        for area, parts in AREAS.items():
            if any(part in frame for part in parts):
                return area
    return OTHER


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
