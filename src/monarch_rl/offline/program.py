"""How a program of ``tools/`` begins and ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from monarch_rl.offline.parity import SideFailed


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` with one thread a process and exit with its code; with 2 and a line for what the user can mend."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # As for a host's processes: the tools of a virtual environment that is not activated (ninja) are found.
    os.environ["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), os.environ.get("PATH")]))
    try:
        sys.exit(main())
    except (ValueError, SideFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
