"""Starts a recipe, and starts it again when it has lost a process that it cannot do without, its controller included.

    python -m monarch_rl.runtime.supervisor recipes/grpo.py --steps 500 ...

The recipe says in a file where its run's folder is, and when it ends whether it may go on. It is started again only if
it may and has a checkpoint, and a bounded number of times without a newer one. Signals are passed on to it. Under
torchrun, ``--max-restarts`` does all this. Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from monarch_rl.runtime.lifetime import adopt_orphans, die_with_parent, signal_name
from monarch_rl.runtime.scratch import ScratchFolder
from monarch_rl.runtime.signals import handled

NOTES = "MONARCH_RL_SUPERVISED"
"""Variable with the file in which a supervised recipe says where its run is, and whether it may go on."""
RESUMES = "MONARCH_RL_RESUMES"
"""Variable with the folder of the run that a recipe goes on with, because it was started again."""
ENDED_S = 20.0
"""Seconds for what a killed controller has left to end: its host process needs four."""


def note(run: Path, **values: Any) -> None:
    """Tell the supervisor, if there is one, of the state of the run in a folder."""
    path = os.environ.get(NOTES)
    if path is not None:
        with suppress(OSError):
            Path(path).write_text(json.dumps(values | {"run": str(run)}))


def follow_supervisor() -> None:
    """In a supervised recipe: end like at SIGTERM when the supervisor is killed."""
    if NOTES in os.environ:
        die_with_parent(signal.SIGTERM, os.getppid())


class Supervisor:
    """Runs a command until it ends for good.

    Args:
        command: of the recipe.
        restarts: without a newer checkpoint.
    """

    def __init__(self, command: Sequence[str], restarts: int) -> None:
        self._command, self._restarts = list(command), restarts
        self._child: subprocess.Popen[bytes] | None = None
        self._interrupted = False

    def run(self, resumed: Path | None = None, cause: str = "") -> int:
        """The exit code of the last attempt: that of the recipe, or 128 + the number of the signal that killed it.

        Args:
            resumed: a run that has ended already, for ``cause``, and is to go on.
        """
        for number in handled():
            signal.signal(number, self._pass_on)
        adopt_orphans()
        first_cause, code, attempts = cause, 1, 0
        latest = None if resumed is None else _latest(resumed)
        with ScratchFolder() as scratch:
            notes = scratch.path / "state"
            while True:
                if resumed is not None:
                    attempts += 1
                    print(f"going on with {resumed} from {latest} (restart {attempts} of {self._restarts}): {cause}")
                code = self._attempt(notes, resumed)
                _wait_for_orphans()
                state = _read(notes)
                if code == 0 or self._interrupted or not state.get("goes_on"):
                    return code
                resumed, before = Path(state["run"]), latest
                latest = _latest(resumed)
                cause = state.get("cause") or f"the controller ended by {_how(code)}"
                first_cause = first_cause or cause
                attempts = attempts if latest == before else 0
                if latest is None or attempts >= self._restarts:
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
        code = self._child.wait()  # waits: as long as the run, whose waits have deadlines
        return code if code >= 0 else 128 - code

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


def _how(code: int) -> str:
    return signal_name(code - 128) if code > 128 else f"exit code {code}"


def _wait_for_orphans() -> None:
    """Until nothing runs that the recipe has started: its memory and its devices are needed again."""
    until = time.monotonic() + ENDED_S
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)


def main() -> None:
    arguments, restarts = sys.argv[1:], 3
    if arguments[:1] == ["--restarts"]:
        restarts, arguments = int(arguments[1]), arguments[2:]
    if not arguments:
        sys.exit("usage: python -m monarch_rl.runtime.supervisor [--restarts N] RECIPE.py [its flags]")
    sys.exit(Supervisor([sys.executable, *arguments], restarts).run())


if __name__ == "__main__":
    main()
