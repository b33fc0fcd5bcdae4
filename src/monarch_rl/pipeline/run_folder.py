"""The folder of a run over its launches: made or taken again, with what became of the run in ``run.json``."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monarch.actor import ActorError

from monarch_rl.checkpoint.folders import complete, write_whole
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.failures import EpisodesFail
from monarch_rl.runtime import folder_lock, supervisor
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, on_disk_now
from monarch_rl.runtime.devices import launched_by_torchrun
from monarch_rl.runtime.process import signal_name
from monarch_rl.runtime.signals import Interrupts
from monarch_rl.weights.checksum import NotFinite

logger = logging.getLogger("monarch_rl")

SETTINGS, STATE, BEST = "settings.json", "run.json", "best.json"
NO_JOB = "none"
"""What torchrun calls each job on several machines that is given no id."""
ENDS_FOR_GOOD = (EpisodesFail, NotFinite, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Errors of a task, an objective or a setting, which another attempt would meet again. What else ends a run is taken
for the loss of a process: the others fail in many ways when one is lost."""


def recipe_name() -> str:
    """How the names of this recipe's runs begin."""
    return Path(sys.argv[0]).stem or "run"


def new_folder(output: Path) -> Path:
    """Make the folder of a new run. Raises OSError."""
    folder = output / f"{recipe_name()}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder.resolve()


@contextmanager
def noted(folder: Path, interrupts: Interrupts) -> Iterator[None]:
    """Say in the folder that the run is under way while the block runs, and then what became of it."""
    global _run_of_this_process
    _run_of_this_process = folder
    note_state(folder, "running", goes_on=True)
    try:
        yield
    except BaseException as error:
        reason = interrupts.reason or error
        interrupted = interrupts.received is not None and interrupts.reason is None
        goes_on = not interrupted and may_resume(reason)
        cause = signal_name(interrupts.received or 0) if interrupted else _said(reason)
        note_state(folder, "interrupted" if interrupted else "failed", cause, goes_on)
        raise
    else:
        note_state(folder, "finished")
    finally:
        folder_lock.release(folder)  # what this process starts again is another one


@contextmanager
def going_on_after_a_loss(restarts: int) -> Iterator[None]:
    """If a run in the block fails, may go on and has a checkpoint, start this program again, which goes on with it, and
    end with its exit code. Not where others do that, or under torchrun.

    Args:
        restarts: without a newer checkpoint; 0 is never.
    """
    try:
        yield
    except Exception as error:
        run = _run_of_this_process
        started_again = supervisor.NOTES in os.environ or launched_by_torchrun()
        if not restarts or run is None or started_again or not may_resume(error) or not complete(run / "checkpoints"):
            raise
        traceback.print_exc()
        program = [sys.executable, *sys.orig_argv[1:]]
        sys.exit(supervisor.Supervisor(program, restarts).run(run, _said(error)))


_run_of_this_process: Path | None = None


def may_resume(error: BaseException) -> bool:
    """Whether a run that this error ended may be resumed by itself."""
    while isinstance(error, ActorError):
        error = error.exception
    return isinstance(error, Exception) and not isinstance(error, ENDS_FOR_GOOD)


def note_state(run: Path, state: str, cause: str = "", goes_on: bool = False) -> None:
    """Write ``run.json``.

    Args:
        state: ``running``, ``finished``, ``failed`` or ``interrupted``.
        cause: of the last two.
        goes_on: it may be resumed by itself.
    """
    supervisor.note(run, cause=cause, goes_on=goes_on)
    try:
        values = {"state": state, "cause": cause, "goes_on": goes_on, "pid": os.getpid(), "launcher": launcher()}
        text = json.dumps(values | {"time": time.time()}) + "\n"
        # With a deadline: the run's processes are held until it returns.
        on_disk_now(CALL_DEADLINE_S, f"{run / STATE}", write_whole, run / STATE, text)
    except OSError as error:
        logger.error("%s cannot be written (%s)", run / STATE, error)


def read_state(run: Path) -> dict[str, Any]:
    """What :func:`note_state` wrote; empty if nothing can be read."""
    try:
        values: dict[str, Any] = json.loads((run / STATE).read_text())
        return values
    except (OSError, ValueError):
        return {}


def launcher() -> str | list[float]:
    """Who started this process, and would start it again: the id of torchrun's job (``--rdzv-id``, which torchrun makes
    up on one machine), or else the process that did: its pid and when it began."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", NO_JOB)
    if launched_by_torchrun() and job not in ("", NO_JOB):
        return job
    parent = os.getppid()
    try:
        began = float(Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError):
        began = 0.0
    return [parent, began]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {last_line(error)}"
