"""Run by fork servers in tests: executes the program and arguments in ``FORKED_PROGRAM``.

Its output goes to the files ``FORKED_OUT`` and ``FORKED_ERR``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence

from monarch_rl.runtime.process import exit_code_of


def forked(_: Sequence[int] = ()) -> int:
    """Run the program as ``python PROGRAM ARGUMENTS...`` would; its exit code."""
    sys.argv = json.loads(os.environ["FORKED_PROGRAM"])
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    for stream, name in ((1, "FORKED_OUT"), (2, "FORKED_ERR")):
        file = os.open(os.environ[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, stream)
        os.close(file)
    return exit_code_of(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
