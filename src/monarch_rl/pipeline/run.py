"""A training run: its actors, its versions, its metrics. What a recipe is written with.

    async def train(run: Run, s: Settings) -> None:
        await run.start(task(s), advantage=dr_grpo, objective=...)
        async for step in run.steps(s.steps):
            figures = await run.update()
            await run.publish()
            await run.log(figures)

    launch(train, tyro.cli(Settings), task)

Rollouts go on all the time between the first and the last step; the buffer bounds how stale a trained token may be. The
simulator, tests and benchmarks run the same :class:`Run` over actors that they start themselves (:meth:`Run.begin`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from monarch_rl.algorithms.advantages import Advantage
from monarch_rl.buffer.ledger import Counts
from monarch_rl.observe.console import Console
from monarch_rl.observe.metrics import Metrics
from monarch_rl.pipeline.actors import Actors, start_actors
from monarch_rl.pipeline.evaluation import evaluate, items_to_play
from monarch_rl.pipeline.failures import EpisodesFail, Failures
from monarch_rl.pipeline.observer import Observer
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.pipeline.recovery import Recovery
from monarch_rl.pipeline.settings import RunSettings, check, resolve
from monarch_rl.pipeline.start import PRELOADS, replica_updates, save, schedule, served_dtype, update
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.runtime.by_value import ByValue, register_modules
from monarch_rl.runtime.cluster import Cluster, devices, launch_cluster
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, Patience, within
from monarch_rl.runtime.heap import freeze_heap
from monarch_rl.runtime.watch import Watch, watched
from monarch_rl.tasks.task import Task
from monarch_rl.trainer.objective import Objective

S = TypeVar("S", bound=RunSettings)


@dataclass(frozen=True)
class _Parts:
    """What a run consists of once its actors are there."""

    actors: Actors
    publisher: Publisher
    observer: Observer
    recovery: Recovery
    failures: Failures
    watch: Watch | None
    metrics: Metrics | None
    console: Console | None
    task: Task | None
    """What is played, if it is known here."""

    def note(self, text: str) -> None:
        """Show a line."""
        if self.console is not None:
            self.console.note(text)

    def show(self, result: Evaluation, version: int, held_out: str) -> None:
        """Log and show how held-out items were played."""
        values = result.metrics(held_out)
        if self.metrics is not None:
            self.metrics.log(version, values)
        if self.console is not None:
            self.console.remember(values)
        when = f"after step {version}" if version else "before training"
        self.note(f"{' on '.join(filter(None, (when, held_out)))}: {result}")


class Run:
    """One run, from its first actor to its last metric. Open with :meth:`open`; use from one task.

    Args:
        settings: of the run.
        lifetimes: what is entered here ends with the run.
        cluster: where actors are spawned, and whose processes are watched; None for actors that live in this process.
        folder: of the run, for metrics, rollouts, reports and the model; None writes and prints nothing.
    """

    def __init__(
        self,
        settings: RunSettings,
        lifetimes: AsyncExitStack,
        cluster: Cluster | None = None,
        folder: Path | None = None,
    ) -> None:
        self.settings, self.folder = settings, folder
        self.version = 0
        """The policy version: batches trained so far."""
        self.saved: Path | None = None
        """Where the model was saved last."""
        self._lifetimes, self._cluster = lifetimes, cluster
        self._task = asyncio.current_task()
        self._begun: _Parts | None = None
        self._rollouts: AsyncExitStack | None = None
        """Open while rollout workers play for training."""
        self._rollouts_ended = False
        self._patience = _patience(settings, on_gpu=cluster is not None and cluster.devices.kind == "cuda")

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: RunSettings,
        cluster: Cluster | None = None,
        folder: Path | None = None,
    ) -> AsyncIterator[Run]:
        """A run for the block. At the end rollouts stop, and files are closed; actors end with the cluster.

        Raises:
            Stalled: the run could not go on; says who waited for whom.
            AllActorsLost: all generators or all rollout workers were lost.
            EpisodesFail: no episode can be used: all held-out items fail, or all groups are dropped (docs/failures.md).
            PublishError: a version reached no generator.
        """
        async with AsyncExitStack() as lifetimes:
            run = cls(settings, lifetimes, cluster, folder)
            yield run
            await run._end_rollouts()  # a recipe may leave its loop early

    @property
    def _parts(self) -> _Parts:
        if self._begun is None:
            raise RuntimeError("the run has no actors yet: await run.start(...) first")
        return self._begun

    @property
    def actors(self) -> Actors:
        """Handles of all actors."""
        return self._parts.actors

    @property
    def publisher(self) -> Publisher:
        """What takes new versions to the generators."""
        return self._parts.publisher

    # -- start -----------------------------------------------------------------------------------------------------

    async def start(self, task: Task, *, advantage: Advantage, objective: Objective) -> None:
        """Start all actors, serve the model as version 0, and watch over the processes from here on.

        Args:
            task: what rollout workers play, and how it is rewarded.
            advantage: rewards of a group, float32[G], to the advantages of its episodes, float32[G].
            objective: the loss of a micro-batch; see :data:`monarch_rl.trainer.objective.Objective`.

        Raises:
            ValueError: settings that cannot work, before anything is spawned; names them.
            TypeError: the task cannot be sent to other processes; says why.
        """
        if self._cluster is None:
            raise RuntimeError("start() spawns actors: open the run with a cluster, or begin() with actors")
        self._check_first_start()
        model = check(self.settings, self._cluster.devices, task)
        settings = resolve(self.settings, self._cluster.devices, model)
        register_modules()
        handed = ByValue(task, f"task {task.name}")
        await self.begin(await start_actors(self._cluster, settings, handed, model, advantage, objective), task)
        freeze_heap()

    async def begin(self, actors: Actors, task: Task | None = None) -> None:
        """As :meth:`start`, with actors that are running already."""
        self._check_first_start()
        s, folder = self.settings, self.folder
        publisher = await Publisher.connect(
            actors.trainer,
            actors.generators.handles,
            actors.buffer,
            s.transfers,
            "float32" if self._cluster is None else served_dtype(s.generator, self._cluster),
            replica_updates(actors.workers),
        )
        await publisher.publish(0)  # nothing is drawn before the served weights are known to be the trainer's
        await publisher.settled()
        rollouts = Path(os.devnull) if folder is None else folder / "rollouts.jsonl"
        observer = Observer(publisher, actors.workers, actors.buffer, rollouts)
        recovery = Recovery(actors.generators, actors.workers, publisher, actors.buffer, s.recovery, folder)
        failures = Failures(actors.buffer, s.stall_s)
        enter = self._lifetimes.enter_context
        metrics = None if folder is None else enter(Metrics(folder))
        console = None if folder is None else enter(Console(s.steps))
        watch = None
        if self._cluster is not None and folder is not None:
            watching = watched(self._cluster, folder, s.stall_s, recovery.recover)
            watch = await self._lifetimes.enter_async_context(watching)
        await self._lifetimes.enter_async_context(recovery.supervising(failures.follow()))
        begun = _Parts(actors, publisher, observer, recovery, failures, watch, metrics, console, task)
        await self._lifetimes.enter_async_context(failures.summed_up(observer, begun.note))
        self._begun = begun

    def _check_first_start(self) -> None:
        if self._begun is not None:
            raise RuntimeError("the run has its actors already: start it once")
        if asyncio.current_task() is not self._task:
            raise RuntimeError("await run.start() in the task that opened the run, not in wait_for() or create_task()")

    # -- the loop --------------------------------------------------------------------------------------------------

    async def steps(self, count: int) -> AsyncIterator[int]:
        """Yields 1 to ``count``, one for each optimiser step to make. Rollout workers play from the first to the last.

        When the last step is done, no more is generated, and the newest version is served. Can be used once.
        """
        if self._rollouts is not None or self.version:
            raise RuntimeError("run.steps() can be used once: the buffer is closed after the last step")
        self._rollouts = AsyncExitStack()
        await self._rollouts.enter_async_context(self._parts.recovery.rolling_out())
        await self._parts.observer.begin()
        for step in range(1, count + 1):
            yield step
        await self._end_rollouts()

    async def update(self) -> list[dict[str, float]]:
        """Wait for the next batch and make one optimiser step, which makes the next version; metrics by trainer rank.

        Raises:
            DeadlineExceeded: batch and update took longer than ``update_deadline_s``; says what is missing.
        """
        actors = self.actors
        if self._rollouts is None:
            raise RuntimeError("no batch can come: call run.update() inside `async for step in run.steps(...)`")
        updating = update(actors.trainer, actors.buffer, self.version, self._patience)
        figures = await self.publisher.or_failed(updating)
        self.version += 1
        return figures

    async def publish(self) -> None:
        """Send the newest version on its way. Returns after the local copy: decoding and training go on meanwhile."""
        await self.publisher.publish(self.version)

    async def log(self, figures: list[dict[str, float]]) -> dict[str, float]:
        """Gather what the other actors did since the last step, then write and show it with ``figures``.

        Args:
            figures: of :meth:`update`.

        Returns:
            The metrics of the step, by the names of docs/metrics.md.
        """
        parts = self._parts
        values = await parts.observer.step(figures) | parts.recovery.metrics()
        if parts.watch is not None:
            values |= parts.watch.loop_lag()
        if parts.metrics is not None:
            parts.metrics.log(self.version, values)
        if parts.console is not None:
            parts.console.show(self.version, values)
        return values

    async def step(self) -> dict[str, float]:
        """:meth:`update`, :meth:`publish` and :meth:`log`; for callers that change nothing in between."""
        figures = await self.update()
        await self.publish()
        return await self.log(figures)

    # -- beside the loop -------------------------------------------------------------------------------------------

    async def evaluate(self, held_out: str = "") -> Evaluation:
        """Play held-out items once each, greedily, by the versions that are served meanwhile; logs the result.

        ``held_out`` names a set, all of it; empty is the first one, as many items of it as the settings say. Raises
        ValueError if the task has no such set.
        """
        parts = self._parts
        items = items_to_play(parts.task, held_out, self.settings.held_out)
        # A version that cannot be delivered ends the evaluation, too.
        result = await self.publisher.or_failed(evaluate(parts.actors.workers, items, held_out))
        parts.show(result, self.version, held_out)
        return parts.failures.counted(result, self.version)

    async def save(self) -> None:
        """Write the model to ``model/`` in the run's folder, as a Hugging Face folder."""
        if self.folder is None:
            raise RuntimeError("the run has no folder to save the model to")
        await save(self.actors.trainer, self.folder / "model", self.actors.model_bytes)
        self.saved = self.folder / "model"

    async def counts(self) -> Counts:
        """What the buffer has counted so far."""
        return await within(CALL_DEADLINE_S, self.actors.buffer.counts.call_one(), "the buffer's counts", on="buffer")

    async def _end_rollouts(self) -> None:
        """Wait until the newest version is served, close the buffer, and wait for the workers to end what they play."""
        if self._rollouts is None or self._rollouts_ended:
            return
        self._rollouts_ended = True
        await self.publisher.settled()
        # waits: for the buffer, within a deadline, then for the workers, which end with it
        await self._rollouts.aclose()


def _patience(settings: RunSettings, on_gpu: bool) -> Patience:
    # A generator may be restarted in the middle of a step.
    return Patience(settings.update_limit_s, floor_s=settings.generator.start_limit_s(on_gpu) + 60)


def launch(train: Callable[[Run, S], Awaitable[None]], settings: S, task: Callable[[S], Task] | None = None) -> None:
    """Run a recipe: check its settings, bring up the hosts, and call ``train`` with a :class:`Run` on the controller.

    Under ``torchrun`` every rank calls this; rank 0 becomes the controller, the others host processes. Bad settings end
    the program with one line that names the setting, before anything is spawned.

    Args:
        task: makes the task that ``train`` will start with, so that it is checked with the settings.
    """
    try:
        model = check(settings, devices(), None if task is None else task(settings))
    except ValueError as error:
        sys.exit(f"error: {error}")
    settings = resolve(settings, devices(), model)
    with launch_cluster(PRELOADS) as cluster:
        if cluster is None:  # a torchrun rank other than 0: its part was to host
            return
        name = Path(sys.argv[0]).stem or "run"
        folder = settings.output / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=2, default=str))
        print(schedule(settings.groups_per_step, settings.rollout.group_size, settings.buffer), f"Run folder: {folder}")
        try:
            saved = asyncio.run(_train(train, settings, cluster, folder.resolve()))
        except EpisodesFail as error:  # what matters to the author is in its message, not in where it was raised
            sys.exit(f"error: {error}")
        print(f"metrics, rollouts {'and the model ' if saved else ''}are in {folder.resolve()}")


async def _train(
    train: Callable[[Run, S], Awaitable[None]], settings: S, cluster: Cluster, folder: Path
) -> Path | None:
    """The folder to which the recipe saved the model, if it did."""
    async with Run.open(settings, cluster, folder) as run:
        await train(run, settings)
    return run.saved
