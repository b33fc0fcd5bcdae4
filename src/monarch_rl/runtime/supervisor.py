"""Starts a recipe, and starts it again when it has lost a process that it cannot do without, its controller included.

    python -m monarch_rl.runtime.supervisor recipes/grpo.py --steps 500 ...

The recipe says in a file where its run's folder is, and when it ends whether it may go on. It is started again only if
it may and has a checkpoint, and a bounded number of times without a newer one. If it ends while it comes up again, that
counts, too. Signals are passed on to it. Under torchrun, ``--max-restarts`` does all this. Imports nothing heavy.

    --restarts N        without a newer checkpoint; by default the recipe's --checkpoint.restarts
    --stopped-s S       a recipe whose process is stopped (SIGSTOP) for S seconds is killed and started again; 3600 by
                        default, 0 waits for it without a bound
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from monarch_rl.runtime.process import adopt_orphans, die_with_parent, signal_name
from monarch_rl.runtime.scratch import ScratchFolder
from monarch_rl.runtime.signals import handled

NOTES = "MONARCH_RL_SUPERVISED"
"""Variable with the file in which a supervised recipe says where its run is, and whether it may go on."""
RESUMES = "MONARCH_RL_RESUMES"
"""Variable with the folder of the run that a recipe goes on with, because it was started again."""
RESTARTS = 3
"""Until a recipe has said its own number: the default of ``--checkpoint.restarts``."""
STOPPED_S = 3600.0
"""Default of ``--stopped-s``: longer than a pause at a debugger, shorter than a night."""
LOOK_S = 1.0
"""Seconds between two looks at whether the recipe's process is stopped."""
ENDED_S = 20.0
"""Seconds for what a killed controller has left to end: its host process needs four."""


def note(run: Path, **values: Any) -> None:
    """Tell the supervisor, if there is one, of the run in a folder: these values, and those that it was told before."""
    path = os.environ.get(NOTES)
    if path is not None:
        partial = Path(f"{path}.partial")
        with suppress(OSError):  # the supervisor is gone
            partial.write_text(json.dumps(_read(Path(path)) | values | {"run": str(run)}))
            partial.replace(path)  # at once: a process may be killed at any time


def follow_supervisor() -> None:
    """In a supervised recipe: end like at SIGTERM when the supervisor is killed."""
    if NOTES in os.environ:
        die_with_parent(signal.SIGTERM, os.getppid())


class Supervisor:
    """Runs a command until it ends for good.

    Args:
        command: of the recipe.
        restarts: without a newer checkpoint; None is what the recipe says.
        stopped_s: seconds for which the recipe's process may be stopped; 0 is without a bound.
    """

    def __init__(self, command: Sequence[str], restarts: int | None = None, stopped_s: float = STOPPED_S) -> None:
        self._command, self._restarts, self._stopped_s = list(command), restarts, stopped_s
        self._child: subprocess.Popen[bytes] | None = None
        self._interrupted = False
        self._stopped = False
        """The last attempt was killed because it was stopped."""

    def run(self, resumed: Path | None = None, cause: str = "") -> int:
        """The exit code of the last attempt: that of the recipe, or 128 + the number of the signal that killed it.

        Args:
            resumed: a run that has ended already, for ``cause``, and is to go on.
        """
        for number in handled():
            signal.signal(number, self._pass_on)
        adopt_orphans()
        first_cause, attempts, restarts = cause, 0, RESTARTS if self._restarts is None else self._restarts
        latest = None if resumed is None else _latest(resumed)
        with ScratchFolder() as scratch:
            notes = scratch.path / "state"
            while True:
                if resumed is not None:
                    attempts += 1
                    print(f"going on with {resumed} from {latest} (restart {attempts} of {restarts}): {cause}")
                code = self._attempt(notes, resumed)
                _wait_for_orphans()
                state = _read(notes)
                if not state and resumed is not None:  # it ended while it came up again
                    state = {"run": str(resumed), "goes_on": True}
                if code == 0 or self._interrupted:
                    return code
                restarts = state.get("restarts", restarts) if self._restarts is None else restarts
                cause = state.get("cause") or self._how(code)
                first_cause, again = first_cause or cause, resumed is not None
                if state.get("goes_on"):
                    resumed, before = Path(state["run"]), latest
                    latest = _latest(resumed)
                    attempts = attempts if latest == before else 0
                    if latest is not None and attempts < restarts:
                        continue
                if state.get("goes_on") or again:
                    print(f"not started again. What ended the run first: {first_cause}", file=sys.stderr)
                return code

    def _attempt(self, notes: Path, resumed: Path | None) -> int:
        notes.unlink(missing_ok=True)
        environment = os.environ | {NOTES: str(notes)} | ({} if resumed is None else {RESUMES: str(resumed)})
        sys.stdout.flush()
        # In a session of its own: a Ctrl-C in the terminal comes here, and is passed on once.
        self._child = subprocess.Popen(self._command, env=environment, start_new_session=True)
        if self._interrupted:
            self._child.terminate()
        self._stopped = self._stopped_s > 0 and self._kill_if_stopped(self._child)
        code = self._child.wait()  # waits: as long as the run, whose waits have deadlines
        return code if code >= 0 else 128 - code

    def _kill_if_stopped(self, child: subprocess.Popen[bytes]) -> bool:
        """Wait until the recipe's process ends. Kills it, and returns True, once it is stopped for too long.

        Looks are counted, not seconds: nobody is at fault while this process is stopped, too.
        """
        ended, looks = select.poll(), 0
        descriptor = os.pidfd_open(child.pid)
        try:
            ended.register(descriptor, select.POLLIN)
            while not ended.poll(1000 * LOOK_S):  # waits: as long as the run
                looks = looks + 1 if _is_stopped(child.pid) else 0
                if looks * LOOK_S >= self._stopped_s:
                    child.kill()
                    return True
        finally:
            os.close(descriptor)
        return False

    def _how(self, code: int) -> str:
        if self._stopped:
            return f"the controller was stopped for {self._stopped_s:g} s (--stopped-s) and was killed"
        return f"the controller ended by {signal_name(code - 128) if code > 128 else f'exit code {code}'}"

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(number)


def _latest(run: Path) -> str | None:
    """The name of a run's newest checkpoint."""
    with suppress(OSError):
        return os.readlink(run / "checkpoints" / "latest")
    return None


def _read(notes: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(notes.read_text())
        return state
    except (OSError, ValueError):
        return {}


def _is_stopped(pid: int) -> bool:
    """By a signal: a debugger's stop has another letter."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False


def _wait_for_orphans() -> None:
    """Until nothing runs that the recipe has started: its memory and its devices are needed again."""
    until = time.monotonic() + ENDED_S
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)


def main() -> None:
    arguments, values = sys.argv[1:], dict[str, float]()
    while arguments[:1] in (["--restarts"], ["--stopped-s"]) and len(arguments) > 1:
        values[arguments[0]], arguments = float(arguments[1]), arguments[2:]
    if not arguments:
        sys.exit(
            "usage: python -m monarch_rl.runtime.supervisor [--restarts N] [--stopped-s S] RECIPE.py [its flags]\n"
            + (__doc__ or "")
        )
    restarts = int(values["--restarts"]) if "--restarts" in values else None
    sys.exit(Supervisor([sys.executable, *arguments], restarts, values.get("--stopped-s", STOPPED_S)).run())


if __name__ == "__main__":
    main()
