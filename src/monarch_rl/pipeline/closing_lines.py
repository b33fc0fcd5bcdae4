"""The last lines of a run: what it did, and the commands to look at it, use its model and continue it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from monarch_rl.checkpoint.folders import complete
from monarch_rl.observe.console import duration
from monarch_rl.observe.metrics import FILE
from monarch_rl.observe.registry import find
from monarch_rl.pipeline.checkpoints import FOLDER as CHECKPOINTS
from monarch_rl.pipeline.provenance import Ending, read_ending
from monarch_rl.pipeline.run_folder import may_be_restarted, recorded, run_of_this_process
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.runtime.deadlines import on_disk_now

PAGE_S = 60.0
"""Seconds for the page of a run at its end."""
FAILED_PAGE_S = 20.0
"""Seconds for the page of a run that failed."""
DISK_S = 5.0
"""Seconds to find out whether a failed run has something to show."""


def closing_lines(
    folder: Path, s: RunSettings, steps: int, warm_up_steps: int = 0, model: Path | None = None
) -> list[str]:
    """The last lines of a run: what it did, and the commands to look at it, use its model and continue it.

    Args:
        folder: the run's folder, whose files are closed.
        steps: steps made in all, without the supervised ones.
        model: folder of the model that was saved at the end, if one was.
    """
    run, recipe = shlex.quote(str(folder)), shlex.quote(sys.argv[0])
    ending = read_ending(folder / FILE, s.evaluation.best)
    done = f"{steps} step{'s' * (steps != 1)} in {duration(ending.newest.get('seconds', 0.0))}"
    lines = {"done": "; ".join([done, *_held_out(ending, warm_up_steps)])}
    lines["files"] = f"{'metrics, rollouts and the model' if model else 'metrics and rollouts'} are in {folder}"
    lines["look"] = f"monarch-rl view {run}"
    if "tensorboard" in s.track:
        lines["curves"] = f"tensorboard --logdir {run}"
    lines["table"] = f"monarch-rl convert {run} --to csv"
    checkpoint = bool(complete(folder / CHECKPOINTS))
    if model or checkpoint:
        lines["model"] = f"python tools/export.py {run} OUT"
        lines["evaluate"] = f"python tools/evaluate.py {run} --task {recipe}"
    if checkpoint:
        lines["resume"] = f"the same command with --resume {run} --steps {2 * s.steps}"
    width = max(map(len, lines)) + 2
    return [f"{name + ':':{width}}{text}" for name, text in lines.items()]


@contextmanager
def page_of_failed(restarts: int, enabled: bool = True) -> Iterator[None]:
    """If the block, in which a run of this process ended, raises: write the run's page, and print its lines.

    There is no page without metrics, of a run that is about to be restarted, which has its page later, or of one that
    was ended by another signal than that of Ctrl-C: a batch system kills what has not ended in seconds. The exception
    is raised in any case; Ctrl-C ends only the page.

    Args:
        restarts: as for :func:`~monarch_rl.pipeline.run_folder.restarting_after_loss`.
        enabled: whether to write a page.
    """
    try:
        yield
    except BaseException:
        run = run_of_this_process()
        if run is not None and enabled:
            with suppress(KeyboardInterrupt, OSError):  # of a disk that does not answer, too
                if on_disk_now(DISK_S, f"{run}", _deserves_page, run, restarts):
                    print(*page_lines(run, FAILED_PAGE_S), sep="\n")
        raise


def _deserves_page(run: Path, restarts: int) -> bool:
    state = recorded(run)
    ended = state.get("state") == "failed" or (state.get("state"), state.get("cause")) == ("interrupted", "SIGINT")
    return ended and (run / FILE).stat().st_size > 0 and not may_be_restarted(run, bool(state.get("goes_on")), restarts)


def page_lines(folder: Path, limit_s: float = PAGE_S) -> list[str]:
    """Write the page of an ended run; returns lines that name it, and what is wrong with the run, if anything is.

    A process of its own writes it, within ``limit_s`` seconds. Raises only KeyboardInterrupt: a page is not worth a
    run's own end.
    """
    program = [sys.executable, "-m", "monarch_rl.report.at_end", str(folder)]
    run = shlex.quote(str(folder))
    try:
        writing = subprocess.Popen(
            program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            output, errors = writing.communicate(timeout=limit_s)
        except BaseException:
            writing.kill()  # without waiting for it: a disk may keep it
            raise
        if writing.returncode:
            raise OSError(errors.strip().splitlines()[-1] if errors.strip() else writing.returncode)
        found = json.loads(output)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return [f"page:     not written ({error}); later: monarch-rl report {run}"]
    problem = [f"problem:  {found['problem']} monarch-rl diagnose {run}"] if found["problem"] else []
    return [f"page:     {found['page']}", *problem]


def _held_out(ending: Ending, warm_up_steps: int) -> list[str]:
    """The first result, and the last one with its interval, as one text; none without evaluations."""
    if not ending.metric:
        return []

    def text(values: dict[str, Any], interval: bool) -> str:
        metric = find(f"held_out/{ending.metric.rpartition('/')[2]}")  # a named set's have the same form
        form = metric.form if metric is not None and metric.form else "{:.3g}"
        shown = f"{form.format(values[ending.metric])} @{max(0, values['step'] - warm_up_steps)}"
        low, high = (values.get(f"{ending.metric}_{end}") for end in ("low", "high"))
        return shown if low is None or not interval else f"{shown} [{form.format(low)}, {form.format(high)}]"

    label = ending.metric.removeprefix("held_out/").replace("/", " ")
    first = [] if ending.first["step"] == ending.last["step"] else [text(ending.first, interval=False)]
    return [f"held-out {label} {' -> '.join([*first, text(ending.last, interval=True)])}"]
