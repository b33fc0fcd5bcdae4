"""Program that tests run in forked processes: ``FORKED`` in the environment selects what it does."""

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
    """Write the state of the process to the file named by OUT, then do the action in FORKED."""
    seen = {
        "pid": os.getpid(),
        "folder": os.getcwd(),
        "preloaded": "tests.runtime.preloaded" in sys.modules,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "random": float(np.random.random()),
        "given": [os.read(descriptor, 100).decode() for descriptor in fds],
        "open": len(os.listdir("/proc/self/fd")),
        "group": os.getpgrp(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cores": sorted(os.sched_getaffinity(0)),
    }
    out = Path(os.environ["OUT"])
    out.with_suffix(".part").write_text(json.dumps(seen))
    out.with_suffix(".part").rename(out)
    action, _, number = os.environ["FORKED"].partition(" ")
    if action == "raise":
        raise RuntimeError("this process fails")
    if action == "exit":
        return int(number)
    if action == "signal":
        os.kill(os.getpid(), int(number))
    if action == "tidy":  # handle SIGTERM
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
