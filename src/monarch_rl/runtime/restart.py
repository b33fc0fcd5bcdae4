"""The restart policy: whether a run that has ended is restarted as a whole, and why not.

All three entries ask :func:`decide`. They differ in who starts the program again, and so in who counts:

    the supervisor (``runtime/supervisor.py``)      restarts its recipe, up to a limit without a newer checkpoint
    a recipe started by plain python                becomes its own supervisor after a loss (``pipeline/run_folder.py``)
    a recipe that torchrun has restarted            only decides whether it resumes (``pipeline/resume.py``):
                                                    ``--max-restarts`` has no exceptions, so torchrun counts

Replacing single processes of a running run is another subject (``pipeline/recovery.py``, ``pipeline/warm_restart.py``).
Imports nothing heavy, because the supervisor stays in memory for the whole run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from monarch_rl.errors import EpisodesFail, NotFinite, OutOfMemory

PERMANENT_ERRORS = (
    EpisodesFail,
    NotFinite,
    OutOfMemory,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)
"""Errors of a task, an objective or a setting, which another attempt would meet again. Any other error is attributed
to a lost process: when one is lost, the others fail in many ways."""

CHECKPOINT_NAME = re.compile(r"step-(\d+)$")
"""Names of complete checkpoints in a run's ``checkpoints/``, with their version (``checkpoint/folders.py``)."""


def newest_checkpoint(run: Path) -> str | None:
    """The name of a run's newest complete checkpoint."""
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    versions = {int(match[1]): match[0] for match in map(CHECKPOINT_NAME.match, names) if match}
    return versions[max(versions)] if versions else None


class Ending(Enum):
    """How a run, or an attempt at one, ended."""

    FINISHED = "finished"
    REFUSED = "refused"
    """It ended before there was a run: its settings were refused, or the recipe failed before it was launched."""
    FAILED = "failed"
    """By an error that another attempt would meet again, or by a signal to the recipe itself."""
    INTERRUPTED = "interrupted"
    """By a signal to the process that would restart it."""
    LOST = "lost"
    """By the loss of a process that it cannot do without, its controller included."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a run that has ended."""

    restart: bool
    reason: str = ""
    """Why it is not restarted, to continue "the run ..."."""
    restarts: int = 0
    """Restarts without a newer checkpoint, including this one."""


def ending_of(error: BaseException) -> Ending:
    """How a run ended that raised ``error``: LOST or FAILED."""
    error = raised_by_actor(error)
    resumable = isinstance(error, Exception) and not isinstance(error, PERMANENT_ERRORS)
    return Ending.LOST if resumable else Ending.FAILED


def raised_by_actor(error: BaseException) -> BaseException:
    """The exception that an actor raised, if Monarch has brought it here; otherwise ``error`` itself."""
    from monarch.actor import ActorError  # here, because the supervisor does without Monarch

    while isinstance(error, ActorError):
        error = error.exception
    return error


def decide(
    ending: Ending,
    *,
    checkpoint: str | None,
    previous: str | None = None,
    restarts: int = 0,
    limit: int | None = None,
    cause: str = "",
) -> Decision:
    """Whether a run that has ended is restarted: only after a loss, only from a checkpoint, and only a limited number
    of times without a newer one.

    Args:
        checkpoint: name of the run's newest checkpoint; None if it has none.
        previous: the same when the run was last started.
        restarts: restarts so far without a newer checkpoint than ``previous``.
        limit: maximum of them; None if the launcher counts restarts itself.
        cause: why the run ended, in words.
    """
    if ending is not Ending.LOST:
        reasons = {
            Ending.FINISHED: "has finished",
            Ending.REFUSED: "ended before it began",
            Ending.FAILED: f"would fail again: {cause}",
            Ending.INTERRUPTED: "was interrupted by a signal",
        }
        return Decision(False, reasons[ending])
    if checkpoint is None:
        return Decision(False, "has no checkpoint to resume from")
    if checkpoint != previous:
        restarts = 0
    if limit is not None and restarts >= limit:
        return Decision(False, f"has no restart left: {restarts} of {limit} without a newer checkpoint")
    return Decision(True, restarts=restarts + 1)
