"""What a run writes and prints: ``metrics.jsonl``, its trackers, ``rollouts/`` and the console.

A run without a folder (a simulation, most tests) has :class:`NoOutputs`, with the same methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from monarch_rl.observe.console import Console, console_of
from monarch_rl.observe.console_relay import existing_relay
from monarch_rl.observe.disk_thread import answers
from monarch_rl.observe.metrics import Metrics
from monarch_rl.observe.trackers import TrackedRun, Tracker, Trackers, make_trackers
from monarch_rl.pipeline.rollout_record import RolloutRecord
from monarch_rl.pipeline.settings import RunSettings, to_record
from monarch_rl.pipeline.start import Actors, logged_groups
from monarch_rl.rollout.evaluation import Evaluation

logger = logging.getLogger("monarch_rl")

TAKE_S = 1.0
"""Seconds that a checkpoint waits for the rows of workers."""


@contextmanager
def open_outputs(
    folder: Path | None,
    actors: Actors,
    s: RunSettings,
    version: int,
    seconds: float,
    warm_up_steps: Callable[[], int],
    own_trackers: Mapping[str, Tracker] = MappingProxyType({}),
) -> Iterator[RunOutputs | NoOutputs]:
    """The outputs of a run, whose files are closed after the block.

    Args:
        folder: the run's folder; None writes and prints nothing.
        version: version that the run starts or resumes from.
        seconds: duration of the run so far.
        warm_up_steps: returns the supervised steps so far: the version minus these is the step on the console.
        own_trackers: trackers besides those of ``s.track``, by name.
    """
    if folder is None:
        yield NoOutputs()
        return
    record = RolloutRecord(actors.trainer, actors.workers, folder, logged_groups(s), s.rollout.log_mib << 20)
    console = console_of(existing_relay(), s.steps)
    tracked = TrackedRun(folder.resolve().name, folder, version)
    trackers = Trackers(make_trackers(s.track) | dict(own_trackers), to_record(s), tracked)
    with trackers, Metrics(folder, seconds) as metrics, closing(record), console:  # trackers may take long to end
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
        """Take the rows of the episodes that have ended so far, before :meth:`flush`; at most :data:`TAKE_S` seconds,
        because a checkpoint waits for it."""
        await self._record.take(TAKE_S)

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

    def metrics(self, lost_spans: int = 0, timeline_cpu_s: float = 0.0) -> dict[str, float]:
        """Metrics of a step, named as in docs/metrics.md: lines that could not be written, and the record's cost, both
        with those of the timeline."""
        lost = self._metrics.lines.lost + self._record.lost + lost_spans
        return {"checkpoint/lost_lines": float(lost)} | self._record.metrics(timeline_cpu_s)

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

    def metrics(self, lost_spans: int = 0, timeline_cpu_s: float = 0.0) -> dict[str, float]:
        return {}

    def flush(self, limit_s: float | None = None) -> dict[str, int]:
        return {}
