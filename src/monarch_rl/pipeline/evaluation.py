"""Evaluations of a run: all rollout workers roll out held-out items, between training steps or concurrently."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from monarch_rl.checkpoint.folders import Measurement, write_whole
from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.checkpoints import Checkpoints, NoCheckpoints
from monarch_rl.pipeline.failures import Failures
from monarch_rl.pipeline.outputs import NoOutputs, RunOutputs
from monarch_rl.pipeline.progress import Progress
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.pipeline.run_folder import BEST
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.pipeline.start import SET_UP_DEADLINE_S
from monarch_rl.rollout.evaluation import Evaluation, EvaluationPlan
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime import timeline
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.wait_registry import CONTROLLER
from monarch_rl.tasks.task import Task

logger = logging.getLogger("monarch_rl")

HELD_OUT_ITEM_S = 30.0
"""Seconds that a held-out episode may take on average, when others run concurrently."""


async def evaluate(
    workers: ActorPool[RolloutWorker], items: int, plan: EvaluationPlan, max_concurrent: int | None = None
) -> Evaluation:
    """Roll out the first ``items`` items of a held-out set, split among all workers.

    If a worker is lost meanwhile, its items go to the other workers, or to its replacement.

    Args:
        max_concurrent: episodes that a worker may run at once; None is as many as for training.
    """
    remaining, parts, lost = list(range(items)), list[Evaluation](), dict[int, RolloutWorker]()
    while remaining:
        workers.changed.clear()
        usable = {index: worker for index, worker in workers.handles.items() if id(worker) not in lost}
        if not usable:
            what = "a rollout worker to run the held-out items"
            await within(SET_UP_DEADLINE_S, workers.changed.wait(), what, on="controller")
            continue
        shares = dict(zip(usable, (remaining[rank :: len(usable)] for rank in range(len(usable))), strict=True))
        shares = {index: share for index, share in shares.items() if share}
        deadline = SET_UP_DEADLINE_S + HELD_OUT_ITEM_S * items * plan.samples / len(usable)

        def run(index: int, worker: RolloutWorker, shares: dict[int, list[int]] = shares) -> Awaitable[Evaluation]:
            return worker.evaluate.call_one(shares[index], plan, max_concurrent)

        asked = {index: usable[index] for index in shares}
        done = await workers.ask(deadline, "to run the held-out items", run, asked)
        parts += done.values()
        lost |= {id(worker): worker for index, worker in asked.items() if index not in done}
        remaining = sorted(item for index in asked.keys() - done.keys() for item in shares[index])
    return Evaluation.joined(parts)


def items_to_run(task: Task | None, held_out: str, most: int) -> int:
    """How many items of a held-out set to roll out: all of a named set, at most ``most`` of the first one (empty name).

    Raises ValueError if the task has no such set, or the set is empty.
    """
    if task is None:
        return most
    size = len(task.held_out_items(held_out))
    if not size:
        name = held_out or next(iter(task.held_out))
        raise ValueError(f"held-out set {name!r} of task {task.name} is empty: give it items, or do not evaluate on it")
    return size if held_out else min(most, size)


class BestResult:
    """Tracks the best evaluation result of a run, in ``best.json`` in its folder.

    Args:
        metrics: evaluation metrics, of which the first that an evaluation has decides from then on; the highest value
            wins, and the first of equal ones.
        folder: the run's folder; None writes nothing.
        known: best result so far of a resumed run, whose metric is kept; ignored if it is none of ``metrics``.
    """

    def __init__(self, metrics: Sequence[str], folder: Path | None, known: Measurement | None = None) -> None:
        self._metrics = metrics
        self._path = None if folder is None else folder / BEST
        self._refused = False
        self._disk: DiskThread | None = None
        self.best = known if known is not None and known.metric in metrics else None
        self.metric = "" if self.best is None else self.best.metric
        """The metric that decides; "" until an evaluation has one."""

    def measured(self, values: Mapping[str, float], version: int) -> Measurement | None:
        """What an evaluation with these metrics measured of ``version``; None if it has no metric that decides."""
        metric = next((name for name in (self.metric, *self._metrics) if name in values), None)
        if metric is None:
            return None
        if metric != self.metric:
            self.metric, self.best = metric, None
        return Measurement(metric, values[metric], version)

    def note(self, found: Measurement) -> bool:
        """Record an evaluation result; returns whether it is the new best."""
        if self.best is not None and found.value <= self.best.value:
            return False
        self.best = found
        if self._path is not None:
            if self._disk is None:
                self._disk = DiskThread("best.json", lambda: None)
            self._disk.begin(partial(self._write, self._path, self.best), lambda: None)
        return True

    def close(self) -> None:
        """Finish pending writes."""
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()

    def _write(self, path: Path, best: Measurement) -> None:
        try:
            write_whole(path, json.dumps(asdict(best)) + "\n")
            self._refused = False
        except OSError as error:
            if not self._refused:
                logger.error("%s cannot be written (%s); the run continues", path, error.strerror or error)
            self._refused = True


OnBest = Callable[[Measurement], Awaitable[None]]
"""Called after an evaluation that is better than all earlier ones."""


class Evaluations:
    """The evaluations of one run.

    Args:
        settings: the run's settings.
        requests: requests that a replica runs at once.
        task: the run's task, if it is known.
        outputs: writes and prints the results.
        best: tracks the best result so far.
        on_best: called for each new best result.
        checkpoints: record the result of their version.
        progress: reports evaluations that take long.
    """

    def __init__(
        self,
        settings: RunSettings,
        requests: int,
        workers: ActorPool[RolloutWorker],
        publisher: Publisher,
        failures: Failures,
        task: Task | None,
        outputs: RunOutputs | NoOutputs,
        best: BestResult,
        on_best: list[OnBest],
        checkpoints: Checkpoints | NoCheckpoints,
        progress: Progress,
    ) -> None:
        self._settings, self._requests, self._task = settings, requests, task
        self._workers, self._publisher, self._failures = workers, publisher, failures
        self._outputs, self._best, self._on_best, self._checkpoints = outputs, best, on_best, checkpoints
        self._progress = progress
        self._concurrent: asyncio.Task[Evaluation] | None = None
        """An evaluation that runs concurrently with training."""
        self._warned = False

    async def run(self, step: int, held_out: str = "") -> Evaluation:
        """Evaluate the newest version, once it is served. See :meth:`Run.evaluate`."""
        await self._publisher.wait_until_served()
        return await self._run(step, held_out)

    async def begin_concurrent(self, step: int) -> bool:
        """Start an evaluation concurrently with training. Returns False, without starting one, if the previous one is
        still running. Raises the error of the previous one."""
        if self._concurrent is not None and not self._concurrent.done():
            return False
        await self.end()
        self._concurrent = asyncio.ensure_future(self._run(step, concurrent=True))
        return True

    async def end(self) -> None:
        """Wait for the concurrent evaluation, if any. Raises its error."""
        concurrent, self._concurrent = self._concurrent, None
        if concurrent is not None:
            await concurrent  # waits: every wait of an evaluation has a deadline of its own

    def cancel(self) -> None:
        """Cancel the concurrent evaluation, if any."""
        if self._concurrent is not None:
            self._concurrent.cancel()

    async def _run(self, step: int, held_out: str = "", concurrent: bool = False) -> Evaluation:
        settings, run, results = self._settings.evaluation, self._settings, list[Evaluation]()
        measured = set[str]()
        for name in [held_out] if held_out else settings.sets or ("",):
            items = items_to_run(self._task, name, run.held_out)
            replicas, workers = len(self._publisher.replicas), len(self._workers.handles)
            max_concurrent = settings.max_concurrent(self._requests * replicas, workers) if concurrent else None
            evaluating = evaluate(self._workers, items, settings.plan(name, run.rollout.seed or 0), max_concurrent)
            if not step:
                self._outputs.note(f"evaluating {items} held-out items{f' of {name}' if name else ''} before training")
            reporting = self._progress.evaluation(self._outputs.when(step), items * settings.samples, concurrent)
            # Another lane than the controller's own: an evaluation may run next to training.
            running = timeline.span(f"evaluation{f' of {name}' if name else ''}", f"{CONTROLLER}, evaluations", step)
            async with reporting:
                # If publishing fails, no generator may be left to answer: that ends the evaluation.
                with running:
                    result = await self._publisher.unless_publishing_fails(evaluating)
            values = self._outputs.evaluation(result, step)
            await self._note(values, result, step)
            measured |= values.keys()
            results.append(self._failures.counted(result, step))
        if settings.best and not held_out and settings.best not in measured and not self._warned:
            self._warned = True
            logger.warning(
                "the best version is not tracked: --evaluation.best %s is no evaluation metric; the metrics are %s",
                settings.best,
                ", ".join(sorted(measured)),
            )
        return results[0]

    async def _note(self, values: dict[str, float], result: Evaluation, step: int) -> None:
        found = self._best.measured(values, result.versions[1] if result.versions else step)
        if found is None:
            return
        best = self._best.note(found)
        self._checkpoints.evaluated(found, best)
        for call in self._on_best if best else ():
            await call(found)  # waits: the callback sets its own deadlines
