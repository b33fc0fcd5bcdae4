"""Run all tests: those of the recipes beside the others, as both wait for processes much of their time.

    python tools/run_tests.py

Two pytest processes; what the first one says is printed when the second has ended. The exit code is 0 if both passed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = "tests/recipe"
"""Half of the time of all tests."""
DEADLINE_S = 3 * 3600.0
"""Seconds that the first one may go on after the second: each test has a deadline of its own."""


def main() -> int:
    pytest = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryFile() as said:
        recipes = subprocess.Popen([*pytest, RECIPES], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            others = subprocess.run([*pytest, f"--ignore={RECIPES}"], cwd=ROOT, check=False).returncode
            code = recipes.wait(DEADLINE_S)
        finally:
            recipes.kill()
            said.seek(0)
            sys.stdout.write(said.read().decode(errors="replace"))
            sys.stdout.flush()
    return others or code


if __name__ == "__main__":
    sys.exit(main())
