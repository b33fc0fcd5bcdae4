"""Trackers: where a run's metrics go besides ``metrics.jsonl``. ``--track`` names them.

Each tracker has a thread of its own, so that no step waits for one, and a tracker that raises is dropped.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from monarch_rl.errors import SettingsError
from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.registry import GROUPS, find

logger = logging.getLogger("monarch_rl")

NONE = "none"
"""A name that stands for no tracker."""
END_S = 5.0
"""Seconds at the end of a run for a tracker's last steps, and again for its end."""

Rows = Callable[[], Sequence[Mapping[str, Any]]]
"""Returns rollouts: rows of ``rollouts/episodes-*.jsonl`` (docs/run_folder.md)."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows."""

    name: str
    """Name of its folder."""
    folder: Path
    step: int
    """The version from which it starts or resumes: later steps will be logged again."""


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of a run. All methods are called on one thread, one after the other."""

    def start(self, settings: Mapping[str, Any], run: TrackedRun) -> None:
        """Begin to follow a run, or a resumed one.

        Args:
            settings: the run's settings as in ``settings.json``.
        """

    def log(self, step: int, values: Mapping[str, float], rows: Rows) -> None:
        """Add metrics of a step or of an evaluation; a step may come more than once, with other metrics.

        Args:
            step: the policy version.
            values: metrics by name; may be nan or infinite.
            rows: returns the newest rollouts, as in the run's folder; may be empty. It parses them: call it only to use
                them.
        """

    def end(self, state: str) -> None:
        """End; ``state`` is ``"finished"`` or ``"failed"``."""


class Trackers:
    """Passes metrics on to trackers, each on a thread of its own, which callers never wait for.

    A tracker that raises, in any method, is reported once and dropped. One that is slower than the run loses steps,
    which is also reported once. The end of the block waits for all together, at most twice :data:`END_S`.

    Args:
        trackers: by name.
        settings: the run's settings.
    """

    def __init__(self, trackers: Mapping[str, Tracker], settings: Mapping[str, Any], run: TrackedRun) -> None:
        self._threads = [_Thread(name, tracker, settings, run) for name, tracker in trackers.items()]

    def log(self, step: int, values: Mapping[str, float], rows: Rows = list) -> None:
        """Pass a step on; returns at once."""
        values = {name: float(value) for name, value in values.items()}
        for thread in self._threads:
            thread.log(step, values, rows)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        state = "finished" if kind is None else "failed"
        with ThreadPoolExecutor(max(1, len(self._threads))) as ending:
            list(ending.map(lambda thread: thread.end(state), self._threads))


class _Thread:
    """A tracker and its thread."""

    def __init__(self, name: str, tracker: Tracker, settings: Mapping[str, Any], run: TrackedRun) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker
        """None once it was dropped."""
        self._state, self._lost = "failed", 0
        self._disk = DiskThread(f"tracker {name}", self._end, whom="it")
        self._begin(lambda tracker: tracker.start(settings, run))

    def log(self, step: int, values: Mapping[str, float], rows: Rows) -> None:
        if self._tracker is not None:
            self._begin(lambda tracker: tracker.log(step, values, rows))

    def end(self, state: str) -> None:
        self._state = state
        self._disk.close(END_S)

    def _begin(self, call: Callable[[Tracker], None]) -> None:
        self._disk.begin(partial(self._call, call), self._lose)

    def _lose(self) -> None:
        self._lost += 1
        if self._lost == 1:
            logger.warning("tracker %s is slower than the run, which continues: steps are missing there", self._name)

    def _end(self) -> None:
        self._call(lambda tracker: tracker.end(self._state))

    def _call(self, call: Callable[[Tracker], None]) -> None:
        """Runs on the thread."""
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:  # whatever it is: a tracker is not worth a run
            self._tracker = None
            logger.error(
                "tracker %s failed (%s: %s): the run continues without it", self._name, type(error).__name__, error
            )


# -- TensorBoard ------------------------------------------------------------------------------------------------------


class TensorBoard:
    """Writes event files to ``tensorboard/`` in the run's folder."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._refused = False

    def start(self, settings: Mapping[str, Any], run: TrackedRun) -> None:
        self._folder, self._step = run.folder / "tensorboard", run.step
        self._open()

    def log(self, step: int, values: Mapping[str, float], rows: Rows) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None and not self._open():
            return
        try:
            # One event for all values: TensorBoard computes its checksums in Python, byte by byte.
            summary = Summary(value=[Summary.Value(tag=tag(name), simple_value=x) for name, x in values.items()])
            self._writer._get_file_writer().add_summary(summary, step)
            self._writer.flush()  # a run that is killed and resumes has all steps up to its checkpoint
            self._step, self._refused = step, False
        except OSError as error:  # such as a full disk, which may have room later
            self._refuse(error)
            self._close()

    def end(self, state: str) -> None:
        self._close()

    def _open(self) -> bool:
        from torch.utils.tensorboard import SummaryWriter

        try:
            # TensorBoard discards steps from purge_step on, which are logged again after a resume.
            self._writer = SummaryWriter(str(self._folder), purge_step=self._step + 1 if self._step else None)
        except OSError as error:
            self._refuse(error)
        return self._writer is not None

    def _refuse(self, error: OSError) -> None:
        if not self._refused:
            logger.error("TensorBoard's file cannot be written (%s): the run continues without it", error)
        self._refused = True

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self._refuse(error)


@cache
def tag(name: str) -> str:
    """TensorBoard's tag of a metric: ``1_learning/reward/mean``.

    TensorBoard opens with all tags, in sections named by the text before the first slash, in alphabetical order, which
    numbers by value. Custom layouts are on a page of their own, which few open. So sections are
    numbered: first the metrics of learning that the console shows, then the groups of docs/metrics.md in their order.
    """
    metric = find(name)
    groups = list(GROUPS)
    group = "learning" if metric is None else metric.group
    if group == "learning" and metric is not None and metric.heading:
        return f"1_{group}/{name}"
    section = "learning_details" if group == "learning" else group
    return f"{2 + groups.index(group)}_{section}/{name}"


# -- Weights & Biases -------------------------------------------------------------------------------------------------


class WeightsAndBiases:
    """Logs to Weights & Biases: project ``WANDB_PROJECT`` or ``monarch_rl``, offline if ``WANDB_MODE=offline``.

    The id of the run is in ``wandb/id`` in its folder, so that a resumed run continues there. The first rollouts, and
    those of every :data:`TABLE_STEPS` steps, become tables.
    """

    TABLE_STEPS = 20

    def start(self, settings: Mapping[str, Any], run: TrackedRun) -> None:
        import wandb

        self._table_step = run.step
        id_file = run.folder / "wandb" / "id"
        if not (id_file.exists() and id_file.read_text()):
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(uuid.uuid4().hex[:12])  # random: folders in two places may have the same name
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "monarch_rl"),
            id=id_file.read_text(),
            name=run.name,
            dir=run.folder,
            config=dict(settings),
            resume="allow",
            # The console is the run's own (observe/console_relay.py), as are its signals.
            settings=wandb.Settings(console="off", silent=True),
        )
        # Evaluations next to training are logged after later steps, which W&B's own step refuses.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], rows: Rows) -> None:
        import wandb

        row: dict[str, Any] = {"step": step, **values}
        if step >= self._table_step and (episodes := rows()):
            self._table_step = step + self.TABLE_STEPS
            columns = ["group", "episode", "reward", "finish_reason", "prompt", "answer"]
            answers = [str((one.get("messages") or [{}])[-1].get("content", "")) for one in episodes]
            data = [[*map(one.get, columns[:-1]), answer] for one, answer in zip(episodes, answers, strict=True)]
            row["rollouts"] = wandb.Table(columns=columns, data=data)
        self._run.log(row)

    def end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)


# -- by name ----------------------------------------------------------------------------------------------------------

TRACKERS: dict[str, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "pip install tensorboard"),
    "wandb": (WeightsAndBiases, 'pip install "monarch_rl[wandb]"'),
}
"""The class of each tracker, and the command that installs the package of its name."""


def check_trackers(names: Iterable[str]) -> None:
    """Refuse names of trackers that do not exist, or whose package is not installed. Raises SettingsError."""
    names = list(names)
    for name in names:
        if name != NONE and name not in TRACKERS:
            raise SettingsError(f"track {name}: there is no such tracker; there are {', '.join([*TRACKERS, NONE])}")
        if name != NONE and importlib.util.find_spec(name) is None:
            raise SettingsError(f"track {name}: the package {name} is not installed: {TRACKERS[name][1]}")
    if NONE in names and len(names) > 1:
        raise SettingsError(f"track {' '.join(names)}: give {NONE} alone, or only names of trackers")


def make_trackers(names: Iterable[str]) -> dict[str, Tracker]:
    """The trackers with these names, checked by :func:`check_trackers`."""
    return {name: TRACKERS[name][0]() for name in names if name != NONE}
