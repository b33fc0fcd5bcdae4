"""Evaluations of a run: held-out items, played by all rollout workers together, between steps or beside them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from monarch_rl.checkpoint.folders import Measurement, write_whole
from monarch_rl.observe.console import Console
from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.metrics import Metrics
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.checkpoints import Checkpoints
from monarch_rl.pipeline.failures import Failures
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.pipeline.run_folder import BEST
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.pipeline.start import SET_UP_DEADLINE_S
from monarch_rl.rollout.evaluation import Evaluation, EvaluationPlan
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import within
from monarch_rl.tasks.task import Task

logger = logging.getLogger("monarch_rl")

HELD_OUT_ITEM_S = 30.0
"""Seconds that a held-out episode may take on average, played beside others."""


async def evaluate(
    workers: ActorPool[RolloutWorker], items: int, plan: EvaluationPlan, places: int | None = None
) -> Evaluation:
    """Play the first ``items`` items of a held-out set, shared by all workers.

    If a worker is lost meanwhile, the others play its items, or the one that takes its place does.

    Args:
        places: episodes that a worker may play at once; None is as many as it plays for training.
    """
    unplayed, parts, lost = list(range(items)), list[Evaluation](), dict[int, RolloutWorker]()
    while unplayed:
        workers.changed.clear()
        players = {index: worker for index, worker in workers.handles.items() if id(worker) not in lost}
        if not players:
            what = "a rollout worker to play the held-out items"
            await within(SET_UP_DEADLINE_S, workers.changed.wait(), what, on="controller")
            continue
        shares = dict(zip(players, (unplayed[rank :: len(players)] for rank in range(len(players))), strict=True))
        shares = {index: share for index, share in shares.items() if share}
        deadline = SET_UP_DEADLINE_S + HELD_OUT_ITEM_S * items * plan.samples / len(players)

        def play(index: int, worker: RolloutWorker, shares: dict[int, list[int]] = shares) -> Awaitable[Evaluation]:
            return worker.evaluate.call_one(shares[index], plan, places)

        asked = {index: players[index] for index in shares}
        played = await workers.ask(deadline, "to play the held-out items", play, asked)
        parts += played.values()
        lost |= {id(worker): worker for index, worker in asked.items() if index not in played}
        unplayed = sorted(item for index in asked.keys() - played.keys() for item in shares[index])
    return Evaluation.joined(parts)


def items_to_run(task: Task | None, held_out: str, most: int) -> int:
    """How many items of a held-out set to play: all of a named one, of the first one (the name is empty) ``most``.

    Raises ValueError if the task has no such set, or nothing is in it.
    """
    if task is None:
        return most
    size = len(task.held_out_items(held_out))
    if not size:
        name = held_out or next(iter(task.held_out))
        raise ValueError(f"held-out set {name!r} of task {task.name} is empty: give it items, or do not evaluate it")
    return size if held_out else min(most, size)


class BestResult:
    """Remembers the best result of a run, in ``best.json`` of its folder.

    Args:
        metric: of an evaluation; the highest value wins, and of equal ones the first.
        folder: of the run; None writes nothing.
        known: the best result so far of a run that goes on; it counts if it is of the same metric.
    """

    def __init__(self, metric: str, folder: Path | None, known: Measurement | None = None) -> None:
        self.metric = metric
        self._path = None if folder is None else folder / BEST
        self._refused = False
        self._disk: DiskThread | None = None
        self.best = known if known is not None and known.metric == metric else None

    def note(self, found: Measurement) -> bool:
        """Take what an evaluation found; returns whether it is the new best."""
        if self.best is not None and found.value <= self.best.value:
            return False
        self.best = found
        if self._path is not None:
            if self._disk is None:
                self._disk = DiskThread("best.json", lambda: None)
            self._disk.begin(partial(self._write, self._path, self.best), lambda: None)
        return True

    def close(self) -> None:
        """Write what is left."""
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()

    def _write(self, path: Path, best: Measurement) -> None:
        try:
            write_whole(path, json.dumps(asdict(best)) + "\n")
            self._refused = False
        except OSError as error:
            if not self._refused:
                logger.error("%s cannot be written (%s): the run goes on without", path, error.strerror or error)
            self._refused = True


@dataclass(frozen=True)
class Shown:
    """Where results are written and shown; None is nowhere."""

    metrics: Metrics | None
    console: Console | None

    def evaluation(self, result: Evaluation, step: int) -> dict[str, float]:
        """Write and show how held-out items were played after ``step``; returns the metrics."""
        values, held_out = result.metrics(), result.plan.held_out
        if self.metrics is not None:
            self.metrics.log(step, values)
        if self.console is not None:
            self.console.remember(values)
            when = f"after step {step}" if step else "before training"
            self.console.note(f"{' on '.join(filter(None, (when, held_out)))}, {result}")
        return values


OnBest = Callable[[Measurement], Awaitable[None]]
"""Called after an evaluation that was better than all before."""


class Evaluations:
    """The evaluations of one run.

    Args:
        settings: of the run.
        requests: that a replica runs at once.
        task: what is played, if it is known.
        show: writes and shows a result and the step after which it was made; returns its metrics.
        best: what was best so far.
        on_best: called for a new best result.
        checkpoints: in which the result of a version is noted.
    """

    def __init__(
        self,
        settings: RunSettings,
        requests: int,
        workers: ActorPool[RolloutWorker],
        publisher: Publisher,
        failures: Failures,
        task: Task | None,
        show: Callable[[Evaluation, int], dict[str, float]],
        best: BestResult,
        on_best: list[OnBest],
        checkpoints: Checkpoints | None,
    ) -> None:
        self._settings, self._requests, self._task = settings, requests, task
        self._workers, self._publisher, self._failures = workers, publisher, failures
        self._show, self._best, self._on_best, self._checkpoints = show, best, on_best, checkpoints
        self._beside: asyncio.Task[Evaluation] | None = None
        """An evaluation that goes on while training does."""
        self._warned = False

    async def play(self, step: int, held_out: str = "") -> Evaluation:
        """Evaluate the newest version, once it is served. See :meth:`Run.evaluate`."""
        await self._publisher.settled()
        return await self._play(step, held_out)

    async def begin_beside(self, step: int) -> bool:
        """Begin an evaluation and return; False if the one before still goes on. Raises what that one raised."""
        if self._beside is not None and not self._beside.done():
            return False
        await self.end()
        self._beside = asyncio.ensure_future(self._play(step, beside=True))
        return True

    async def end(self) -> None:
        """Wait for an evaluation that goes on beside training. Raises what it raises."""
        beside, self._beside = self._beside, None
        if beside is not None:
            await beside  # waits: every wait of an evaluation has a deadline of its own

    def cancel(self) -> None:
        """Give up an evaluation that goes on beside training."""
        if self._beside is not None:
            self._beside.cancel()

    async def _play(self, step: int, held_out: str = "", beside: bool = False) -> Evaluation:
        settings, run, results = self._settings.evaluation, self._settings, list[Evaluation]()
        measured = set[str]()
        for name in [held_out] if held_out else settings.sets or ("",):
            items = items_to_run(self._task, name, run.held_out)
            replicas, workers = len(self._publisher.generators), len(self._workers.handles)
            places = settings.places(self._requests * replicas, workers) if beside else None
            # A version that cannot be delivered ends the evaluation, too.
            playing = evaluate(self._workers, items, settings.plan(name, run.rollout.seed or 0), places)
            result = await self._publisher.or_failed(playing)
            values = self._show(result, step)
            await self._note(values, result, step)
            measured |= values.keys()
            results.append(self._failures.counted(result, step))
        if not held_out and settings.best_metric not in measured and not self._warned:
            self._warned = True
            logger.warning(
                "no best version is remembered: %s (--evaluation.best) is no metric of an evaluation; these are: %s",
                *(settings.best_metric, ", ".join(sorted(measured))),
            )
        return results[0]

    async def _note(self, values: dict[str, float], result: Evaluation, step: int) -> None:
        value = values.get(self._best.metric)
        if value is None:
            return
        found = Measurement(self._best.metric, value, result.versions[1] if result.versions else step)
        best = self._best.note(found)
        if self._checkpoints is not None:
            self._checkpoints.evaluated(found, best)
        for call in self._on_best if best else ():
            await call(found)  # waits: its own affair
