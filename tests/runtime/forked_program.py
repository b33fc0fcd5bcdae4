"""What tests have the fork server run: ``FORKED`` in the environment says what the process does."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from monarch_rl.runtime.forking import fork_client


def forked(fds: Sequence[int]) -> int:
    """Write to the file named by OUT what the process sees, then do as FORKED says."""
    seen = {
        "pid": os.getpid(),
        "folder": os.getcwd(),
        "preloaded": "tests.runtime.preloaded" in sys.modules,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "draw": float(np.random.random()),
        "given": [os.read(descriptor, 100).decode() for descriptor in fds],
        "open": len(os.listdir("/proc/self/fd")),
        "group": os.getpgrp(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cores": sorted(os.sched_getaffinity(0)),
    }
    out = Path(os.environ["OUT"])
    out.with_suffix(".part").write_text(json.dumps(seen))
    out.with_suffix(".part").rename(out)
    what, _, number = os.environ["FORKED"].partition(" ")
    if what == "raise":
        raise RuntimeError("this process fails")
    if what == "exit":
        return int(number)
    if what == "signal":
        os.kill(os.getpid(), int(number))
    if what == "tidy":  # what SIGTERM is for
        signal.signal(signal.SIGTERM, tidy)
    time.sleep(600)
    return 0


def tidy(*_: object) -> None:
    """Leave a trace, and end."""
    Path(os.environ["OUT"]).with_suffix(".tidied").touch()
    os._exit(7)


def own() -> None:
    """Own a forked process until this one is killed."""
    fork_client.fork("small", "tests.runtime.forked_program")
    time.sleep(600)


if __name__ == "__main__":
    own()
