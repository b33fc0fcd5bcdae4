"""The folder of a run, and the run's state in its ``run.json``: running, finished, failed or interrupted."""

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

from monarch_rl.checkpoint.folders import write_whole
from monarch_rl.errors import SettingsError
from monarch_rl.observe.console_relay import end_relay
from monarch_rl.observe.lines import read_object
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.runtime import folder_lock, supervisor
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, on_disk_now
from monarch_rl.runtime.devices import launched_by_torchrun
from monarch_rl.runtime.process import signal_name
from monarch_rl.runtime.restart import Ending, decide, ending_of, newest_checkpoint
from monarch_rl.runtime.signals import Interrupts

logger = logging.getLogger("monarch_rl")

SETTINGS, STATE, BEST = "settings.json", "run.json", "best.json"
SAVED = "model"
"""Folder of a run's last saved model, in the run's folder."""
ERROR = "error.txt"
"""Traceback of an error of which the console shows the message only."""
STATE_FIELDS = {"state": str, "cause": str, "goes_on": bool}
NO_JOB = "none"
"""torchrun's id for jobs on several machines that were given none."""


def recipe_name() -> str:
    """Prefix of the names of this recipe's run folders."""
    return Path(sys.argv[0]).stem or "run"


def new_folder(output: Path) -> Path:
    """Create the folder of a new run. Raises OSError."""
    folder = output / f"{recipe_name()}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder.resolve()


@contextmanager
def recording_state(folder: Path, interrupts: Interrupts) -> Iterator[None]:
    """Record in the run's folder that the run is running during the block, and how it ended after the block."""
    global _run_of_this_process
    _run_of_this_process = folder
    note_state(folder, "running", goes_on=True)
    try:
        yield
    except BaseException as error:
        reason = interrupts.reason or error
        interrupted = interrupts.received is not None and interrupts.reason is None
        goes_on = not interrupted and ending_of(reason) is Ending.LOST
        cause = signal_name(interrupts.received or 0) if interrupted else _describe(reason)
        note_state(folder, "interrupted" if interrupted else "failed", cause, goes_on)
        raise
    else:
        note_state(folder, "finished")
    finally:
        folder_lock.release(folder)  # a program that this process restarts has to take the lock


@contextmanager
def restarting_after_loss(restarts: int) -> Iterator[None]:
    """If a run in the block fails and the policy (``runtime/restart.py``) allows it, restart this program so that it
    resumes the run, and exit with its exit code. Does nothing under a supervisor or torchrun, which restart the program
    themselves.

    Args:
        restarts: restarts without a newer checkpoint in between; 0 is never.
    """
    try:
        yield
    except Exception as error:
        run = _run_of_this_process
        restarted_by_others = supervisor.NOTES in os.environ or launched_by_torchrun()
        if run is None or restarted_by_others:
            raise
        if not decide(ending_of(error), checkpoint=newest_checkpoint(run), limit=restarts).restart:
            raise
        traceback.print_exc()
        end_relay()  # the restarted program has its own
        program = [sys.executable, *sys.orig_argv[1:]]
        sys.exit(supervisor.Supervisor(program, restarts).run(run, _describe(error)))


_run_of_this_process: Path | None = None


def note_state(run: Path, state: str, cause: str = "", goes_on: bool = False) -> None:
    """Write ``run.json``.

    Args:
        state: ``running``, ``finished``, ``failed`` or ``interrupted``.
        cause: reason for ``failed`` or ``interrupted``.
        goes_on: whether the run may be resumed automatically.
    """
    supervisor.note(run, cause=cause, goes_on=goes_on)
    try:
        values = {"state": state, "cause": cause, "goes_on": goes_on, "pid": os.getpid(), "launcher": launcher()}
        text = json.dumps(values | {"time": time.time()}) + "\n"
        # With a deadline, because the run's processes wait for this call.
        on_disk_now(CALL_DEADLINE_S, f"{run / STATE}", write_whole, run / STATE, text)
    except OSError as error:
        logger.error("%s cannot be written (%s)", run / STATE, error)


def read_state(run: Path) -> dict[str, Any]:
    """The contents of ``run.json``; empty if it does not exist. If it is damaged, a warning is logged, and the run
    counts as lost, from which it can be resumed."""
    if not (run / STATE).exists():
        return {}
    try:
        values = read_object(run / STATE)
        if all(isinstance(values.get(name), kind) for name, kind in STATE_FIELDS.items()):
            return values
        problem = f"{run / STATE} is damaged: it does not have {', '.join(STATE_FIELDS)}"
    except SettingsError as error:
        problem = str(error)
    logger.warning("%s. The run counts as lost: it can be resumed", problem)
    return {"state": "running", "cause": problem, "goes_on": True}


def launcher() -> str | list[float]:
    """Identifies what started this process, and would restart it: the id of torchrun's job (``--rdzv-id``, which
    torchrun generates on one machine), or else the pid and start time of the parent process."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", NO_JOB)
    if launched_by_torchrun() and job not in ("", NO_JOB):
        return job
    parent = os.getppid()
    try:
        began = float(Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError):
        began = 0.0
    return [parent, began]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {last_line(error)}"
