"""CPU time of a rollout worker by area, for a run in progress on this machine.

    pip install py-spy                        # not in the lock
    python benchmarks/cpu_by_process.py --steps 100 &
    python benchmarks/worker_profile.py --seconds 20

Samples the event loop of the first rollout worker that is found; a sample counts for its innermost frame that belongs
to an area. Shares are also meaningful on a busy machine.
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
"""Areas with parts of file names; the first match counts."""
OTHER = "event loop"


@dataclass(frozen=True)
class Settings:
    """Profile of a rollout worker (see the top of this file)."""

    seconds: int = 20
    rate: int = 200
    """Samples a second."""
    pid: int = 0
    """Process id of the worker; 0 uses the first one that is found."""


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
    """Return the process id of a rollout worker on this machine."""
    for process in psutil.process_iter(["cmdline"]):
        if any(part.startswith(TITLE) for part in process.info["cmdline"] or []):
            return int(process.pid)
    sys.exit(f"no process {TITLE} on this machine: start a run first")


def count(lines: list[str]) -> Counter[str]:
    """Return the samples by area. A line has the frames of a sample, outermost first, and their number of samples."""
    found: Counter[str] = Counter()
    for line in lines:
        stack, number = line.rsplit(" ", 1)
        frames = stack.split(";")
        if any("_run_once" in frame for frame in frames) and "select (" not in frames[-1]:
            found[area_of(frames)] += int(number)
    return found


def area_of(frames: list[str]) -> str:
    """Return the area of the innermost frame that has one."""
    for frame in reversed(frames):
        for area, parts in AREAS.items():
            if any(part in frame for part in parts):
                return area
    return OTHER


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
