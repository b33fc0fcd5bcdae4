"""The last lines of a run: what it did, and the commands to look at it, use its model and continue it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
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
from monarch_rl.pipeline.run_folder import recorded
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.runtime.signals import CLEAN_EXIT_S, Interrupts

PAGE_S = 60.0
"""Seconds for the page of a run at its end."""
FAILED_PAGE_S = 20.0
"""Seconds for the page of a run that failed."""
MARGIN_S = 3.0
"""Seconds of those for a clean exit after Ctrl-C that a page leaves to the rest of the program's end."""


def closing_lines(
    folder: Path, s: RunSettings, steps: int, warm_up_steps: int = 0, model: Path | None = None
) -> list[str]:
    """The last lines of a run: what it did, and the commands to look at it, use its model and continue it.

    Args:
        folder: the run's folder, whose files are closed.
        steps: steps made in all, without the supervised ones.
        model: folder of the model that was saved at the end, if one was.
    """
    ending = read_ending(folder / FILE, s.evaluation.best)
    done = f"{steps} step{'s' * (steps != 1)} in {duration(ending.newest.get('seconds', 0.0))}"
    lines = {"done": "; ".join([done, *_held_out(ending, warm_up_steps)])}
    lines["files"] = f"{'metrics, rollouts and the model' if model else 'metrics and rollouts'} are in {folder}"
    lines["look"] = f"monarch-rl view {folder}"
    if "tensorboard" in s.track:
        lines["curves"] = f"tensorboard --logdir {folder}"
    lines["table"] = f"monarch-rl convert {folder} --to csv"
    checkpoint = bool(complete(folder / CHECKPOINTS))
    if model or checkpoint:
        lines["model"] = f"python tools/export.py {folder} OUT"
        lines["evaluate"] = f"python tools/evaluate.py {folder} --task {sys.argv[0]}"
    if checkpoint:
        lines["resume"] = f"the same command with --resume {folder} --steps {2 * s.steps}"
    width = max(map(len, lines)) + 2
    return [f"{name + ':':{width}}{text}" for name, text in lines.items()]


@contextmanager
def page_of_failed(folder: Path, interrupts: Interrupts) -> Iterator[None]:
    """If the block, which ends with the run's state in ``run.json``, raises: write the page, and print its lines.

    Without metrics there is nothing to show. A run that is going to resume has its page later. What sends SIGTERM or
    SIGUSR1, such as a batch system, kills soon; after Ctrl-C the page has the time that a clean exit has left, and a
    signal ends it. The exception is raised in any case.
    """
    try:
        yield
    except BaseException:
        limit_s = FAILED_PAGE_S
        if interrupts.received is not None and interrupts.reason is None:
            left_s = interrupts.received_at + CLEAN_EXIT_S - MARGIN_S - time.monotonic()
            limit_s = min(limit_s, left_s) if interrupts.received == signal.SIGINT else 0.0
        with suppress(KeyboardInterrupt, OSError):
            begun = (folder / FILE).stat().st_size > 0
            if begun and limit_s > 0 and not recorded(folder).get("goes_on"):
                print(*page_lines(folder, limit_s), sep="\n")
        raise


def page_lines(folder: Path, limit_s: float = PAGE_S) -> list[str]:
    """Write the page of an ended run; returns lines that name it, and what is wrong with the run, if anything is.

    A process of its own writes it, within ``limit_s`` seconds. Never raises: a page is not worth a run's own end.
    """
    program = [sys.executable, "-m", "monarch_rl.report.at_end", str(folder)]
    later = f"monarch-rl report {folder}"
    try:
        done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s)
        if done.returncode:
            raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode)
        found = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return [f"page:     not written ({error}); later: {later}"]
    problem = [f"problem:  {found['problem']} monarch-rl diagnose {folder}"] if found["problem"] else []
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
