"""What a run writes and prints: ``metrics.jsonl``, its trackers, ``rollouts/`` and the console.

A run without a folder (a simulation, most tests) has :class:`NoOutputs`, with the same methods.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_rl.checkpoint.folders import complete
from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.episode.shard import TokenRecord
from monarch_rl.observe.console import Console, console_of, duration
from monarch_rl.observe.console_relay import existing_relay
from monarch_rl.observe.disk_thread import DiskThread, answers
from monarch_rl.observe.metrics import FILE, Metrics
from monarch_rl.observe.pieces import PieceLog
from monarch_rl.observe.registry import find
from monarch_rl.observe.trackers import TrackedRun, Trackers, make_trackers
from monarch_rl.pipeline.actor_pool import ANSWER_DEADLINE_S, ActorPool, last_line
from monarch_rl.pipeline.checkpoints import FOLDER as CHECKPOINTS
from monarch_rl.pipeline.run_folder import ROLLOUTS
from monarch_rl.pipeline.settings import RunSettings, to_record
from monarch_rl.pipeline.start import Actors, logged_groups
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.rollout.transcripts import as_line, packed
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.trainer.actor import Trainer

logger = logging.getLogger("monarch_rl")


@contextmanager
def open_outputs(
    folder: Path | None,
    actors: Actors,
    s: RunSettings,
    version: int,
    seconds: float,
    warm_up_steps: Callable[[], int],
) -> Iterator[RunOutputs | NoOutputs]:
    """The outputs of a run, whose files are closed after the block.

    Args:
        folder: the run's folder; None writes and prints nothing.
        version: version that the run starts or resumes from.
        seconds: duration of the run so far.
        warm_up_steps: returns the supervised steps so far: the version minus these is the step on the console.
    """
    if folder is None:
        yield NoOutputs()
        return
    record = RolloutRecord(actors.trainer, actors.workers, folder, logged_groups(s), s.rollout.log_mib << 20)
    console = console_of(existing_relay(), s.steps)
    trackers = Trackers(make_trackers(s.track), to_record(s), TrackedRun(folder.resolve().name, folder, version))
    with Metrics(folder, seconds) as metrics, closing(record), trackers, console:
        yield RunOutputs(metrics, trackers, record, console, warm_up_steps)


class RunOutputs:
    """The open files of a run's folder, its trackers, and the console."""

    def __init__(
        self,
        metrics: Metrics,
        trackers: Trackers,
        record: RolloutRecord,
        console: Console,
        warm_up_steps: Callable[[], int],
    ) -> None:
        self._metrics, self._trackers, self._record, self._console = metrics, trackers, record, console
        self._warm_up_steps = warm_up_steps

    def note(self, text: str) -> None:
        """Print a line on the console."""
        self._console.note(text)

    def following_episodes(self) -> AbstractAsyncContextManager[None]:
        """Write the rows of episodes that end during the block."""
        return self._record.following()

    async def take_episodes(self) -> None:
        """Take the rows of the episodes that have ended so far, before :meth:`flush`."""
        await self._record.take()

    async def token_lines(self) -> list[str]:
        """Lines about the tokens of logged groups in the last trained batch, for :meth:`write`."""
        return await self._record.token_lines()

    def write(self, version: int, values: Mapping[str, float], token_lines: list[str]) -> None:
        """Write metrics and token lines of the step that produced ``version``. Raises ValueError if a metric is not
        registered."""
        self._metrics.log(version, values)
        self._trackers.log(version, values, self._record.newest())
        self._record.append_tokens(token_lines)

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show a step of reinforcement learning, 1, 2, ..., on the console."""
        self._console.show(step, values)

    def show_warm_up(self, step: int, steps: int, loss: float) -> None:
        """Show a supervised step on the console."""
        self._console.show_warm_up(step, steps, loss)

    def evaluation(self, result: Evaluation, version: int) -> dict[str, float]:
        """Write and print the evaluation of ``version``; returns its metrics."""
        values, held_out = result.metrics(), result.plan.held_out
        self._metrics.log(version, values)
        self._trackers.log(version, values)
        shown = dict(values)
        if "held_out/accuracy" in values:
            shown.pop("held_out/reward", None)  # one number per evaluation
        self._console.remember(shown, self._step(version))
        self._console.note(f"{' on '.join(filter(None, (self.when(version), held_out)))}, {result}")
        return values

    def when(self, version: int) -> str:
        """When ``version`` was made, in the steps of the console."""
        step = self._step(version)
        return f"after step {step}" if step else "after the warm-up" if version else "before training"

    def _step(self, version: int) -> int:
        return max(0, version - self._warm_up_steps())

    @property
    def status(self) -> Callable[[str], None] | None:
        """Shows what is waited for in a terminal's last line; None without a terminal."""
        return self._console.status if self._console.on_terminal else None

    def metrics(self, lost_spans: int = 0) -> dict[str, float]:
        """Metrics of a step, named as in docs/metrics.md: lines that could not be written, with those of the timeline,
        and the record's cost."""
        lost = self._metrics.lines.lost + self._record.lost + lost_spans
        return {"checkpoint/lost_lines": float(lost)} | self._record.metrics()

    @property
    def seconds(self) -> float:
        """Duration of the run so far."""
        return self._metrics.seconds

    def flush(self, limit_s: float | None = None) -> dict[str, int]:
        """Flush the files to disk; returns their sizes in bytes, by path in the run's folder: of a log in pieces, the
        newest one. Raises OSError.

        Args:
            limit_s: seconds for the flush; None is the short limit for a flush that delays a step.
        """
        asked: list[Future[Any]] = [self._metrics.position(), self._record.positions()]
        metrics, pieces = answers(asked, limit_s)
        return {self._metrics.path.name: metrics} | pieces


class NoOutputs:
    """The outputs of a run without a folder: nothing is written or printed."""

    seconds = 0.0
    status = None

    def note(self, text: str) -> None:
        pass

    def following_episodes(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def take_episodes(self) -> None:
        pass

    async def token_lines(self) -> list[str]:
        return []

    def write(self, version: int, values: Mapping[str, float], token_lines: list[str]) -> None:
        pass

    def show(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def show_warm_up(self, step: int, steps: int, loss: float) -> None:
        pass

    def evaluation(self, result: Evaluation, version: int) -> dict[str, float]:
        return result.metrics()

    def when(self, version: int) -> str:
        return ""

    def metrics(self, lost_spans: int = 0) -> dict[str, float]:
        return {}

    def flush(self, limit_s: float | None = None) -> dict[str, int]:
        return {}


# -- the last lines of a run ------------------------------------------------------------------------------------------


def closing_lines(
    folder: Path, s: RunSettings, steps: int, warm_up_steps: int = 0, model: Path | None = None
) -> list[str]:
    """The last lines of a run: what it did, and the commands to look at it, use its model and continue it.

    Args:
        folder: the run's folder, whose files are closed.
        steps: steps made in all, without the supervised ones.
        model: folder of the model that was saved at the end, if one was.
    """
    metrics = _Ending.read(folder / FILE, s.evaluation.best_metrics)
    done = f"{steps} step{'s' * (steps != 1)} in {duration(metrics.seconds)}"
    lines = {"done": "; ".join([done, *metrics.held_out(warm_up_steps)])}
    lines["files"] = f"{'metrics, rollouts and the model' if model else 'metrics and rollouts'} are in {folder}"
    if "tensorboard" in s.track:
        lines["look"] = f"tensorboard --logdir {folder}"
    lines["table"] = f"monarch-rl convert {folder} --to csv"
    checkpoint = bool(complete(folder / CHECKPOINTS))
    if model or checkpoint:
        lines["model"] = f"python tools/export.py {folder} OUT"
        lines["evaluate"] = f"python tools/evaluate.py {folder} --task {sys.argv[0]}"
    if checkpoint:
        lines["resume"] = f"the same command with --resume {folder} --steps {2 * s.steps}"
    width = max(map(len, lines)) + 2
    return [f"{name + ':':{width}}{text}" for name, text in lines.items()]


@dataclass(frozen=True)
class _Ending:
    """What the lines of ``metrics.jsonl`` say about a whole run."""

    seconds: float
    name: str
    first: dict[str, Any]
    last: dict[str, Any]
    """The lines of the first and of the last evaluation, by ``name``; empty without evaluations."""

    @classmethod
    def read(cls, path: Path, metrics: Sequence[str]) -> _Ending:
        """Read ``path``, if it exists; of ``metrics``, the first that an evaluation has counts."""
        found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        line = b"{}"
        with suppress(FileNotFoundError), path.open("rb") as file:
            for line in file:
                if b'"held_out/' in line:
                    values = json.loads(line)
                    for name in metrics:
                        if values.get(name) is not None:
                            found[name] = (found.get(name, (values,))[0], values)
        name = next((name for name in metrics if name in found), "")
        first, last = found.get(name, ({}, {}))
        return cls(json.loads(line).get("seconds", 0.0), name, first, last)

    def held_out(self, warm_up_steps: int) -> list[str]:
        """The first result, and the last one with its interval, as one text; none without evaluations."""
        if not self.name:
            return []

        def text(values: dict[str, Any], interval: bool) -> str:
            metric = find(f"held_out/{self.name.rpartition('/')[2]}")  # a named set's have the same form
            form = metric.form if metric is not None and metric.form else "{:.3g}"
            shown = f"{form.format(values[self.name])} @{max(0, values['step'] - warm_up_steps)}"
            low, high = (values.get(f"{self.name}_{end}") for end in ("low", "high"))
            return shown if low is None or not interval else f"{shown} [{form.format(low)}, {form.format(high)}]"

        label = self.name.removeprefix("held_out/").replace("/", " ")
        first = [] if self.first["step"] == self.last["step"] else [text(self.first, interval=False)]
        return [f"held-out {label} {' -> '.join([*first, text(self.last, interval=True)])}"]


# -- rollouts/: episodes that ended, and the trainer's values of logged groups' tokens (docs/run_folder.md) -----------

TAKE_S = 2.0
"""Seconds between two calls that take the workers' rows. A worker that is lost has not handed over more than that."""


NEWEST = 64
"""Rows kept for trackers."""


class RolloutRecord:
    """Writes the rows of episodes that workers hand over, and the token records of trainer ranks.

    Args:
        folder: the run's folder.
        logged: the groups that are recorded with their tokens.
        nbytes: maximum size of both logs together.
    """

    def __init__(
        self, trainer: Trainer, workers: ActorPool[RolloutWorker], folder: Path, logged: LoggedGroups, nbytes: int
    ) -> None:
        self._trainer, self._workers, self._logged = trainer, workers, logged
        self.episodes = PieceLog(folder / ROLLOUTS, "episodes", nbytes // 2)
        self.tokens = PieceLog(folder / ROLLOUTS, "tokens", nbytes // 2)
        self._disk = DiskThread("rollouts", self._close)
        self._taking = asyncio.Lock()
        self._newest: deque[str] = deque(maxlen=NEWEST)
        self._failed = False
        """Whether a failure to take rows has been logged."""
        self._skipped, self._cpu_s, self._reported_cpu_s = 0, 0.0, 0.0

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Take the workers' rows every :data:`TAKE_S` during the block, and once more at its end."""
        ended = asyncio.Event()
        taking = asyncio.create_task(self._take_until(ended))
        try:
            yield
        finally:
            ended.set()
            await asyncio.wait([taking])  # waits: for calls with a deadline

    async def _take_until(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), TAKE_S)
            await self.take()

    async def take(self) -> None:
        """Take the rows of all workers, and queue them to be written. Never raises: rows are not worth a run."""
        async with self._taking:  # waits: for a call with a deadline; a checkpoint needs the rows that it brings, too
            try:
                answers = await self._workers.ask(
                    ANSWER_DEADLINE_S, "to hand over its rows", lambda _, worker: worker.take_rows.call_one()
                )
            except Exception as error:
                if not self._failed:
                    logger.error("the rows of ended episodes cannot be taken: %s", last_line(error))
                self._failed = True
                return
        for rows in answers.values():
            self._skipped += rows.skipped
            self._cpu_s += rows.cpu_s
            if rows.lost:
                self.episodes.lose(rows.lost, "workers end episodes faster than the run writes them")
            if rows.lines:
                self._newest.extend(rows.lines)
                self._append(self.episodes, rows.lines)

    def newest(self) -> Callable[[], list[dict[str, Any]]]:
        """Returns a function that parses the newest rows of episodes that were sampled for training."""
        lines = tuple(self._newest)
        return lambda: [row for row in map(json.loads, lines) if row["kind"] == "train"]

    async def token_lines(self) -> list[str]:
        """Lines of the sequences of logged groups that the last step trained, for :meth:`append_tokens`."""
        if not self._logged.groups:
            return []
        asking = self._trainer.token_records.call()
        answers = await within(CALL_DEADLINE_S, asking, "the records of trained tokens", on="trainer ranks")
        with self._timed():
            # Tensor-parallel ranks return the same records.
            found = {(one.group_id, one.attempt, one.place): one for of_rank in answers.values() for one in of_rank}
            return [_token_line(found[key]) for key in sorted(found)]

    def append_tokens(self, lines: list[str]) -> None:
        """Write lines that :meth:`token_lines` returned."""
        if lines:
            self._append(self.tokens, lines)

    @property
    def lost(self) -> int:
        """Number of lines that are not on disk."""
        return self.episodes.lost + self.tokens.lost

    def metrics(self) -> dict[str, float]:
        """Metrics of a step, named as in docs/metrics.md."""
        cpu_s, self._reported_cpu_s = self._cpu_s - self._reported_cpu_s, self._cpu_s
        return {"record/cpu_s": cpu_s, "record/skipped": float(self._skipped)}

    def positions(self) -> Future[dict[str, int]]:
        """Size of the newest piece of each log, by path in the run's folder, once all queued lines are on disk."""
        return self._disk.ask(self._positions)

    def close(self) -> None:
        """Finish pending writes."""
        self._disk.close()

    def _append(self, log: PieceLog, lines: list[str]) -> None:
        def write() -> None:
            with self._timed():
                log.append(*lines)

        self._disk.begin(write, lambda: log.lose(len(lines), "the disk is slower than the run"))

    def _positions(self) -> dict[str, int]:
        return {f"{ROLLOUTS}/{piece}": nbytes for piece, nbytes in (self.episodes.position(), self.tokens.position())}

    def _close(self) -> None:
        self.episodes.close()
        self.tokens.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            self._cpu_s += time.thread_time() - started


def _token_line(record: TokenRecord) -> str:
    row = {"step": record.step, "group": record.group_id, "attempt": record.attempt, "episode": record.place}
    arrays = {name: packed(values, values.dtype.newbyteorder("<").str) for name, values in record.arrays.items()}
    return as_line({**row, "advantage": record.advantage, **arrays})
