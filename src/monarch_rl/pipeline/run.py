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
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from monarch_rl.algorithms.group_view import Advantage
from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.ledger import Counts
from monarch_rl.checkpoint.folders import Measurement
from monarch_rl.generator.frozen import FrozenSettings
from monarch_rl.observe.console import Console
from monarch_rl.observe.metrics import Metrics
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.capture import captures
from monarch_rl.pipeline.checkpoints import Checkpoints, Position
from monarch_rl.pipeline.components import RunComponents
from monarch_rl.pipeline.evaluation import BestResult, Evaluations, OnBest, Shown
from monarch_rl.pipeline.failures import EpisodesFail, Failures
from monarch_rl.pipeline.frozen import FrozenPlans
from monarch_rl.pipeline.observer import FrozenMeter, Observer
from monarch_rl.pipeline.policy_snapshots import take_snapshots
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.pipeline.recovery import Recovery
from monarch_rl.pipeline.replayed_steps import make_again
from monarch_rl.pipeline.resume import Resumed, going_on, how_to_resume, note_settings, take_folder
from monarch_rl.pipeline.rollout_log import RolloutLog
from monarch_rl.pipeline.run_folder import going_on_after_a_loss, noted
from monarch_rl.pipeline.settings import RunSettings, prepare
from monarch_rl.pipeline.start import (
    PRELOADS,
    SET_UP_DEADLINE_S,
    Actors,
    replica_updates,
    save,
    schedule,
    served_dtype,
    start_actors,
    update,
)
from monarch_rl.pipeline.warm_restart import Survivors, find_survivors
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.rollout.frozen import FrozenModel, FrozenRefused
from monarch_rl.rollout.stages import Stage, columns_filled, columns_for_training
from monarch_rl.rollout.tracebacks import raised_in_package
from monarch_rl.runtime import supervisor, wait_registry
from monarch_rl.runtime.by_value import ByValue, register_modules
from monarch_rl.runtime.cluster import Cluster, devices, launch_cluster
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, Patience, disk_limit_s, on_disk, within
from monarch_rl.runtime.network import fix_nccl_order
from monarch_rl.runtime.process import freeze_heap, leave_heap, thaw_heap
from monarch_rl.settings.ranges import to_plain
from monarch_rl.tasks.rows import Row
from monarch_rl.tasks.task import Task
from monarch_rl.trainer.actor import Trainer
from monarch_rl.trainer.functions import (
    TrainingFunctions,
    check_columns,
    check_that_columns_are_read,
    equal_rewards_warning,
)
from monarch_rl.trainer.loss_settings import loss_warnings
from monarch_rl.trainer.objective import Objective
from monarch_rl.trainer.supervised import SupervisedPlan, check_rows
from monarch_rl.watch.watch import watched

logger = logging.getLogger("monarch_rl")

S = TypeVar("S", bound=RunSettings)


class Run:
    """One run, from its first actor to its last metric. Open with :meth:`open`; use from one task.

    Args:
        settings: of the run.
        lifetimes: what is entered here ends with the run.
        cluster: where actors are spawned, and whose processes are watched; None for actors that live in this process.
        folder: of the run, for metrics, rollouts, reports and the model; None writes and prints nothing.
        resumed: what the run goes on from; None begins one.
        kept: what still lives of this run, which has lost other processes.
    """

    def __init__(
        self,
        settings: RunSettings,
        lifetimes: AsyncExitStack,
        cluster: Cluster | None = None,
        folder: Path | None = None,
        resumed: Resumed | None = None,
        kept: Survivors | None = None,
    ) -> None:
        self.settings, self.folder = settings, folder
        self.resumed = resumed
        """What it goes on from."""
        self.version = resumed.version if resumed else 0
        """The policy version: batches trained so far."""
        self.saved: Path | None = None
        """Where the model was saved last."""
        self.on_best: list[OnBest] = []
        """Called after each evaluation that was better than all before."""
        known = resumed.manifest.best if resumed else None
        self._best = BestResult(settings.evaluation.best_metric, folder, known)
        self._lifetimes, self._cluster = lifetimes, cluster
        self._task = asyncio.current_task()
        self._begun: RunComponents | None = None
        self._kept = kept
        self._frozen = FrozenPlans(kept.actors.frozen if kept else ())
        self._rollouts: AsyncExitStack | None = None
        """Open while rollout workers play for training."""
        self._rollouts_ended = False
        self._updating: asyncio.Future[list[dict[str, float]]] | None = None
        """The update under way."""
        self._unlogged: list[dict[str, float]] | None = None
        """Figures of the newest step, until they are logged."""
        self._on_gpu = cluster is not None and cluster.devices.kind == "cuda"
        # A generator may be restarted in the middle of a step.
        floor_s = settings.generator.start_limit_s(self._on_gpu) + 60
        self._patience = Patience(settings.update_limit_s, floor_s=floor_s)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: RunSettings,
        cluster: Cluster | None = None,
        folder: Path | None = None,
        resumed: Resumed | None = None,
        kept: Survivors | None = None,
    ) -> AsyncIterator[Run]:
        """A run for the block. At the end rollouts stop, and files are closed; actors end with the cluster.

        Raises:
            Stalled: the run could not go on; says who waited for whom.
            AllActorsLost: all generators, all rollout workers or all engines of a frozen model were lost.
            EpisodesFail: no episode can be used: all held-out items fail, or all groups are dropped (docs/failures.md).
            PublishError: a version reached no generator.
        """
        async with AsyncExitStack() as lifetimes:
            run = cls(settings, lifetimes, cluster, folder, resumed, kept)
            try:
                yield run
                await run._end_rollouts()  # a recipe may leave its loop early
                await run._checkpoints_settled()
            except (Exception, asyncio.CancelledError) as error:
                await run._save_before_the_end(error)
                raise

    @property
    def _parts(self) -> RunComponents:
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

    def frozen(
        self, name: str, model: str, settings: FrozenSettings | None = None, *, snapshot_every: int = 0
    ) -> FrozenModel:
        """A model that never changes: a judge, a teacher or reference, an opponent (docs/judges.md).

        Its engines have devices of their own, and start with the other actors in :meth:`start`. Lost ones are replaced.
        What is returned can be asked from then on: in episodes and stages, whose functions may hold it, and here.

        Args:
            name: of small letters and ``_``, for messages and metrics.
            model: Hugging Face folder or Hub name.
            settings: None is one engine.
            snapshot_every: versions after which it takes over the policy's weights, in :meth:`publish`, and is the
                policy of then until the next time: a teacher for self-distillation, an opponent. 0 never changes.

        Raises:
            FrozenRefused: it cannot be served, or the launch has too few devices; says what to do. Nothing is spawned.
        """
        if self._cluster is None or self._begun is not None:
            raise RuntimeError("frozen models are started by run.start(...): call run.frozen(...) before it")
        s, given = self.settings, settings or FrozenSettings()
        begins, offered = s.first_frozen_device, self._cluster.devices
        return self._frozen.add(name, model, given, s.model, begins, offered, snapshot_every, s.rollout)

    async def start(
        self, task: Task, *, advantage: Advantage | str, objective: Objective | str, stages: Sequence[Stage] = ()
    ) -> None:
        """Start all actors, serve the model as version 0, and watch over the processes from here on.

        Args:
            task: what rollout workers play, and how it is rewarded.
            advantage: from a group to the advantages of its sequences, turns or tokens
                (:data:`monarch_rl.algorithms.group_view.Advantage`), or the name of one in ``ADVANTAGES``.
            objective: the loss of a micro-batch (:data:`monarch_rl.trainer.objective.Objective`), or a name in
                ``OBJECTIVES``, which follows ``trainer.loss``.
            stages: what is done with each group between playing and training, one after the other.

        Raises:
            ValueError: settings that cannot work, or a column that is read and that nobody fills, before anything is
                spawned; names them.
            TypeError: the task or a function cannot be sent to other processes; says why.
        """
        if self._cluster is None:
            raise RuntimeError("start() spawns actors: open the run with a cluster, or begin() with actors")
        self._check_first_start()
        settings, model = prepare(self.settings, self._cluster.devices, task)  # launch() may not have known this task
        register_modules()
        trainer = settings.trainer
        functions = TrainingFunctions.of(advantage, objective, trainer.loss, trainer.critic)
        check_columns(functions, columns_filled(stages), trainer.reference, trainer.critic.enabled)
        check_that_columns_are_read(functions, columns_for_training(stages))
        if settings.buffer.drop_equal_rewards and (warning := equal_rewards_warning(functions)):
            print(f"warning: {warning}")
        handed, by_value = ByValue(task, f"task {task.name}"), ByValue(stages, "a stage")
        actors = await start_actors(
            *(self._cluster, settings, handed, model, functions, by_value, self._frozen, self.resumed, self.folder),
            kept=self._kept.actors if self._kept else None,
        )
        await self.begin(actors, task)
        if self._kept is not None:
            self._kept.note_returned()
            thaw_heap()  # what has ended is garbage, and is not to stay forever
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
            replica_updates(actors.workers, actors.frozen),
        )
        self._lifetimes.callback(publisher.cancel)
        publisher.lost.update({index: "it did not start again" for index in actors.generators.lost})
        observer = Observer(publisher, actors.workers, actors.buffer)
        restored = self.version
        shown = metrics, rollouts, console = self._open_files(actors)
        if self.resumed is not None:
            observer.go_on(self.resumed.manifest.counters)
            await self._make_again(actors, self.resumed, observer, *shown)
        # Nothing is drawn before the served weights are known to be the trainer's.
        await publisher.publish(self.version)
        await publisher.settled()
        if self.resumed is not None:
            if folder is not None:
                await on_disk(disk_limit_s(0), "the run's settings", note_settings, folder, s)
            await take_snapshots(actors, self.version, folder, resumed=True)
        recovery = Recovery(
            actors.generators, actors.workers, publisher, actors.buffer, s.recovery, folder, actors.frozen
        )
        failures = Failures(actors.buffer, s.stall_s)
        watch = None
        if self._cluster is not None and folder is not None:
            watching = watched(self._cluster, folder, s.stall_s, recovery.recover, s.checkpoint.grace_s)
            watch = await self._lifetimes.enter_async_context(watching)
        await self._lifetimes.enter_async_context(recovery.supervising(failures.follow()))
        checkpoints = None
        if folder is not None and console is not None:
            about = (
                to_plain(s),
                console.note,
                restored,
                self.resumed.generation if self.resumed else 0,
                self._best.metric,
            )
            checkpoints = Checkpoints(folder, actors, s.checkpoint, *about)
        meter = FrozenMeter(actors.frozen)
        evaluations = Evaluations(
            *(s, s.generator.running_requests(self._on_gpu), actors.workers, publisher, failures, task),
            *(Shown(metrics, console).evaluation, self._best, self.on_best, checkpoints),
        )
        self._lifetimes.callback(evaluations.cancel)
        begun = RunComponents(
            *(actors, publisher, observer, recovery, failures, meter, watch, *shown, evaluations, checkpoints)
        )
        await self._lifetimes.enter_async_context(failures.summed_up(observer, begun.note))
        self._begun = begun
        if checkpoints is not None and self.version > restored:  # a loss is not to cost the same steps again
            await checkpoints.begin(self.version, self._position)
        if self._cluster is not None and self._task is not None:
            self._cluster.interrupts.take_over = self._task.cancel

    def _open_files(self, actors: Actors) -> tuple[Metrics | None, RolloutLog | None, Console | None]:
        """What the run writes and shows, until it ends."""
        s, folder = self.settings, self.folder
        if folder is None:
            return None, None, None
        seconds = self.resumed.manifest.seconds if self.resumed else 0.0
        metrics = self._lifetimes.enter_context(Metrics(folder, self.version, seconds))
        rollouts = RolloutLog.of(actors, folder, s.rollout, s.buffer.replay)
        self._lifetimes.callback(rollouts.close)
        self._lifetimes.callback(self._best.close)
        return metrics, rollouts, self._lifetimes.enter_context(Console(s.steps))

    async def _make_again(
        self,
        actors: Actors,
        resumed: Resumed,
        observer: Observer,
        metrics: Metrics | None,
        rollouts: RolloutLog | None,
        console: Console | None,
    ) -> None:
        """Make the versions after the checkpoint again that the journal has, and log their steps."""

        async def log(step: int, figures: list[dict[str, float]], counts: Counts) -> None:
            self.version = step
            if metrics is not None:
                metrics.log(step, observer.replayed_metrics(figures, counts))
            if rollouts is not None:
                rollouts.append(await rollouts.gather())

        s = self.settings
        if s.journal.mib:
            limit_s = s.update_limit_s + s.trainer.compile_limit_s
            # waits: its calls have deadlines
            async for said in make_again(actors, resumed, s.journal.mib << 20, s.steps, limit_s, log):
                if console is not None:
                    console.note(said)

    def _check_first_start(self) -> None:
        if self._begun is not None:
            raise RuntimeError("the run has its actors already: start it once")
        if asyncio.current_task() is not self._task:
            raise RuntimeError("await run.start() in the task that opened the run, not in wait_for() or create_task()")

    # -- the loop --------------------------------------------------------------------------------------------------

    async def steps(self, count: int) -> AsyncIterator[int]:
        """Yields 1 to ``count``, one for each batch to train on; a resumed run begins with the first that is left.
        Rollout workers play from the first to the last, and checkpoints are made after those where one is due.

        When the last step is done, no more is generated, and the newest version is served. Can be used once.
        """
        if self._rollouts is not None:
            raise RuntimeError("run.steps() can be used once: the buffer is closed after the last step")
        self._rollouts = AsyncExitStack()
        await self._rollouts.enter_async_context(self._parts.recovery.rolling_out())
        await self._parts.observer.begin()
        for step in range(self.version + 1, count + 1):
            yield step
            if (checkpoints := self._parts.checkpoints) is not None:
                position = self._last_position if step == count else self._position
                await checkpoints.after_step(self.version, position, last=step == count)
        await self._end_rollouts()

    async def update(self) -> list[dict[str, float]]:
        """Wait for the next batch and train on it, which makes the next version; metrics by trainer rank.

        Raises:
            DeadlineExceeded: batch and update took longer than ``update_deadline_s``; says what is missing.
        """
        actors = self.actors
        if self._rollouts is None:
            raise RuntimeError("no batch can come: call run.update() inside `async for step in run.steps(...)`")
        return await self._updated(update(actors.trainer, actors.buffer, self.version, self._patience))

    async def _updated(self, work: Awaitable[list[dict[str, float]]]) -> list[dict[str, float]]:
        """Await what makes the next version; metrics by trainer rank."""
        self._updating = asyncio.ensure_future(work)
        self._updating.add_done_callback(_retrieve)
        figures = await self.publisher.or_failed(asyncio.shield(self._updating))
        self._note_update(figures)
        return figures

    def _note_update(self, figures: list[dict[str, float]]) -> None:
        self.version += 1
        self._unlogged, self._updating = figures, None

    async def publish(self) -> None:
        """Send the newest version on its way. Returns after the local copy: decoding and training go on meanwhile.
        Frozen models that take over the policy's weights do so before it returns, when that is due."""
        await self.publisher.publish(self.version)
        await take_snapshots(self.actors, self.version, self.folder)

    async def log(self, figures: list[dict[str, float]]) -> dict[str, float]:
        """Gather what the other actors did since the last step, then write and show it with ``figures``.

        Args:
            figures: of :meth:`update`.

        Returns:
            The metrics of the step, by the names of docs/metrics.md.
        """
        parts = self._parts
        rows = await parts.rollouts.gather() if parts.rollouts is not None else []
        values = await parts.frozen.metrics() | await parts.observer.step(figures) | parts.recovery.metrics()
        # No await from here on: a signal in between would have the step logged twice, or its rates lost.
        if parts.watch is not None:
            values |= parts.watch.loop_lag()
        if parts.checkpoints is not None:
            values |= parts.checkpoints.metrics()
        if parts.metrics is not None:
            values["checkpoint/lost_lines"] = parts.lost_lines
            parts.metrics.log(self.version, values)
        if parts.rollouts is not None:
            parts.rollouts.append(rows)
        self._unlogged = None
        if parts.console is not None:
            parts.console.show(self.version, values)
        return values

    async def step(self) -> dict[str, float]:
        """:meth:`update`, :meth:`publish` and :meth:`log`; for callers that change nothing in between."""
        figures = await self.update()
        await self.publish()
        return await self.log(figures)

    # -- rows of prompt and answer ---------------------------------------------------------------------------------

    async def supervised(
        self, rows: Sequence[Row], *, steps: int, rows_per_step: int = 64, lr_factor: float = 1.0
    ) -> None:
        """Warm start: make the first versions, up to ``steps``, by supervised updates alone, and publish the last one.

        The loss is the cross-entropy of the answers' tokens, their mean over a step. Each step is one optimiser step
        and makes a version: ``run.steps(n)`` goes on from there to ``n``. A resumed run makes those that are left.

        Args:
            rows: mappings with ``prompt``, text or messages, and ``answer``, text: a list, or what ``tasks/rows.py``
                reads. They are rendered by the model's chat template.
            rows_per_step: in another order each time through.
            lr_factor: what ``trainer.lr`` and its schedule are multiplied by: such steps usually take a larger rate.

        Raises:
            ValueError: the rows cannot be trained; says which and why.
        """
        if self._rollouts is not None:
            raise RuntimeError(
                "supervised steps come before run.steps(...), whose groups would age: await run.mix(rows, share=...) "
                "trains on rows beside them"
            )
        plan = plan_rows(rows, self.settings, rows_per_step, lr_factor=lr_factor)
        if self.version >= steps:
            return
        actors, parts = self.actors, self._parts
        await use_rows(actors.trainer, plan)
        await parts.observer.begin()
        while self.version < steps:
            work = supervised_update(actors.trainer, actors.buffer, self.version, self.settings.update_limit_s)
            await self.log(await self._updated(work))
            if parts.checkpoints is not None:
                await parts.checkpoints.after_step(self.version, self._position, last=False)
        await self.publish()

    async def mix(self, rows: Sequence[Row], *, share: float) -> None:
        """From the next update on train on ``rows`` beside each batch: (1 - share) x the objective's loss + share x the
        cross-entropy of the answers (arXiv:2508.11408).

        A batch has as many rows as make them ``share`` of its sequences. They have no policy, so no lag.

        Args:
            rows: as for :meth:`supervised`.
            share: above 0, below 1.

        Raises:
            ValueError: they cannot be trained; says why.
        """
        await use_rows(self.actors.trainer, plan_mixed_rows(rows, self.settings, share))

    # -- beside the loop -------------------------------------------------------------------------------------------

    async def evaluate(self, held_out: str = "") -> Evaluation:
        """Wait until the newest version is served, have it play held-out items as the settings say, and log the result.

        ``held_out`` names a set, all of it; empty is all sets that the settings name, or the first one, as many items
        of it as they say. Returns the result of the first set. Raises ValueError if the task has no such set.
        """
        return await self._parts.evaluations.play(self.version, held_out)

    async def evaluate_after(self, step: int) -> None:
        """Evaluate, if that is due after ``step``: now, or with ``evaluation.share`` beside the next steps.

        An evaluation that is due while another one goes on is left out, and the console says so.
        """
        parts = self._parts
        if not self.settings.evaluates_after(step):
            return
        if not self.settings.evaluation.share:
            await self.evaluate()
        elif not await parts.evaluations.begin_beside(self.version):
            parts.note(f"no evaluation after step {step}: the one before still goes on (--evaluation.share)")

    @property
    def best(self) -> Measurement | None:
        """The best result of an evaluation so far, by ``evaluation.best_metric``."""
        return self._best.best

    async def load_frozen(self, model: FrozenModel, folder: Path) -> None:
        """From here on a frozen model has the weights of another folder of the same shapes, such as one that
        :meth:`save` wrote: an earlier version of the policy, as an opponent or a teacher. Its engines verify them.

        Raises:
            ValueError: the run has no such frozen model, or the folder holds another model; nothing has changed.
        """
        pools = [pool for pool in self.actors.frozen if pool.model == model]
        if not pools:
            asked = ", ".join(pool.model.name for pool in self.actors.frozen) or "none"
            raise ValueError(
                f"the run has no frozen model {getattr(model, 'name', model)!r} to load {folder} into; it has {asked}. "
                "Ask for it by run.frozen(...) before run.start(...), and give load_frozen what that returned"
            )
        await pools[0].load(folder)

    async def save(self) -> None:
        """Write the model to ``model/`` in the run's folder, as a Hugging Face folder."""
        if self.folder is None:
            raise RuntimeError("the run has no folder to save the model to")
        await save(self.actors.trainer, self.folder / "model", self.actors.model_bytes)
        self.saved = self.folder / "model"

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _position(self, limit_s: float | None = None) -> Position:
        return self._parts.position(self._best, limit_s)

    def _last_position(self) -> Position:
        return self._position(self.settings.checkpoint.grace_s or None)  # no step waits any more

    async def _checkpoints_settled(self) -> None:
        if self._begun is not None and self._begun.checkpoints is not None:
            await self._begun.checkpoints.settled()

    async def _save_before_the_end(self, error: BaseException) -> None:
        """Make a checkpoint of where the run is, whatever ends it, if trainer and buffer still live. Raises nothing."""
        grace_s, lost = self.settings.checkpoint.grace_s, self._cluster is not None and self._cluster.interrupts.reason
        if self._begun is None or self._begun.checkpoints is None or not grace_s or lost or self._rollouts_ended:
            return
        try:
            await within(grace_s, self._save_progress(self._begun), "a last checkpoint", on="the disk")
        except (Exception, asyncio.CancelledError) as failed:  # the end of the run has another reason, which is told
            logger.error("no last checkpoint: %s", last_line(failed))

    async def _save_progress(self, parts: RunComponents) -> None:
        assert parts.checkpoints is not None
        await parts.checkpoints.alive()
        held = await parts.checkpoints.hold()
        # A supervised update needs no batch.
        if self._updating is not None and (held > self.version or self._rollouts is None):
            await asyncio.wait([self._updating])  # waits: for an update that has its batch, which has a deadline
            if not self._updating.cancelled() and self._updating.exception() is None:
                self._note_update(self._updating.result())
        if self._unlogged is not None:
            await self.log(self._unlogged)
        if self.version:
            await parts.checkpoints.now(self.version, self._last_position)

    async def counts(self) -> Counts:
        """What the buffer has counted so far."""
        return await within(CALL_DEADLINE_S, self.actors.buffer.counts.call_one(), "the buffer's counts", on="buffer")

    async def _end_rollouts(self) -> None:
        """Wait until the newest version is served, close the buffer, and wait for the workers to end what they play."""
        if self._rollouts is None or self._rollouts_ended:
            return
        await self._parts.evaluations.end()
        await self.publisher.settled()
        await self._checkpoints_settled()
        if self.version and (checkpoints := self._parts.checkpoints) is not None:  # also of a loop that was left early
            await checkpoints.after_step(self.version, self._last_position, last=True)
        await self._checkpoints_settled()
        self._rollouts_ended = True
        # waits: for the buffer, within a deadline, then for the workers, which end with it
        await self._rollouts.aclose()


def _retrieve(update: asyncio.Future[list[dict[str, float]]]) -> None:
    """Take the exception of an update that nobody awaits any more."""
    if not update.cancelled():
        update.exception()


def launch(train: Callable[[Run, S], Awaitable[None]], settings: S, task: Callable[[S], Task] | None = None) -> None:
    """Run a recipe: check its settings, bring up the hosts, and call ``train`` with a :class:`Run` on the controller.

    Under ``torchrun`` every rank calls this; rank 0 becomes the controller, the others host processes. Bad settings end
    the program with one line that names the setting, before anything is spawned.

    Args:
        task: makes the task that ``train`` will start with, so that it is checked with the settings.
    """
    if captures(train, settings):
        return
    leave_heap()
    supervisor.follow_supervisor()
    try:
        settings, _ = prepare(settings, devices(), None if task is None else task(settings))
        resumed = going_on(settings)
    except ValueError as error:
        if not raised_in_package(error):  # but by the recipe's own code: its author needs the traceback
            raise
        sys.exit(f"error: {error}")
    if settings.trainer.deterministic:
        fix_nccl_order()
    with (
        going_on_after_a_loss(settings.checkpoint.restarts),
        launch_cluster(PRELOADS, settings.checkpoint.grace_s) as cluster,
    ):
        if cluster is None:  # a torchrun rank other than 0: its part was to host
            return
        folder = take_folder(settings, resumed)
        for warning in loss_warnings(settings.trainer.loss, settings.trainer.updates_per_batch):
            print(f"warning: {warning}")
        print(schedule(settings.groups_per_step, settings.rollout.group_size, settings.buffer), f"Run folder: {folder}")
        try:
            with noted(folder, cluster.interrupts):
                supervisor.note(folder, restarts=settings.checkpoint.restarts)
                saved = asyncio.run(_train(train, settings, cluster, folder, resumed))
        except (EpisodesFail, FrozenRefused) as error:
            # What matters to the author is in its message, not in where it was raised.
            sys.exit(f"error: {error}")
        except asyncio.CancelledError:
            if (number := cluster.interrupts.received) is None:
                raise
            if cluster.interrupts.reason is None:  # else the signal was this process's own, because of a loss
                print(f"interrupted: exit code {128 + number}; {how_to_resume(folder)}")
            raise KeyboardInterrupt from None
        print(f"metrics, rollouts {'and the model ' if saved else ''}are in {folder}")


async def _train(
    train: Callable[[Run, S], Awaitable[None]], settings: S, cluster: Cluster, folder: Path, resumed: Resumed | None
) -> Path | None:
    """The folder to which the recipe saved the model, if it did. Calls it again where the run keeps what lives."""
    kept: Survivors | None = None
    while True:
        runs: list[Run] = []
        called = _called(train, settings, Run.open(settings, cluster, folder, resumed, kept), runs)
        try:
            # In a task of its own: what ends it, such as the watch, is not to end the next one.
            return await asyncio.create_task(called)  # waits: as long as the run
        except Exception as error:
            cluster.interrupts.take_over = None
            begun = runs[0]._begun if runs else None
            if begun is None and kept is not None:
                logger.error("the run does not go on with what it has kept: %s", last_line(error))
                raise kept.cause from error
            if begun is None:
                raise
            kept = await find_survivors(error, begun, settings, cluster, folder, resumed)
            if kept is None:
                raise
            resumed = kept.resumed
            del begun  # with all that it ran


async def _called(
    train: Callable[[Run, S], Awaitable[None]], settings: S, opened: AbstractAsyncContextManager[Run], runs: list[Run]
) -> Path | None:
    """Call a recipe with a run, which ``runs`` then has."""
    async with opened as run:
        runs.append(run)
        await train(run, settings)
    return run.saved


# -- supervised rows: prompts and answers on their way to the trainer ranks, and updates on them alone ----------------


def plan_rows(
    rows: Sequence[Row], s: RunSettings, rows_per_step: int, share: float = 1.0, lr_factor: float = 1.0
) -> SupervisedPlan:
    """What trainer ranks train on. Raises ValueError for rows and numbers that cannot be."""
    check_rows(rows)
    if rows_per_step < 1 or not 0 < lr_factor < float("inf"):
        raise ValueError(f"rows_per_step {rows_per_step} and lr_factor {lr_factor:g} must be positive")
    by_value = ByValue(rows, "supervised rows")
    return SupervisedPlan(by_value, rows_per_step, share, lr_factor, s.rollout.template_options)


def plan_mixed_rows(rows: Sequence[Row], s: RunSettings, share: float) -> SupervisedPlan:
    """The same for rows that are ``share`` of the sequences, and of the loss, of each batch. Raises ValueError."""
    if not 0 < share < 1:
        raise ValueError(f"share {share:g} of supervised rows must be above 0 and below 1: leave run.mix out for 0")
    rows_per_step = max(1, round(share / (1 - share) * s.groups_per_step * s.rollout.group_size))
    if rows_per_step < s.trainer.minibatches:
        raise ValueError(
            f"share {share:g} of supervised rows makes {rows_per_step} rows a batch, fewer than trainer.minibatches "
            f"{s.trainer.minibatches}: give a larger share, or fewer mini-batches"
        )
    return plan_rows(rows, s, rows_per_step, share)


async def use_rows(trainer: Trainer, plan: SupervisedPlan) -> None:
    """Have all trainer ranks read the rows. Raises ValueError if they do not find the same ones."""
    call = trainer.use_rows.call(plan)
    answers = await within(SET_UP_DEADLINE_S, call, "trainer ranks to read the supervised rows", on="trainer ranks")
    found = sorted(set(answers.values()))
    if len(found) > 1:
        raise ValueError(f"trainer ranks find {found[0]} and {found[-1]} supervised rows: each machine needs the same")


async def supervised_update(trainer: Trainer, buffer: Buffer, version: int, limit_s: float) -> list[dict[str, float]]:
    """Make one optimiser step on rows alone on every trainer rank; metrics by rank."""
    call, what = trainer.supervised.call(version), f"trainer ranks to make supervised step {version + 1}"
    answers = await within(limit_s, call, what, on="trainer ranks", flag="update-deadline-s")
    await within(CALL_DEADLINE_S, buffer.begin_at.call_one(version + 1), "the buffer to note the step", on="buffer")
    wait_registry.progress("step trained")
    return list(answers.values())
