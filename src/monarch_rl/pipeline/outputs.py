"""What a run writes and prints: ``metrics.jsonl``, TensorBoard's file, ``rollouts.jsonl`` and the console.

A run without a folder (a simulation, most tests) has :class:`NoOutputs`, with the same methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from monarch_rl.episode.shard import TrainedEpisode
from monarch_rl.observe.console import Console, console_of
from monarch_rl.observe.console_relay import existing_relay
from monarch_rl.observe.disk_thread import DiskThread, answers
from monarch_rl.observe.lines import LineFile
from monarch_rl.observe.metrics import Metrics
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.pipeline.start import Actors
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.trainer.actor import Trainer


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
    rollout_log = RolloutLog(
        actors.trainer,
        actors.workers,
        folder / "rollouts.jsonl",
        groups=s.rollout.logged_groups,
        seed=s.rollout.seed or 0,
        again=s.buffer.replay > 1,
    )
    console = console_of(existing_relay(), s.steps)
    with Metrics(folder, version, seconds) as metrics, closing(rollout_log), console:
        yield RunOutputs(metrics, rollout_log, console, warm_up_steps)


class RunOutputs:
    """The open files of a run's folder, and the console."""

    def __init__(
        self, metrics: Metrics, rollouts: RolloutLog, console: Console, warm_up_steps: Callable[[], int]
    ) -> None:
        self._metrics, self._rollouts, self._console = metrics, rollouts, console
        self._warm_up_steps = warm_up_steps

    def note(self, text: str) -> None:
        """Print a line on the console."""
        self._console.note(text)

    async def sample_rollouts(self) -> list[dict[str, Any]]:
        """Rows of groups chosen at random from the last trained batch, for :meth:`write`."""
        return await self._rollouts.gather()

    def write(self, version: int, values: Mapping[str, float], rollouts: list[dict[str, Any]]) -> None:
        """Write metrics and sampled rollouts of the step that produced ``version``. Raises ValueError if a metric is
        not registered."""
        self._metrics.log(version, values)
        self._rollouts.append(rollouts)

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
        shown = dict(values)
        if "held_out/accuracy" in values:
            shown.pop("held_out/reward", None)  # one number per evaluation
        self._console.remember(shown)
        self._console.note(f"{' on '.join(filter(None, (self.when(version), held_out)))}, {result}")
        return values

    def when(self, version: int) -> str:
        """When ``version`` was made, in the steps of the console."""
        step = version - self._warm_up_steps()
        return f"after step {step}" if step else "after the warm-up" if version else "before training"

    def metrics(self, lost_spans: int = 0) -> dict[str, float]:
        """Metrics, named as in docs/metrics.md: lines that could not be written, with those of the timeline."""
        return {"checkpoint/lost_lines": float(self._metrics.lines.lost + self._rollouts.lines.lost + lost_spans)}

    @property
    def seconds(self) -> float:
        """Duration of the run so far."""
        return self._metrics.seconds

    def flush(self, limit_s: float | None = None) -> dict[str, int]:
        """Flush the files to disk; returns their sizes in bytes, by name. Raises OSError.

        Args:
            limit_s: seconds for the flush; None is the short limit for a flush that delays a step.
        """
        names = self._metrics.path.name, self._rollouts.lines.path.name
        sizes = answers([self._metrics.position(), self._rollouts.position()], limit_s)
        return dict(zip(names, sizes, strict=True))


class NoOutputs:
    """The outputs of a run without a folder: nothing is written or printed."""

    seconds = 0.0

    def note(self, text: str) -> None:
        pass

    async def sample_rollouts(self) -> list[dict[str, Any]]:
        return []

    def write(self, version: int, values: Mapping[str, float], rollouts: list[dict[str, Any]]) -> None:
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


# -- rollouts.jsonl: a random sample of the groups of each trained batch, with their full details ----------------------


class RolloutLog:
    """Logs groups chosen at random from the batch of each step.

    Trainer ranks have the trained tokens with their advantages; the worker that ran a group has its messages.

    Args:
        path: the file; lines are appended.
        groups: number of groups per step; 0 writes nothing.
        seed: seed of the choice.
        again: whether groups may be trained more than once (``buffer.replay``).
    """

    def __init__(
        self,
        trainer: Trainer,
        workers: ActorPool[RolloutWorker],
        path: Path,
        groups: int,
        seed: int = 0,
        again: bool = False,
    ) -> None:
        self._trainer, self._workers = trainer, workers
        self.lines = LineFile(path)
        self._disk = DiskThread("rollouts", self.lines.close)
        self._groups, self._seed, self._again = groups, seed, again

    async def gather(self) -> list[dict[str, Any]]:
        """Rows of the groups chosen from the last trained batch."""
        return await self._rows(await self._trained()) if self._groups else []

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Write rows that :meth:`gather` returned."""
        self._disk.begin(
            lambda: self.lines.append(*map(json.dumps, rows)),
            lambda: self.lines.lose(len(rows), "the disk is slower than the run"),
        )

    def position(self) -> Future[int]:
        """Size of the file in bytes, as ``LineFile.position``, once all rows appended so far are on disk."""
        return self._disk.ask(self.lines.position)

    def close(self) -> None:
        """Finish pending writes."""
        self._disk.close()

    async def _trained(self) -> list[TrainedEpisode]:
        asking = self._trainer.trained_episodes.call(self._groups, self._seed)
        answers = await within(CALL_DEADLINE_S, asking, "the episodes that were trained", on="trainer ranks")
        # Tensor-parallel ranks return the same episodes.
        episodes = {(one.group_id, one.place): one for of_rank in answers.values() for one in of_rank}
        return [episodes[key] for key in sorted(episodes)]

    async def _rows(self, trained: list[TrainedEpisode]) -> list[dict[str, Any]]:
        """The rows of episodes, in their order. If an episode's worker is lost, another one makes the row, without
        messages."""
        what = "to return rollouts"
        answers = await self._workers.ask(
            CALL_DEADLINE_S, what, lambda _, worker: worker.rollouts.call_one(trained, True, self._again)
        )
        rows = {(row["group"], row["episode"]): row for of_worker in answers.values() for row in of_worker}
        missing = [one for one in trained if (one.group_id, one.place) not in rows]
        others = dict(list(self._workers.handles.items())[:1]) if missing else {}
        more = await self._workers.ask(
            CALL_DEADLINE_S, what, lambda _, worker: worker.rollouts.call_one(missing, False, self._again), others
        )
        rows |= {(row["group"], row["episode"]): row for of_worker in more.values() for row in of_worker}
        return [rows[key] for one in trained if (key := (one.group_id, one.place)) in rows]
