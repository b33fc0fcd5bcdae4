"""What a run writes and prints: ``metrics.jsonl``, TensorBoard's file, ``rollouts.jsonl`` and the console.

A run without a folder (a simulation, most tests) has :class:`NoOutputs`, with the same methods.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_rl.checkpoint.folders import complete
from monarch_rl.episode.shard import TrainedEpisode
from monarch_rl.observe.console import Console, console_of, duration
from monarch_rl.observe.console_relay import existing_relay
from monarch_rl.observe.disk_thread import DiskThread, answers
from monarch_rl.observe.lines import LineFile
from monarch_rl.observe.metrics import FILE, Metrics
from monarch_rl.observe.registry import find
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.checkpoints import FOLDER as CHECKPOINTS
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
    status = None

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
