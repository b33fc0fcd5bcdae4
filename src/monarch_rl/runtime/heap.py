"""Python's collector of reference cycles, kept away from what never becomes garbage."""

from __future__ import annotations

import atexit
import gc


def freeze_heap() -> None:
    """Exempt all objects that exist now from garbage collection. Call it when a process is set up.

    Imports alone make hundreds of thousands of objects, which live as long as the process. Each full collection looks
    at all of them: that was more than half of the CPU time of a rollout worker.
    """
    gc.collect()  # what is garbage already, such as tensors that a set-up left in a cycle, must not stay forever
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # at the end objects are to go in the usual order, before their modules


def thaw_heap() -> None:
    """Undo :func:`freeze_heap`, where much of what it exempted was replaced. Not in a forked process: what its fork
    server has frozen shares its pages with that, and the next collection would copy them."""
    gc.unfreeze()


def leave_heap() -> None:
    """Collect nothing at the end of this process: what cycles hold goes with it. Call it early, before other functions
    are registered for the end, which then run before.

    The interpreter collects several times while it takes its modules apart: most of what the end of a controller took.
    """
    atexit.register(_leave)


def _leave() -> None:
    gc.freeze()
    gc.disable()
