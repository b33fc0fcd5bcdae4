"""The program of each mesh process: Monarch's bootstrap program, followed by a quick exit.

The process is forked by the host's fork server, with its imports done, or started by ``python -m``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from monarch_rl.runtime.process import end_quickly, exit_code_of, print_as_titled, show_title

_PROGRAM = "monarch._src.actor.bootstrap_main"


def forked(_: Sequence[int] = ()) -> int:
    """Run until Monarch ends the process; returns the exit code."""
    sys.argv = [_PROGRAM]
    return exit_code_of(lambda: runpy.run_module(_PROGRAM, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    show_title(title := os.environ.get("HYPERACTOR_PROCESS_NAME", _PROGRAM))  # the title that a forked process gets
    print_as_titled(title)
    end_quickly(forked())
