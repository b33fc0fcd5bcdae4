"""The folder of a run, and its ``run.json``: the run's state (running, finished, failed or interrupted), where it comes
from, and its result."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from monarch_rl.checkpoint.folders import write_whole
from monarch_rl.errors import SettingsError
from monarch_rl.observe.console_relay import end_relay
from monarch_rl.observe.lines import read_object
from monarch_rl.observe.redact import redact, redact_values, secrets_in
from monarch_rl.pipeline import provenance
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.runtime import folder_lock, machine, supervisor
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, on_disk, on_disk_now, within
from monarch_rl.runtime.devices import launched_by_torchrun
from monarch_rl.runtime.monitor import ProcessMonitor
from monarch_rl.runtime.process import signal_name
from monarch_rl.runtime.restart import Ending, decide, ending_of, newest_checkpoint
from monarch_rl.runtime.signals import Interrupts

logger = logging.getLogger("monarch_rl")

SETTINGS, STATE, BEST = "settings.json", "run.json", "best.json"
METRICS = "metrics.jsonl"
RECIPE = "recipe.py"
"""Copy of the recipe's file in the run's folder."""
FORMAT = 1
"""Format version of the files that docs/run_folder.md describes."""
ROLLOUTS = "rollouts"
"""Folder of the records of episodes and of trained tokens, in pieces."""
SAVED = "model"
"""Folder of a run's last saved model, in the run's folder."""
ERROR = "error.txt"
"""Traceback of an error of which the console shows the message only."""
STATE_FIELDS = {"state": str, "cause": str, "goes_on": bool}
DESCRIBED_S = 2.0
"""Seconds that the end of a run waits for its description, which is complete unless the run was shorter than git."""
MACHINE_S = 2 * machine.PROGRAM_S
"""Seconds for another machine to describe itself. The run does not wait for it."""
NO_JOB = "none"
"""torchrun's id for jobs on several machines that were given none."""


def recipe_name() -> str:
    """Prefix of the names of this recipe's run folders, unless a run is given a name."""
    return Path(sys.argv[0]).stem or "run"


def new_folder(output: Path, name: str = "") -> Path:
    """Create the folder of a new run, ``<name>-<date>-<time>``; a second one in the same second ends in ``-2``.

    Args:
        output: folder of all runs.
        name: the recipe's name if it is empty.

    Raises OSError.
    """
    output.mkdir(parents=True, exist_ok=True)
    stem, number = f"{name or recipe_name()}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while True:
        folder = output / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:  # atomic, also for launches on other machines
            number += 1
        else:
            return folder.resolve()


@contextmanager
def recording_state(
    folder: Path,
    interrupts: Interrupts,
    name: str = "",
    resumed_from: Path | None = None,
    best: str = "",
    changed: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    device: str = "",
) -> Iterator[None]:
    """Record in the run's folder that the run is running during the block, and how it ended after the block.

    Args:
        name: the run's name; empty: the recipe's.
        resumed_from: the checkpoint from which this process resumes the run.
        best: the evaluation metric whose first and last value are recorded (``evaluation.best``).
        changed: default and given value of settings that are not the recipe's defaults, by name.
        device: kind of the run's devices, ``cpu`` or ``cuda``.
    """
    global _run_of_this_process
    _run_of_this_process = folder
    _begin_description(folder, name, resumed_from, changed, device)

    def ended(state: str, cause: str = "", goes_on: bool = False) -> None:
        _description.join(DESCRIBED_S)
        note_state(folder, state, cause, goes_on, {"ended": time.time()} | _results(folder, best))

    try:
        yield
    except BaseException as error:
        reason = interrupts.reason or error
        interrupted = interrupts.received is not None and interrupts.reason is None
        goes_on = not interrupted and ending_of(reason) is Ending.LOST
        cause = signal_name(interrupts.received or 0) if interrupted else _describe(reason)
        ended("interrupted" if interrupted else "failed", cause, goes_on)
        raise
    else:
        ended("finished")
    finally:
        folder_lock.release(folder)  # a program that this process restarts has to take the lock


def _begin_description(
    folder: Path, name: str, resumed_from: Path | None, changed: Mapping[str, Sequence[Any]], device: str
) -> None:
    """Write ``run.json`` for a start or a resume. Its slower parts (git, GPUs) follow on a thread, so that the first
    step does not wait for them."""
    earlier, command, now = recorded(folder), provenance.command(), time.time()
    attempt = {"started": now, "command": command, "resumed_from": str(resumed_from) if resumed_from else None}
    given = {
        "format": FORMAT,
        "name": name or recipe_name(),
        "command": command,
        "version": provenance.own_version(),
        "python": platform.python_version(),
        "started": earlier.get("started", now),
        "ended": None,
        "steps": earlier.get("steps"),
        "held_out": earlier.get("held_out"),
        "attempts": [*earlier.get("attempts", ()), attempt],
        "changed": redact_values(changed),
        "hosts": [{"name": socket.gethostname()}],  # until the machine is described
        "device": device,
    }
    note_state(folder, "running", goes_on=True, more=given)
    global _description
    _description = threading.Thread(target=_describe_run, args=(folder,), name="describe-run", daemon=True)
    _description.start()


_description = threading.Thread()
"""Describes the run of this process."""


def _describe_run(folder: Path) -> None:
    _write(folder, {"hosts": [machine.describe()]})
    path = provenance.recipe()
    described: dict[str, Any] = {"recipe": None}
    if path is not None:
        try:
            described["recipe"], text = provenance.read_recipe(path)
            if text is not None:
                write_whole(folder / RECIPE, text)
        except OSError as error:
            logger.warning("the recipe %s is not in the run's folder (%s)", path, error)
    described["git"] = provenance.git_state(path.parent if path else Path.cwd())
    described["packages"] = provenance.versions()
    _write(folder, described)


async def note_hosts(folder: Path, monitors: Sequence[ProcessMonitor]) -> None:
    """Add the other machines of a run to ``hosts`` in its ``run.json``. One that does not answer is left out, with a
    warning.

    Args:
        monitors: of the run's processes.
    """
    calls = [
        within(MACHINE_S, monitor.report.call_one(), "a process to name its machine", on="Monarch")
        for monitor in monitors
    ]
    reports = await asyncio.gather(*calls, return_exceptions=True)  # waits: each call has a deadline
    one_of_each = dict[str, ProcessMonitor]()
    for report, monitor in zip(reports, monitors, strict=True):
        if not isinstance(report, BaseException) and report.machine != machine.own_id():
            one_of_each.setdefault(report.machine, monitor)
    describing = [
        within(MACHINE_S, monitor.describe_machine.call_one(), "a machine to describe itself", on="Monarch")
        for monitor in one_of_each.values()
    ]
    others = await asyncio.gather(*describing, return_exceptions=True)  # waits: as above
    for error in (one for one in [*reports, *others] if isinstance(one, BaseException)):
        logger.warning("a machine may be missing in %s: %s", folder / STATE, last_line(error))

    found = [one for one in others if not isinstance(one, BaseException)]
    if found:
        try:
            await on_disk(CALL_DEADLINE_S, f"{folder / STATE}", _add_hosts, folder, found)
        except OSError as error:
            logger.warning("%s does not name all machines: %s", folder / STATE, last_line(error))


def _add_hosts(folder: Path, others: list[dict[str, Any]]) -> None:
    _description.join(MACHINE_S)  # it writes this machine
    _write(folder, {"hosts": [*recorded(folder).get("hosts", ())[:1], *others]})


def _results(folder: Path, best: str) -> dict[str, Any]:
    """The last step and the held-out values of a run; empty if they cannot be read."""
    try:
        return on_disk_now(CALL_DEADLINE_S, f"{folder / METRICS}", provenance.results, folder / METRICS, best)
    except OSError as error:
        logger.error("%s cannot be read (%s): %s has no result", folder / METRICS, error, folder / STATE)
        return {}


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
        if run is None or _restarted_by_others():
            raise
        if not may_be_restarted(run, ending_of(error) is Ending.LOST, restarts):
            raise
        traceback.print_exc()
        end_relay()  # the restarted program has its own
        program = [sys.executable, *sys.orig_argv[1:]]
        sys.exit(supervisor.Supervisor(program, restarts).run(run, _describe(error)))


def may_be_restarted(run: Path, resumable: bool, restarts: int) -> bool:
    """Whether this program, its supervisor or torchrun may restart a run that has ended.

    Args:
        resumable: ``goes_on`` of its ``run.json``.
        restarts: as for :func:`restarting_after_loss`.
    """
    limit: int | None = restarts
    if _restarted_by_others():
        limit = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) if launched_by_torchrun() else None
    ending = Ending.LOST if resumable else Ending.FAILED
    return decide(ending, checkpoint=newest_checkpoint(run), limit=limit).restart


def _restarted_by_others() -> bool:
    return supervisor.NOTES in os.environ or launched_by_torchrun()


def run_of_this_process() -> Path | None:
    """Folder of the run that this process has begun, if any."""
    return _run_of_this_process


_run_of_this_process: Path | None = None


def note_state(
    run: Path, state: str, cause: str = "", goes_on: bool = False, more: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write how a run is into its ``run.json``, and keep the rest of that file.

    Args:
        state: ``running``, ``finished``, ``failed`` or ``interrupted``.
        cause: reason for ``failed`` or ``interrupted``.
        goes_on: whether the run may be resumed automatically.
        more: further entries of the file.
    """
    supervisor.note(run, cause=cause, goes_on=goes_on)
    cause = redact(cause, secrets_in(os.environ))  # the refusal of a service may quote its key
    values = {"state": state, "cause": cause, "goes_on": goes_on, "pid": os.getpid(), "launcher": launcher()}
    _write(run, values | {"time": time.time(), **more})


_writing = threading.Lock()
"""Held while ``run.json`` is read and written again."""


def _write(run: Path, values: Mapping[str, Any]) -> None:
    """Replace entries of ``run.json``. A failure is logged."""

    def replace() -> None:
        with _writing:
            write_whole(run / STATE, json.dumps(recorded(run) | redact_values(values), indent=1) + "\n")

    try:
        # With a deadline, because the run's processes wait for this call.
        on_disk_now(CALL_DEADLINE_S, f"{run / STATE}", replace)
    except OSError as error:
        logger.error("%s cannot be written (%s)", run / STATE, error)


def recorded(run: Path) -> dict[str, Any]:
    """What ``run.json`` holds; empty if it does not exist, or is damaged, which :func:`read_state` reports."""
    with suppress(SettingsError):
        return read_object(run / STATE)
    return {}


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
