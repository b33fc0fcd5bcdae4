"""Run the tests in groups, two pytest processes at a time, because many tests wait for processes much of their time.

    python tools/run_tests.py                  all tests
    python tools/run_tests.py --quick          short ones that start no engine, no mesh and no ranks, three at a time
    python tools/run_tests.py --at-a-time 3    three processes

The longest group begins first, and the next one when a process has ended. What a process said is printed when it has
ended; at last what the groups have taken and the tests have cost. The exit code is 0 if all groups passed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.costs import Cost, table  # noqa: E402

GROUPS = [
    ["tests/recipe/test_recipe.py", "tests/recipe/test_losses.py"],
    ["tests/pipeline"],
    ["tests/generator"],
    ["tests/recipe"],
    ["tests/trainer"],
    ["tests/runtime", "tests/rollout"],
    ["tests"],
]
"""Longest first. Each has what is named in it and in none before it; the last one has all that is left."""
QUICK_GROUPS = [
    ["tests/rollout", "tests/runtime"],
    ["tests/buffer", "tests/tools"],
    ["tests/recipe"],
    ["tests"],
]
QUICK = ["-m", "not heavy and not slow"]
AT_A_TIME = 2
QUICK_AT_A_TIME = 3
"""The first group waits for more than half of its time."""
DEADLINE_S = 3 * 3600.0
"""Seconds for all; each test has its own deadline."""
END_S = 90.0
"""Seconds that an interrupted process may take to end what its tests have started."""


@dataclass
class Group:
    """A pytest process that runs."""

    paths: list[str]
    process: subprocess.Popen[bytes]
    said: Path
    started: float
    """On ``time.monotonic()``."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    help = f"pytest processes (default {AT_A_TIME}, with --quick {QUICK_AT_A_TIME})"
    parser.add_argument("--at-a-time", type=int, choices=range(1, 9), help=help)
    asked = parser.parse_args()
    groups = QUICK_GROUPS if asked.quick else GROUPS
    at_a_time = asked.at_a_time or (QUICK_AT_A_TIME if asked.quick else AT_A_TIME)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a signal ignored here would be ignored by pytest, too
        signal.signal(signum, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        waiting = list(zip(groups, commands(groups, QUICK if asked.quick else [], Path(scratch)), strict=True))
        running: list[Group] = []
        codes: list[int] = []
        took = ["   seconds  group"]
        deadline = time.monotonic() + DEADLINE_S
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    running.append(start(*waiting.pop(0), Path(scratch, f"{len(waiting)}.log")))
                time.sleep(0.1)
                for group in [group for group in running if group.process.poll() is not None]:
                    running.remove(group)
                    codes.append(group.process.returncode)
                    took.append(f"{time.monotonic() - group.started:10.1f}  {' '.join(group.paths)}")
                    show(group)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the tests have taken more than {DEADLINE_S:g} s")
        finally:
            interrupt(running)
            print(*took, *table(read(Path(scratch))), sep="\n", flush=True)
    return next((code for code in codes if code), 0)


def commands(groups: Sequence[list[str]], selected: list[str], scratch: Path) -> list[list[str]]:
    """The arguments of pytest for each group. A later group leaves out what an earlier one has."""
    found: list[list[str]] = []
    before: list[str] = []
    for number, paths in enumerate(groups):
        ignored = [f"--ignore={path}" for path in before if path not in paths]
        found.append([*selected, f"--costs={scratch / f'{number}.json'}", *ignored, *paths])
        before += paths
    return found


def start(paths: list[str], arguments: list[str], said: Path) -> Group:
    """Start pytest in a group of its own: a Ctrl-C reaches it once, from here. What it says goes to ``said``."""
    command = [sys.executable, "-m", "pytest", *arguments]
    with said.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, process_group=0, stdout=output, stderr=subprocess.STDOUT)
    return Group(paths, process, said, time.monotonic())


def show(group: Group) -> None:
    """Print what a process said, which has ended."""
    print(group.said.read_text(errors="replace"), flush=True)


def interrupt(groups: Sequence[Group]) -> None:
    """Let pytest end its tests' processes: they are in sessions of their own, and only pytest knows them."""
    for group in groups:
        group.process.send_signal(signal.SIGINT)
    for group in groups:
        try:
            group.process.wait(END_S)
        except subprocess.TimeoutExpired:
            group.process.kill()
        show(group)


def read(folder: Path) -> dict[str, Cost]:
    """What each test has cost, by name; nothing from a process that did not come to its end."""
    return {
        name: Cost(*cost)
        for file in sorted(folder.glob("*.json"))
        for name, cost in json.loads(file.read_text()).items()
    }


if __name__ == "__main__":
    sys.exit(main())
