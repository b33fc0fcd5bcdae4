"""What a process of a mesh runs: Monarch's own program for it, and a quick end.

It is forked by the host's fork server, with its imports behind it, or started by ``python -m``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from monarch_rl.runtime.process import end_quickly, exit_code_of, show_title

_PROGRAM = "monarch._src.actor.bootstrap_main"


def forked(_: Sequence[int] = ()) -> int:
    """Run until Monarch ends the process; its exit code."""
    sys.argv = [_PROGRAM]
    return exit_code_of(lambda: runpy.run_module(_PROGRAM, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    show_title(os.environ.get("HYPERACTOR_PROCESS_NAME", _PROGRAM))  # as a forked one's
    end_quickly(forked())
