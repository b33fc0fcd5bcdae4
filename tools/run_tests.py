"""Run the tests in two pytest processes side by side, because many of them wait for processes much of their time.

    python tools/run_tests.py            all tests: those of the recipes beside the others
    python tools/run_tests.py --quick    those that start no engine, no mesh and no ranks, and take under a minute

What the second process says is printed when the first has ended; then what the tests have cost. The exit code is 0 if
both passed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.costs import Cost, table  # noqa: E402

BESIDE = ["tests/recipe"]
"""Takes half of the time of all tests."""
BESIDE_QUICK = ["tests/simulate", "tests/generator", "tests/trainer", "tests/tools"]
"""Take half of the time of the quick ones."""
QUICK = ["-m", "not heavy and not slow"]
DEADLINE_S = 3 * 3600.0
"""Seconds for each of the two processes; each test has its own deadline."""
END_S = 90.0
"""Seconds that an interrupted process may take to end what its tests have started."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    beside, selected = (BESIDE_QUICK, QUICK) if quick else (BESIDE, [])
    for signum in (signal.SIGINT, signal.SIGTERM):  # a signal ignored here would be ignored by pytest, too
        signal.signal(signum, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as said:
        files = [Path(scratch) / name for name in ("others.json", "beside.json")]
        # In groups of their own: a Ctrl-C reaches them once, from here.
        others = start(*selected, f"--costs={files[0]}", *(f"--ignore={folder}" for folder in beside))
        second = start(*selected, f"--costs={files[1]}", *beside, stdout=said, stderr=subprocess.STDOUT)
        try:
            codes = [side.wait(DEADLINE_S) for side in (others, second)]
        finally:
            interrupt([side for side in (others, second) if side.poll() is None])
            said.seek(0)
            sys.stdout.write(said.read().decode(errors="replace"))
            print(*table(read(files)), sep="\n", flush=True)
    return codes[0] or codes[1]


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, process_group=0, **options)


def interrupt(sides: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let pytest end its tests' processes: they are in sessions of their own, and only pytest knows them."""
    for side in sides:
        side.send_signal(signal.SIGINT)
    for side in sides:
        try:
            side.wait(END_S)
        except subprocess.TimeoutExpired:
            side.kill()


def read(files: Sequence[Path]) -> dict[str, Cost]:
    """What each test has cost, by name; nothing from a process that did not come to its end."""
    return {name: Cost(*cost) for file in files if file.exists() for name, cost in json.loads(file.read_text()).items()}


if __name__ == "__main__":
    sys.exit(main())
