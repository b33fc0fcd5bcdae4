"""Run all tests: those of the recipes beside the others, because both wait for processes much of their time.

    python tools/run_tests.py

Two pytest processes; what the first one says is printed when the second has ended. The exit code is 0 if both passed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPES = "tests/recipe"
"""Takes half of the time of all tests."""
DEADLINE_S = 3 * 3600.0
"""Seconds for each of the two processes; each test has its own deadline."""
END_S = 90.0
"""Seconds that an interrupted process may take to end what its tests have started."""


def main() -> int:
    for signum in (signal.SIGINT, signal.SIGTERM):  # a signal ignored here would be ignored by pytest, too
        signal.signal(signum, signal.default_int_handler)
    with tempfile.TemporaryFile() as said:
        # In groups of their own: a Ctrl-C reaches them once, from here.
        others = start(f"--ignore={RECIPES}")
        recipes = start(RECIPES, stdout=said, stderr=subprocess.STDOUT)
        try:
            codes = [side.wait(DEADLINE_S) for side in (others, recipes)]
        finally:
            interrupt([side for side in (others, recipes) if side.poll() is None])
            said.seek(0)
            sys.stdout.write(said.read().decode(errors="replace"))
            sys.stdout.flush()
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


if __name__ == "__main__":
    sys.exit(main())
