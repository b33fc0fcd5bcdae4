"""Runs a recipe, and restarts it after the loss of a process that it cannot do without, including its controller.

    python -m monarch_rl.runtime.supervisor recipes/grpo.py --steps 500 ...

The recipe writes the folder of its run to a file, and when it ends, whether it may resume; ``runtime/restart.py``
decides whether it is restarted. An attempt that ends during its start-up counts as a loss. Signals are forwarded to the
recipe. Under torchrun, use ``--max-restarts`` instead. Imports nothing heavy.

    --restarts N        maximum restarts without a newer checkpoint; default: the recipe's --checkpoint.restarts
    --stopped-s S       kill and restart a recipe whose process is stopped (SIGSTOP) for S seconds; default: 3600; 0
                        never does
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from monarch_rl.runtime.process import adopt_orphans, die_with_parent, signal_name
from monarch_rl.runtime.restart import Ending, decide, newest_checkpoint
from monarch_rl.runtime.scratch import ScratchFolder
from monarch_rl.runtime.signals import HANDLED

NOTES = "MONARCH_RL_SUPERVISED"
"""Variable with the file in which a supervised recipe writes the folder of its run and whether it may resume."""
RESUMES = "MONARCH_RL_RESUMES"
"""Variable with the folder of the run that a restarted recipe resumes."""
RESTARTS = 3
"""Used until the recipe has reported its own number: the default of ``--checkpoint.restarts``."""
STOPPED_S = 3600.0
"""Default of ``--stopped-s``: longer than a pause in a debugger, shorter than a night."""
SAY_S = 1.0
"""Seconds for a console to accept a line."""
LOOK_S = 1.0
"""Seconds between two checks whether the recipe's process is stopped."""
ENDED_S = 20.0
"""Seconds for the processes of a killed controller to end: its host process needs four."""


def note(run: Path, **values: Any) -> None:
    """Report the run's folder and ``values`` to the supervisor, if there is one, in addition to earlier values."""
    path = os.environ.get(NOTES)
    if path is not None:
        partial = Path(f"{path}.partial")
        with suppress(OSError):  # the supervisor is gone
            partial.write_text(json.dumps(_read(Path(path)) | values | {"run": str(run)}))
            partial.replace(path)  # atomically: this process may be killed at any time


def follow_supervisor() -> None:
    """In a supervised recipe: end as if by SIGTERM when the supervisor is killed."""
    if NOTES in os.environ:
        die_with_parent(signal.SIGTERM, os.getppid())


class Supervisor:
    """Runs a command, and restarts it, until it ends for good.

    Args:
        command: command line of the recipe.
        limit: maximum restarts without a newer checkpoint; None means the number that the recipe reports.
        stopped_s: seconds for which the recipe's process may be stopped; 0 means any time.
    """

    def __init__(self, command: Sequence[str], limit: int | None = None, stopped_s: float = STOPPED_S) -> None:
        self._command, self._limit, self._stopped_s = list(command), limit, stopped_s
        self._child: subprocess.Popen[bytes] | None = None
        self._interrupted = False
        self._stopped = False
        """Whether the last attempt was killed because it was stopped for too long."""

    def run(self, resumed: Path | None = None, cause: str = "") -> int:
        """Run the command until it ends for good. Returns the exit code of the last attempt, or 128 + the number of the
        signal that killed it.

        Args:
            resumed: folder of a run that has already ended, and is to be restarted.
            cause: why that run ended.
        """
        for number in HANDLED:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the recipe inherits it: a closed terminal does not end a run
        adopt_orphans()
        limit = RESTARTS if self._limit is None else self._limit
        restarts, latest = (0, None) if resumed is None else (1, newest_checkpoint(resumed))
        first_cause = cause
        with ScratchFolder() as scratch:
            notes = scratch.path / "state"
            while True:
                if resumed is not None:
                    _say(f"resuming {resumed} from {latest} (restart {restarts} of {limit}): {cause}")
                code = self._attempt(notes, resumed)
                _wait_for_orphans()
                state = _read(notes)
                ending = self._ending(code, state, resumed)
                if ending in (Ending.FINISHED, Ending.INTERRUPTED):
                    return code
                cause = state.get("cause") or self._how(code)
                first_cause = first_cause or cause
                if self._limit is None:
                    limit = state.get("restarts", limit)
                run = Path(state["run"]) if state else resumed
                checkpoint = None if run is None else newest_checkpoint(run)
                decision = decide(
                    ending, checkpoint=checkpoint, previous=latest, restarts=restarts, limit=limit, cause=cause
                )
                if not decision.restart:
                    if ending is Ending.LOST or resumed is not None:
                        _say(f"not restarted: the run {decision.reason}. First cause of the run's end: {first_cause}")
                    return code
                resumed, latest, restarts = run, checkpoint, decision.restarts

    def _ending(self, code: int, state: Mapping[str, Any], resumed: Path | None) -> Ending:
        """How an attempt ended that resumed a run, or began one if ``resumed`` is None.

        Args:
            state: what the attempt noted; empty if it ended during its start-up.
        """
        if code == 0:
            return Ending.FINISHED
        if self._interrupted:
            return Ending.INTERRUPTED
        if not state:
            # The settings of a restarted run were accepted before, so what ends its start-up is taken for a loss.
            return Ending.REFUSED if resumed is None else Ending.LOST
        return Ending.LOST if state.get("goes_on") else Ending.FAILED

    def _attempt(self, notes: Path, resumed: Path | None) -> int:
        notes.unlink(missing_ok=True)
        environment = os.environ | {NOTES: str(notes)} | ({} if resumed is None else {RESUMES: str(resumed)})
        # In its own session, so that a Ctrl-C in the terminal reaches only this process, which forwards it once.
        self._child = subprocess.Popen(self._command, env=environment, start_new_session=True)
        if self._interrupted:
            self._child.terminate()
        self._stopped = self._stopped_s > 0 and self._kill_if_stopped(self._child)
        code = self._child.wait()  # waits: for the whole run, whose own waits have deadlines
        return code if code >= 0 else 128 - code

    def _kill_if_stopped(self, child: subprocess.Popen[bytes]) -> bool:
        """Wait until the recipe's process ends. Kills it, and returns True, once it has been stopped for too long.

        Counts checks instead of seconds, so that time in which this process is stopped itself does not count.
        """
        ended, looks = select.poll(), 0
        descriptor = os.pidfd_open(child.pid)
        try:
            ended.register(descriptor, select.POLLIN)
            while not ended.poll(1000 * LOOK_S):  # waits: for the whole run
                looks = looks + 1 if _is_stopped(child.pid) else 0
                if looks * LOOK_S >= self._stopped_s:
                    child.kill()
                    return True
        finally:
            os.close(descriptor)
        return False

    def _how(self, code: int) -> str:
        if self._stopped:
            return f"the controller was killed after it was stopped for {self._stopped_s:g} s (--stopped-s)"
        return f"the controller ended by {signal_name(code - 128) if code > 128 else f'exit code {code}'}"

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(number)


def _say(text: str) -> None:
    """Print on stderr, on a thread and without an error: the console may block or be gone, and the run continues."""

    def write() -> None:
        with suppress(OSError):
            os.write(2, f"{text}\n".encode())

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(SAY_S)


def _read(notes: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(notes.read_text())
        return state
    except (OSError, ValueError):
        return {}


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process. (A debugger's stop has another state letter.)"""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False


def _wait_for_orphans() -> None:
    """Wait until all processes of the recipe have ended, because their memory and devices are needed again."""
    until = time.monotonic() + ENDED_S
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)


def main() -> None:
    arguments, values = sys.argv[1:], dict[str, float]()
    while arguments[:1] in (["--restarts"], ["--stopped-s"]) and len(arguments) > 1:
        values[arguments[0]], arguments = float(arguments[1]), arguments[2:]
    usage = "usage: python -m monarch_rl.runtime.supervisor [--restarts N] [--stopped-s S] RECIPE.py [its flags]\n"
    if arguments[:1] in (["-h"], ["--help"]):  # a --help after the recipe is the recipe's
        print(usage + (__doc__ or ""))
        return
    if not arguments:
        sys.exit(usage + (__doc__ or ""))
    limit = int(values["--restarts"]) if "--restarts" in values else None
    sys.exit(Supervisor([sys.executable, *arguments], limit, values.get("--stopped-s", STOPPED_S)).run())


if __name__ == "__main__":
    main()
