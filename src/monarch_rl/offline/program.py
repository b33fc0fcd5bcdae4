"""Entry point of the programs in ``tools/``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from monarch_rl.errors import SideFailed


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` with one thread per process and exit with its code; with 2 and a one-line error if the user can fix
    the problem; quietly if what reads the output has ended (``| head``)."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # As for a host's processes, so that programs of a virtual environment that is not activated (ninja) are found.
    os.environ["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), os.environ.get("PATH")]))
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes the stream once more
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, SideFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
