"""What the fork server runs for the trainer's tests: the program, and its arguments, of ``FORKED_PROGRAM``.

Output goes to the file ``FORKED_LOG``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence

from monarch_rl.runtime.lifetime import exit_code_of


def forked(_: Sequence[int] = ()) -> int:
    """Run the program as ``python PROGRAM ARGUMENTS...`` would; its exit code."""
    sys.argv = json.loads(os.environ["FORKED_PROGRAM"])
    log = os.open(os.environ["FORKED_LOG"], os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    return exit_code_of(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
