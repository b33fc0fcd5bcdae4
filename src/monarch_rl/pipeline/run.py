"""A training run: its actors, policy versions and metrics. Recipes are written with :class:`Run` and :func:`launch`.

    async def train(run: Run, s: Settings) -> None:
        await run.start(advantage=dr_grpo, objective=s.objective)
        async for step in run.steps(s.steps):
            metrics = await run.update()
            await run.publish()
            await run.log(metrics)

    launch(train, cli(Settings), task)

Rollouts continue throughout, from the first step to the last; the buffer bounds the staleness of trained tokens. The
simulator, tests and benchmarks use the same :class:`Run` with actors that they start themselves (:meth:`Run.begin`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import TypeVar

from monarch.actor import ActorError

from monarch_rl.algorithms.group_view import Advantage
from monarch_rl.algorithms.objectives import Objective
from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.ledger import Counts
from monarch_rl.checkpoint.folders import Measurement, write_whole
from monarch_rl.errors import (
    EpisodesFail,
    FrozenRefused,
    OutOfMemory,
    ProbeFailed,
    Refusals,
    SettingsError,
    raised_in_package,
)
from monarch_rl.generator.frozen import FrozenSettings
from monarch_rl.generator.settings import resolve_dtype
from monarch_rl.model.sizes import trained_model
from monarch_rl.model.tokens import template_warning
from monarch_rl.observe.console_relay import end_relay, relay_output
from monarch_rl.observe.learning_signal import LearningSignal
from monarch_rl.observe.trackers import TRACKERS, Tracker
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.capture import intercept_launch
from monarch_rl.pipeline.checkpoints import Checkpoints, ControllerState, NoCheckpoints
from monarch_rl.pipeline.closing_lines import closing_lines, page_lines, page_of_failed
from monarch_rl.pipeline.evaluation import BestResult, Evaluations, OnBest
from monarch_rl.pipeline.failures import Failures
from monarch_rl.pipeline.frozen import FrozenPlans
from monarch_rl.pipeline.observer import FrozenMeter, Observer
from monarch_rl.pipeline.outputs import NoOutputs, RunOutputs, open_outputs
from monarch_rl.pipeline.policy_snapshots import take_snapshots
from monarch_rl.pipeline.preloads import PRELOADS, console_folder
from monarch_rl.pipeline.progress import Progress, say
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.pipeline.recovery import Recovery
from monarch_rl.pipeline.replayed_steps import replay_steps
from monarch_rl.pipeline.resume import (
    Resumed,
    how_to_resume,
    keep_sizes,
    note_settings,
    resolve_resume,
    take_folder,
    with_recorded_model,
)
from monarch_rl.pipeline.run_folder import ERROR, SAVED, note_hosts, recording_state, restarting_after_loss
from monarch_rl.pipeline.settings import (
    RunSettings,
    changed_settings,
    chosen_sizes,
    normaliser_tokens,
    prepare,
    to_record,
)
from monarch_rl.pipeline.start import (
    SET_UP_DEADLINE_S,
    Actors,
    check_alive,
    hold,
    save,
    schedule,
    start_actors,
    update,
)
from monarch_rl.pipeline.warm_restart import Survivors, find_survivors
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.rollout.frozen import FrozenModel
from monarch_rl.rollout.probe import probe, sent
from monarch_rl.rollout.scoring import PRELOAD as SCORING_PRELOAD
from monarch_rl.rollout.stages import Stage, columns_filled, columns_for_training
from monarch_rl.runtime import supervisor, wait_registry
from monarch_rl.runtime.by_value import ByValue, register_modules
from monarch_rl.runtime.cluster import Cluster, Devices, devices, launch_cluster
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, Patience, disk_limit_s, on_disk, within
from monarch_rl.runtime.network import fix_nccl_order
from monarch_rl.runtime.process import freeze_heap, leave_heap, thaw_heap
from monarch_rl.runtime.restart import raised_by_actor
from monarch_rl.runtime.signals import Interrupts, note_hangups
from monarch_rl.tasks.rows import Row, as_rows
from monarch_rl.tasks.task import Task
from monarch_rl.trainer.actor import Trainer
from monarch_rl.trainer.functions import (
    TrainingFunctions,
    check_columns,
    check_that_columns_are_read,
    check_unread_objective,
    equal_rewards_warning,
    without_rewards,
)
from monarch_rl.trainer.loss_settings import loss_warnings
from monarch_rl.trainer.objective import LossFunction
from monarch_rl.trainer.settings import lr_warnings
from monarch_rl.trainer.supervised import SupervisedPlan, check_rows
from monarch_rl.watch.watch import Watch, watched

logger = logging.getLogger("monarch_rl")

S = TypeVar("S", bound=RunSettings)


READ_ROWS = "trainer ranks to read the supervised rows"
"""What a run waits for; see :meth:`Progress.waiting`."""


class Phase(Enum):
    """How far a run has come with its rollouts for training."""

    SET_UP = auto()
    ROLLING_OUT = auto()
    ENDED = auto()


@dataclass(frozen=True)
class LocalProcess:
    """Takes the place of the cluster in a run over actors in this process: no device, signal or process is involved."""

    devices: Devices = Devices("cpu", 1, 1)
    interrupts: Interrupts = field(default_factory=Interrupts)


class NoWatch:
    """Takes the place of the watch in a run that has no processes to watch, or no folder for its reports."""

    def loop_lag(self) -> dict[str, float]:
        return {}

    def lost_spans(self) -> int:
        return 0

    def timeline_cpu_s(self) -> float:
        return 0.0

    def state_of(self, name: str) -> str:
        return ""


@dataclass(frozen=True)
class RunComponents:
    """The components of a run whose actors have started."""

    actors: Actors
    publisher: Publisher
    observer: Observer
    recovery: Recovery
    frozen: FrozenMeter
    watch: Watch | NoWatch
    outputs: RunOutputs | NoOutputs
    evaluations: Evaluations
    progress: Progress


class Run:
    """One run, from its first actor to its last metric. Create with :meth:`open`; use from a single asyncio task.

    Args:
        settings: the run's settings.
        cluster: spawns the actors, whose processes are then watched; None for actors in this process.
        folder: the run's folder, for metrics, rollouts, reports and the model; None writes and prints nothing.
        resumed: state to resume from; None begins a new run.
        survivors: surviving processes of this run, for a warm restart.
        task: the task that :func:`launch` was given; None: :meth:`start` is given one.
    """

    def __init__(
        self,
        settings: RunSettings,
        cluster: Cluster | None = None,
        folder: Path | None = None,
        resumed: Resumed | None = None,
        survivors: Survivors | None = None,
        task: Task | None = None,
    ) -> None:
        self.settings, self.folder = settings, folder
        self._launched_task = task
        self._patient_settings = settings.with_patience()
        """The settings with ``patience`` in their deadlines. ``settings`` are the given ones, which are saved."""
        self.resumed = resumed
        """The state that the run resumed from; None for a new run."""
        self.version = resumed.version if resumed else 0
        """The policy version: the number of steps trained so far, including supervised ones."""
        self.warm_up_steps = resumed.warm_up_steps if resumed else 0
        """The supervised steps among them (:meth:`supervised`), which precede step 1."""
        self._warm_up_goal = 0
        self.saved: Path | None = None
        """Folder of the last :meth:`save`."""
        self.on_best: list[OnBest] = []
        """Called after each evaluation that is better than all earlier ones."""
        best = resumed.manifest.best if resumed else None
        self._best = BestResult(settings.evaluation.best_metrics, folder, best)
        self._cluster = cluster or LocalProcess()
        self._on_gpu = self._cluster.devices.kind == "cuda"
        self._lifetimes = AsyncExitStack()
        """Context managers that exit with the run."""
        self._task: asyncio.Task[object] | None = None
        """The task that opened the run."""
        self._begun: RunComponents | None = None
        self._checkpoints: Checkpoints | NoCheckpoints = NoCheckpoints()
        self._survivors = survivors
        self._frozen = FrozenPlans(survivors.actors.frozen if survivors else ())
        self._trackers = dict[str, Tracker]()
        """Those of the recipe, by name."""
        self._phase = Phase.SET_UP
        self._rollouts = AsyncExitStack()
        """Rollout workers roll out groups for training until it exits."""
        self._updating: asyncio.Future[list[dict[str, float]]] | None = None
        """The update in progress."""
        self._unlogged: list[dict[str, float]] | None = None
        """Metrics of the newest step, until they are logged."""
        buffer, groups = settings.buffer, settings.groups_per_step
        self._learning_signal = LearningSignal(groups, buffer.max_filtered * groups * buffer.drop_equal_rewards)
        # A generator may be restarted during a step. Its deadline is computed here, because settings that are not
        # resolved for the devices have none.
        floor_s = settings.patient_s(settings.generator.start_limit_s(self._on_gpu)) + 60
        self._step_patience = Patience(self._patient_settings.update_limit_s, floor_s=floor_s)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: RunSettings,
        cluster: Cluster | None = None,
        folder: Path | None = None,
        resumed: Resumed | None = None,
        survivors: Survivors | None = None,
        task: Task | None = None,
    ) -> AsyncIterator[Run]:
        """A run for the block. At the end rollouts stop, and files are closed; actors end with the cluster.

        Raises:
            Stalled: the run made no progress; the message says which process waited for which.
            AllActorsLost: all generators, all rollout workers or all engines of a frozen model were lost.
            EpisodesFail: no episode is usable: all held-out items fail, or all groups are dropped (docs/failures.md).
            PublishError: a version reached no generator.
        """
        run = cls(settings, cluster, folder, resumed, survivors, task)
        async with run._opened():
            yield run

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        """See :meth:`open`."""
        self._task = asyncio.current_task()
        async with self._lifetimes:
            try:
                yield
                await self._end_rollouts()  # the recipe may have left its loop early
                await self._checkpoints.settled()
            except (Exception, asyncio.CancelledError):
                await self._save_before_the_end()
                raise

    @property
    def _components(self) -> RunComponents:
        if self._begun is None:
            raise RuntimeError("the run has no actors yet: await run.start(...) first")
        return self._begun

    @property
    def _steps_trained(self) -> int:
        """Number of the last step of the run; supervised steps precede step 1."""
        return self.version - self.warm_up_steps

    @property
    def _warm_up_counts_as_steps(self) -> bool:
        """Whether an earlier version began the run, in which supervised steps were steps of the run."""
        return self.resumed is not None and self.resumed.manifest.warm_up_steps is None

    @property
    def _spawning_cluster(self) -> Cluster:
        if isinstance(self._cluster, LocalProcess):
            raise RuntimeError("start() spawns actors: open the run with a cluster, or begin() with actors")
        return self._cluster

    @property
    def actors(self) -> Actors:
        """Handles of all actors."""
        return self._components.actors

    @property
    def publisher(self) -> Publisher:
        """Publishes new versions to the generators."""
        return self._components.publisher

    # -- start -----------------------------------------------------------------------------------------------------

    @property
    def task(self) -> Task:
        """The task that :func:`launch` was given, which :meth:`start` uses. Raises RuntimeError if there is none."""
        if self._launched_task is None:
            raise RuntimeError(
                "the run has no task: pass the function that creates it to launch(train, settings, task)"
            )
        return self._launched_task

    def frozen(
        self, name: str, model: str, settings: FrozenSettings | None = None, *, snapshot_every: int = 0
    ) -> FrozenModel:
        """Add a frozen model: a judge, a teacher or reference, or an opponent (docs/judges.md).

        Its engines have devices of their own, and start with the other actors in :meth:`start`. Lost engines are
        replaced. The returned handle can be used from then on: in the functions of episodes and stages, and here.

        Args:
            name: lower-case letters and ``_``; used in messages and metrics.
            model: Hugging Face folder or Hub name.
            settings: settings of its engines; None uses one engine.
            snapshot_every: load the policy's current weights every this many versions (in :meth:`publish`), for a
                self-distillation teacher or an opponent; 0: never.

        Raises:
            FrozenRefused: it cannot be served, or the launch has too few devices; says what to do. Raised before
                anything is spawned.
        """
        if self._begun is not None:
            raise RuntimeError("frozen models are started by run.start(...): call run.frozen(...) before it")
        first_device, offered = self.settings.first_frozen_device, self._spawning_cluster.devices
        return self._add_frozen(name, model, settings, first_device, offered, snapshot_every)

    def _add_frozen(
        self,
        name: str,
        model: str,
        settings: FrozenSettings | None,
        first_device: int,
        offered: Devices,
        snapshot_every: int,
    ) -> FrozenModel:
        s, given = self.settings, settings or FrozenSettings()
        start_s = given.start_deadline_s or s.generator.start_limit_s(offered.kind == "cuda")
        given = replace(given, start_deadline_s=s.patient_s(start_s))
        return self._frozen.add(name, model, given, s.model, first_device, offered, snapshot_every, s.rollout)

    def track(self, name: str, tracker: Tracker) -> None:
        """Send the run's metrics to a tracker of your own, too, besides those of ``--track``.

        Args:
            name: used in messages.
            tracker: called on a thread of its own; one that raises is dropped, and no step waits for it.

        Raises:
            ValueError: a tracker of this name exists, also of ``--track``.
            TypeError: it is not an object with the methods of a tracker.
            RuntimeError: the run has started.
        """
        if isinstance(tracker, type) or not isinstance(tracker, Tracker):
            raise TypeError(f"the tracker {name!r}, {tracker!r}, is no object with the methods start, log and end")
        if self._begun is not None:
            raise RuntimeError("trackers are started by run.start(...): call run.track(...) before it")
        if name in self._trackers or name in TRACKERS:
            raise ValueError(f"there is already a tracker {name!r}: choose another name")
        self._trackers[name] = tracker

    async def start(
        self,
        task: Task | None = None,
        *,
        advantage: Advantage | str,
        objective: Objective | LossFunction,
        stages: Sequence[Stage] = (),
    ) -> None:
        """Start all actors, serve the model as version 0 (or the restored version), and start to watch the processes.

        Args:
            task: the episodes to roll out, and their rewards; None: :attr:`task`. Only for a task that cannot be
                created by :func:`launch`, such as one whose episodes ask a frozen model.
            advantage: maps a group to the advantages of its sequences, turns or tokens
                (:data:`monarch_rl.algorithms.group_view.Advantage`), or a name in ``ADVANTAGES``.
            objective: an objective, whose loss function also reads ``trainer.loss``, or a loss function of your own
                (:data:`monarch_rl.trainer.objective.LossFunction`).
            stages: applied to each group in turn, between its rollout and its training.

        Raises:
            ValueError: settings that cannot work, a column that is read but not filled, or a task other than the one
                that :func:`launch` was given; names them. Raised before anything is spawned.
            ProbeFailed: the task's code does not return rewards; names the function.
            TypeError: the task or a function cannot be sent to other processes; says why.
        """
        cluster = self._spawning_cluster
        self._check_first_start()
        launched, task = self._launched_task, task or self.task
        settings, model = prepare(self.settings, cluster.devices, task)  # launch() may not have known this task
        register_modules()
        if launched is not None:
            check_same_task(task, launched)
        trainer = settings.trainer
        refusals, warnings = Refusals(), list[str]()
        functions: TrainingFunctions | None = None
        with refusals:
            check_unread_objective(settings.objective, settings.default_objective, objective)
        with refusals:
            functions = TrainingFunctions.of(advantage, objective, trainer.loss, trainer.critic)
        if functions is not None:
            warnings += loss_warnings(objective, trainer.loss, trainer.updates_per_batch)
            warnings += lr_warnings(trainer, trained_model(model, trainer.lora).sizes.elements)
            with refusals:
                check_columns(functions, columns_filled(stages), trainer.reference, trainer.critic.enabled)
            with refusals:
                check_that_columns_are_read(functions, columns_for_training(stages))
            with refusals:
                if settings.buffer.drop_equal_rewards and (warning := equal_rewards_warning(functions)):
                    warnings.append(warning)
        refusals.raise_all()
        assert functions is not None
        if warning := template_warning(model.folder):
            warnings.append(warning)
        for warning in warnings:
            print(f"warning: {warning}")
        self._learning_signal.reads_rewards = not without_rewards(functions)
        print(
            f"The gradient of a mini-batch is divided by {trainer.loss.normaliser(normaliser_tokens(settings))}, and "
            f"clipped to a norm of {trainer.max_grad_norm:g} (trainer.max-grad-norm)."
        )
        task_by_value = ByValue(task, f"task {task.name}") if task is launched else sent(task)  # launch() has tried it
        stages_by_value = ByValue(stages, "a stage")
        for stage in stages:
            ByValue.checked(stage, f"the stage {stage.name}")
        if self._survivors is None:
            freeze_heap()  # here, because nothing waits for this process while the fork server imports
        if settings.probe and self._survivors is None:
            say("trying an item of the task")
            await cluster.fork_server.imported(SCORING_PRELOAD)
            for warning in await probe(task, settings.rollout, cluster.fork_server.name):
                print(f"warning: {warning}")
        actors = await start_actors(
            cluster,
            settings.with_patience(),
            task_by_value,
            model,
            functions,
            stages_by_value,
            self._frozen,
            self.resumed,
            self.folder,
            survivors=self._survivors.actors if self._survivors else None,
        )
        if not actors.end_tokens:
            print(
                f"warning: no file in {model.folder} names an end token: answers end only at rollout.max-new-tokens or "
                "a stop string, and supervised ones have no end"
            )
        if cluster.num_hosts > 1 and self.folder is not None:
            monitors = [monitor for _, of_mesh in cluster.monitors for monitor in of_mesh]
            self._lifetimes.callback(asyncio.create_task(note_hosts(self.folder, monitors)).cancel)
        await self.begin(actors, task)
        if self._survivors is not None:
            self._survivors.note_returned()
            thaw_heap()  # objects of the ended run are garbage, which a frozen heap would never collect
            freeze_heap()

    async def begin(self, actors: Actors, task: Task | None = None) -> None:
        """Like :meth:`start`, but with existing actors: for simulations, tests and benchmarks."""
        own_task = self._check_first_start()
        s, resumed = self.settings, self.resumed
        publisher = await Publisher.connect(
            actors.trainer,
            actors.generators.handles,
            actors.buffer,
            self._patient_settings.weights,
            resolve_dtype(s.generator.dtype, self._on_gpu),
            actors.workers,
            actors.frozen,
            on_gpu=self._on_gpu,
        )
        self._lifetimes.callback(publisher.cancel)
        if resumed is not None:
            resumed.check_base_weights(publisher.base_weights_by_layer())
        publisher.replicas.lost.update({index: "it did not restart" for index in actors.generators.lost})
        epoch = None if task is None or task.epoch is None else task.epoch()
        observer = Observer(publisher, actors.workers, actors.buffer, epoch)
        restored, seconds = self.version, resumed.manifest.seconds if resumed else 0.0
        outputs = self._lifetimes.enter_context(
            open_outputs(self.folder, actors, s, restored, seconds, lambda: self.warm_up_steps, self._trackers)
        )
        self._lifetimes.callback(self._best.close)
        if resumed is not None:
            observer.restore(resumed.manifest.counters)
            await self._replay_steps(actors, resumed, observer, outputs)
        # Nothing is sampled before the served weights have been verified to be the trainer's.
        await publisher.publish(self.version)
        await publisher.wait_until_served()
        outputs.note(f"version {self.version} is served")
        if resumed is not None:
            await on_disk(disk_limit_s(0), "the run's settings", note_settings, resumed.run, s)
            await take_snapshots(actors, self.version, self.folder, resumed=True)
        recovery = Recovery(
            actors.generators, actors.workers, publisher, actors.buffer, s.recovery, self.folder, actors.frozen
        )
        # waits: for nothing, since it begins by starting a task
        await self._lifetimes.enter_async_context(outputs.following_episodes())
        failures = Failures(actors.buffer, s.stall_s)
        # waits: for nothing, since the watch begins by starting a thread
        watch = await self._lifetimes.enter_async_context(self._watched(recovery))
        await self._lifetimes.enter_async_context(recovery.supervising(failures.follow()))
        checkpoints: Checkpoints | NoCheckpoints = NoCheckpoints()
        if self.folder is not None:
            checkpoints = Checkpoints(
                self.folder,
                actors,
                s.checkpoint,
                run_settings=to_record(s),
                note=outputs.note,
                before=outputs.take_episodes,
                version=restored,
                generation=resumed.generation if resumed else 0,
                metric=lambda: self._best.metric,
            )
        progress = Progress(
            None if self.folder is None else outputs.note,
            actors.buffer,
            actors.workers,
            watch.state_of,
            outputs.status,
        )
        evaluations = Evaluations(
            s,
            s.generator.running_requests(self._on_gpu),
            actors.workers,
            publisher,
            failures,
            task,
            outputs,
            self._best,
            self.on_best,
            checkpoints,
            progress,
        )
        self._lifetimes.callback(evaluations.cancel)
        await self._lifetimes.enter_async_context(failures.summary_at_end(observer, outputs.note))
        frozen = FrozenMeter(actors.frozen)
        self._begun = RunComponents(
            actors, publisher, observer, recovery, frozen, watch, outputs, evaluations, progress
        )
        self._checkpoints = checkpoints
        # After replayed steps, checkpoint at once, so that another loss does not cost the same replay again.
        if self.version > restored:
            await self._checkpoints.begin(self.version, self._controller_state)
        self._cluster.interrupts.take_over = own_task.cancel

    def _watched(self, recovery: Recovery) -> AbstractAsyncContextManager[Watch | NoWatch]:
        """The watch of the run's processes, in a block."""
        s = self.settings
        if isinstance(self._cluster, LocalProcess) or self.folder is None:
            return nullcontext(NoWatch())
        return watched(self._cluster, self.folder, s.stall_s, recovery.recover, s.checkpoint.grace_s, timeline=True)

    async def _replay_steps(
        self, actors: Actors, resumed: Resumed, observer: Observer, outputs: RunOutputs | NoOutputs
    ) -> None:
        """Replay the journaled steps after the checkpoint, and log them."""

        async def log(step: int, trained: list[dict[str, float]], counts: Counts) -> None:
            self.version = step
            # A supervised step precedes all batches. Those of an earlier version count as steps of the run.
            if not counts.trained and not self._warm_up_counts_as_steps:
                self.warm_up_steps = step
            outputs.write(step, observer.without_rollouts(trained, counts), await outputs.token_lines())

        s, most = self.settings, self.warm_up_steps + self.settings.steps
        if s.journal.mib:
            limit_s = self._patient_settings.update_limit_s + s.trainer.compile_limit_s
            # waits: its calls have deadlines
            async for message in replay_steps(actors, resumed, s.journal.mib << 20, most, limit_s, log):
                outputs.note(message)

    def _check_first_start(self) -> asyncio.Task[object]:
        """Returns the task that uses the run, which is the current one. Raises RuntimeError."""
        if self._begun is not None:
            raise RuntimeError("the run has already been started: call run.start(...) once")
        task = asyncio.current_task()
        if task is None or task is not self._task:
            raise RuntimeError("await run.start() in the task that opened the run, not in wait_for() or create_task()")
        return task

    # -- the loop --------------------------------------------------------------------------------------------------

    async def steps(self, count: int) -> AsyncIterator[int]:
        """Yield the numbers of the steps to train, 1 to ``count``; a resumed run begins after its last trained step.
        Supervised steps are not among them.

        Rollout workers generate from the first step to the last. Checkpoints are written after steps where one is due.
        After the last step, generation has stopped and the newest version is served. Can be used once.
        """
        if self._phase is not Phase.SET_UP:
            raise RuntimeError("run.steps() can be used once: the buffer is closed after the last step")
        self._phase = Phase.ROLLING_OUT
        await self._rollouts.enter_async_context(self._components.recovery.rolling_out())
        await self._components.observer.begin()
        for step in range(self._steps_trained + 1, count + 1):
            yield step
            state = self._last_controller_state if step == count else self._controller_state
            await self._checkpoints.after_step(self.version, state, last=step == count)
        await self._end_rollouts()

    async def update(self) -> list[dict[str, float]]:
        """Wait for the next batch and train on it, which produces the next version; returns metrics by trainer rank.

        Raises:
            DeadlineExceeded: batch and update took longer than the limit; states what is missing. The limit is
                ``update_deadline_s`` for the first step, and then adapts to recent steps (:class:`Patience`), but never
                exceeds it.
        """
        actors = self.actors
        if self._phase is Phase.SET_UP:
            raise RuntimeError("no rollouts are running: call run.update() inside `async for step in run.steps(...)`")
        return await self._updated(update(actors.trainer, actors.buffer, self.version, self._step_patience))

    async def _updated(self, work: Awaitable[list[dict[str, float]]]) -> list[dict[str, float]]:
        """Await the update that produces the next version; returns metrics by trainer rank."""
        self._updating = asyncio.ensure_future(work)
        self._updating.add_done_callback(_retrieve)
        step = f"step {self._steps_trained + 1}"
        if self._phase is Phase.SET_UP:
            step = f"warm-up {self.warm_up_steps + 1}"
        async with self._components.progress.step(step):
            metrics = await self.publisher.unless_publishing_fails(asyncio.shield(self._updating))
        self._note_update(metrics)
        return metrics

    def _note_update(self, metrics: list[dict[str, float]]) -> None:
        self.version += 1
        if self._phase is Phase.SET_UP:
            self.warm_up_steps += 1
        self._unlogged, self._updating = metrics, None

    async def publish(self) -> None:
        """Start to publish the newest version. Returns after the local copy: decoding and training continue meanwhile.
        Frozen models with ``snapshot_every`` load the policy's weights before this returns, if they are due."""
        await self.publisher.publish(self.version)
        async with self._components.progress.waiting("frozen models to load the policy's weights"):
            await take_snapshots(self.actors, self.version, self.folder)

    async def log(self, update_metrics: list[dict[str, float]]) -> dict[str, float]:
        """Gather the other actors' metrics of the step; write and print them together with those of the update.

        Args:
            update_metrics: the result of :meth:`update`.

        Returns:
            The metrics of the step, named as in docs/metrics.md.
        """
        components, outputs = self._components, self._components.outputs
        token_lines = await outputs.token_lines()
        values = await components.frozen.metrics() | await components.observer.step(update_metrics)
        # No await from here on: after a signal in between, the step would be logged twice, or its rates lost.
        values |= components.recovery.metrics() | components.watch.loop_lag()
        values |= self._checkpoints.metrics()
        values |= outputs.metrics(components.watch.lost_spans(), components.watch.timeline_cpu_s())
        outputs.write(self.version, values, token_lines)
        self._unlogged = None
        outputs.show(self._steps_trained, values)
        if warning := self._learning_signal.note(values):
            outputs.note(f"warning: {warning}")
        return values

    async def step(self) -> dict[str, float]:
        """Call :meth:`update`, :meth:`publish` and :meth:`log`; returns the metrics of the step."""
        update_metrics = await self.update()
        await self.publish()
        return await self.log(update_metrics)

    # -- supervised training on rows of prompt and answer ----------------------------------------------------------

    async def supervised(
        self, rows: Sequence[Row], *, steps: int, rows_per_step: int = 64, lr_factor: float = 1.0
    ) -> None:
        """Warm up: train ``steps`` supervised steps before step 1 of the run, and publish the last one.

        The loss is the cross-entropy of the answers' tokens, averaged over the tokens of a step. Each step is one
        optimiser step and produces a version, but is no step of ``run.steps(n)`` and none of the learning rate's
        schedule: its rate is ``trainer.lr`` times ``lr_factor``, after a warm-up of its own. A resumed run trains the
        remaining steps.

        Args:
            rows: mappings with ``prompt`` (text or messages) and ``answer`` (text): a list, or a reader of
                ``tasks/rows.py``. They are rendered by the model's chat template. Numbers are text as in templates.
            steps: supervised steps in all: a second call, with other rows, counts those of the first.
            rows_per_step: rows per step; each pass over the rows has another order.
            lr_factor: multiplies ``trainer.lr``: supervised steps usually use a higher rate.

        Raises:
            ValueError: the rows cannot be trained; or the resumed run has begun without so many supervised steps, or in
                an earlier version that counted them otherwise. Says which and why.
        """
        if self._phase is not Phase.SET_UP:
            raise RuntimeError(
                "run.supervised(...) must come before run.steps(...), whose groups would become stale meanwhile: use "
                "await run.mix(rows, share=...) to train on rows alongside them"
            )
        # In a thread, because all rows are checked.
        plan = await asyncio.to_thread(plan_rows, rows, self.settings, rows_per_step, lr_factor=lr_factor)
        if not self._warms_up(steps):
            if self._warm_up_goal:  # an earlier call of this process has made them, not one before a resume
                self._components.outputs.note(
                    f"warning: run.supervised(steps={steps}) trains nothing: {self.warm_up_steps} supervised steps are "
                    "done, and steps counts those of earlier calls, too"
                )
            return
        actors = self.actors
        self._warm_up_goal = steps
        async with self._components.progress.waiting(READ_ROWS):
            await use_rows(actors.trainer, plan)
        while self.warm_up_steps < steps:
            work = supervised_update(actors.trainer, actors.buffer, self.version, self._patient_settings.update_limit_s)
            await self._log_supervised(await self._updated(work))
            await self._checkpoints.after_step(self.version, self._controller_state, last=False)
        await self.publish()

    def _warms_up(self, steps: int) -> bool:
        """Whether supervised steps are left to train. Raises ValueError if they can no longer be trained."""
        begun = self._steps_trained > 0
        if begun and self._warm_up_counts_as_steps:
            if self.version >= steps:  # they are the first steps of this run, and go on counting as such
                return False
            raise SettingsError(
                f"cannot resume: the checkpoint of step {self.version} was written before the end of "
                f"run.supervised(steps={steps}) by an earlier version, which counted these steps otherwise. Begin a "
                "new run without --resume"
            )
        if begun and steps > self.warm_up_steps:
            raise SettingsError(
                f"run.supervised(steps={steps}): the run that is resumed had {self.warm_up_steps} supervised steps "
                f"before its first step. Give steps={self.warm_up_steps}, or begin a new run without --resume"
            )
        return self.warm_up_steps < steps

    async def _log_supervised(self, update_metrics: list[dict[str, float]]) -> None:
        """Write and print the metrics of a supervised step."""
        components = self._components
        values = components.observer.without_rollouts(update_metrics, await self.counts())
        components.outputs.write(self.version, values, [])
        self._unlogged = None
        loss = values.get("trainer/supervised_loss", math.nan)
        components.outputs.show_warm_up(self.warm_up_steps, self._warm_up_goal, loss)

    async def mix(self, rows: Sequence[Row], *, share: float) -> None:
        """From the next update on, train on ``rows`` in addition to each batch. The loss is (1 - share) x the
        objective's loss + share x the cross-entropy of the answers (arXiv:2508.11408).

        The number of rows per batch is such that they are ``share`` of its sequences. They were not sampled from a
        policy version, so they have no lag.

        Args:
            rows: prompts and answers, as for :meth:`supervised`.
            share: the rows' share of the sequences and of the loss, above 0 and below 1.

        Raises:
            ValueError: the rows cannot be trained; says why.
        """
        plan = await asyncio.to_thread(plan_mixed_rows, rows, self.settings, share)
        async with self._components.progress.waiting(READ_ROWS):
            await use_rows(self.actors.trainer, plan)

    # -- evaluation, frozen models, saving -------------------------------------------------------------------------

    async def evaluate(self, held_out: str = "") -> Evaluation:
        """Wait until the newest version is served, evaluate it on held-out items, and log the result.

        Args:
            held_out: name of a set, to evaluate on all its items. Empty: the sets in ``evaluation.sets``, each in full;
                or, if there are none, the first ``held_out`` items (setting) of the task's first set.

        Returns:
            The result of the first set.

        Raises:
            ValueError: the task has no such set.
        """
        return await self._components.evaluations.run(self.version, held_out)

    async def evaluate_after(self, step: int) -> None:
        """Evaluate if an evaluation is due after ``step``: now, or concurrently with the next steps if
        ``evaluation.share`` is set.

        An evaluation that is due while another one is still running is skipped, with a message on the console.
        """
        components = self._components
        if not self.settings.evaluates_after(step):
            return
        if not self.settings.evaluation.share:
            await self.evaluate()
        elif not await components.evaluations.begin_concurrent(self.version):
            components.outputs.note(
                f"no evaluation after step {step}: the previous one is still running (--evaluation.share)"
            )

    @property
    def best(self) -> Measurement | None:
        """The best evaluation result so far, by ``evaluation.best``."""
        return self._best.best

    async def load_frozen(self, model: FrozenModel, folder: Path) -> None:
        """Have a frozen model serve the weights of another folder with tensors of the same names and shapes, such as
        one written by :meth:`save`: an earlier policy version, as an opponent or a teacher. Its engines verify them.

        Raises:
            ValueError: the run has no such frozen model, or the folder holds another model; nothing has changed.
        """
        pools = [pool for pool in self.actors.frozen if pool.model == model]
        if not pools:
            existing = ", ".join(pool.model.name for pool in self.actors.frozen) or "none"
            raise SettingsError(
                f"the run has no frozen model {getattr(model, 'name', model)!r} to load {folder} into; it has "
                f"{existing}. Add it by run.frozen(...) before run.start(...), and pass load_frozen the returned handle"
            )
        async with self._components.progress.waiting(f"frozen model {pools[0].model.name} to load {folder}"):
            await pools[0].load(folder)

    async def save(self) -> None:
        """Write the policy at :attr:`version`, the newest trained one, to ``model/`` in the run's folder, as a Hugging
        Face folder; replaces an earlier one once complete. LoRA is merged, and also written to ``model_adapter/``."""
        if self.folder is None:
            raise RuntimeError("the run has no folder to save the model to")
        actors = self.actors
        async with self._components.progress.waiting(f"trainer ranks to write {self.folder / SAVED}"):
            await save(actors.trainer, self.folder / SAVED, actors.model_bytes, actors.end_tokens)
        self.saved = self.folder / SAVED

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _controller_state(self, limit_s: float | None = None) -> ControllerState:
        """The controller's current state. Flushes the run's files to disk first. Raises OSError.

        Args:
            limit_s: seconds for the flush; None is the short limit for a flush that delays a step.
        """
        components = self._components
        positions = components.outputs.flush(limit_s)
        return ControllerState(
            seconds=components.outputs.seconds,
            positions=positions,
            counters=components.observer.counters(),
            best=self._best.best,
            warm_up_steps=None if self._warm_up_counts_as_steps and not self.warm_up_steps else self.warm_up_steps,
            base_weights=components.publisher.base_weights_by_layer(),
        )

    def _last_controller_state(self) -> ControllerState:
        # A longer limit, because no step waits for it.
        return self._controller_state(self.settings.checkpoint.grace_s or None)

    async def _save_before_the_end(self) -> None:
        """Write a last checkpoint, whatever ends the run, if trainer and buffer are alive. Never raises."""
        grace_s = self._checkpoints.grace_s
        if not grace_s or self._phase is Phase.ENDED or self._cluster.interrupts.reason:
            return
        try:
            await within(grace_s, self._save_progress(), "a last checkpoint", on="the disk")
        except (Exception, asyncio.CancelledError) as failed:  # only logged: the run ends with its own error
            logger.error("no last checkpoint: %s", last_line(failed))

    async def _save_progress(self) -> None:
        actors = self.actors
        await check_alive(actors.trainer, actors.buffer)
        held = await hold(actors.buffer)
        # During set-up the update is supervised, and needs no batch from the buffer.
        if self._updating is not None and (held > self.version or self._phase is Phase.SET_UP):
            await asyncio.wait([self._updating])  # waits: for an update that has its batch, which has a deadline
            if not self._updating.cancelled() and self._updating.exception() is None:
                self._note_update(self._updating.result())
        if self._unlogged is not None:
            log = self._log_supervised if self._phase is Phase.SET_UP else self.log
            await log(self._unlogged)
        if self.version:
            await self._checkpoints.now(self.version, self._last_controller_state)

    async def counts(self) -> Counts:
        """The buffer's counts so far."""
        return await within(CALL_DEADLINE_S, self.actors.buffer.counts.call_one(), "the buffer's counts", on="buffer")

    async def _end_rollouts(self) -> None:
        """Wait until the newest version is served, close the buffer, and wait for the workers to end."""
        if self._phase is not Phase.ROLLING_OUT:
            return
        progress = self._components.progress
        async with progress.waiting("the evaluation that runs in parallel"):
            await self._components.evaluations.end()
        async with progress.waiting("generators to serve the last version"):
            await self.publisher.wait_until_served()
        async with progress.waiting("the last checkpoint to be written"):
            await self._checkpoints.settled()
            # steps() has done this already, unless the recipe left its loop early.
            if self.version:
                await self._checkpoints.after_step(self.version, self._last_controller_state, last=True)
            await self._checkpoints.settled()
        self._phase = Phase.ENDED
        # waits: for the buffer, within a deadline; then for the workers, which end with it
        await self._rollouts.aclose()


def check_same_task(given: Task, launched: Task) -> None:
    """Refuse a task for :meth:`Run.start` that differs from the one that :func:`launch` was given: in its name, its
    code, its rewards' marks, its first items or its sets of held-out items. Raises SettingsError."""
    if given is launched:
        return
    compared = [
        ByValue(
            (
                one.name,
                one.episode,
                one.group_rewards,
                (one.success_reward, one.full_context_reward),
                {name: (len(held), [held[n] for n in range(min(4, len(held)))]) for name, held in one.held_out.items()},
                [one.items(cursor) for cursor in range(4)],
            ),
            f"task {one.name}",
        )
        for one in (given, launched)
    ]
    if compared[0] != compared[1]:
        raise SettingsError(
            f"run.start(...) was given task {given.name}, and launch(...) task {launched.name}, which differs from it: "
            "leave the task out of run.start(...), which then uses the one of launch(...), or leave it out of "
            "launch(...) if it is only known in train(...), as with a frozen model"
        )


def _retrieve(update: asyncio.Future[list[dict[str, float]]]) -> None:
    """Retrieve an update's exception, so that asyncio does not report it as never retrieved."""
    if not update.cancelled():
        update.exception()


def launch(train: Callable[[Run, S], Awaitable[None]], settings: S, task: Callable[[S], Task] | None = None) -> None:
    """Run a recipe: check its settings, bring up the hosts, and call ``train`` with a :class:`Run` on the controller.

    Under ``torchrun`` every rank calls this; rank 0 becomes the controller, the others host processes. Invalid settings
    end the program with a one-line error that names the setting, before the run starts. What the run prints is
    also in ``console.log`` in its folder; it does not depend on the console (``observe/console_relay.py``).

    Args:
        train: the recipe.
        settings: the recipe's settings.
        task: creates the task, which is checked with the settings, and which :meth:`Run.start` uses. None: ``train``
            passes a task to :meth:`Run.start`.
    """
    if intercept_launch(train, settings, task):  # a tool only reads the recipe (`capturing`), and no run starts
        return
    leave_heap()
    supervisor.follow_supervisor()
    relay = relay_output(console_folder())
    note_hangups()  # here, because a model may be downloaded for minutes before the hosts start
    say(f"checking the settings for {settings.model}")
    try:
        given, settings = settings, keep_sizes(with_recorded_model(settings))
        refusals, made = Refusals(), None
        with refusals:
            made = None if task is None else task(settings)
        with refusals:
            offered = devices()
            settings, _ = prepare(settings, offered, made)
        refusals.raise_all()
        if made is not None:
            register_modules()
            sent(made)  # here, because run.start() comes after the hosts
        resumed = resolve_resume(settings)
    except (TypeError, ValueError) as error:
        if not raised_in_package(error):  # it comes from the recipe's own code: its author needs the traceback
            raise
        end_relay()  # no run begins
        sys.exit(f"error: {error}")
    if settings.trainer.deterministic and offered.kind == "cuda":
        fix_nccl_order()
    say("starting the hosts")
    with (
        restarting_after_loss(settings.checkpoint.restarts),
        page_of_failed(settings.checkpoint.restarts, settings.report),  # when all other processes have ended
        launch_cluster(PRELOADS, settings.checkpoint.grace_s) as cluster,
    ):
        if cluster is None:  # a torchrun rank other than 0, which only hosted processes
            return
        folder = take_folder(settings, resumed)
        relay.log_to(folder)
        if chosen := chosen_sizes(given, settings):
            print(f"{' and '.join(chosen)} by default {'as before' if resumed else 'on this machine'}")
        say(f"Run folder: {folder}")
        print(schedule(settings.groups_per_step, settings.rollout.group_size, settings.buffer))
        try:
            origin = None if resumed is None else resumed.checkpoint
            best, changed = settings.evaluation.best, changed_settings(given)
            with recording_state(folder, cluster.interrupts, settings.name, origin, best, changed, offered.kind):
                supervisor.note(folder, restarts=settings.checkpoint.restarts)
                run = asyncio.run(_train(train, settings, cluster, folder, resumed, made))
        except (EpisodesFail, FrozenRefused, ProbeFailed) as error:
            # The message has what the recipe's author needs; a traceback would not help.
            sys.exit(f"error: {error}")
        except ActorError as error:
            if not isinstance(cause := raised_by_actor(error), OutOfMemory):
                raise
            write_whole(folder / ERROR, "".join(traceback.format_exception(error)))
            sys.exit(f"error: {cause}. The traceback is in {folder / ERROR}")
        except asyncio.CancelledError:
            if (number := cluster.interrupts.received) is None:
                raise
            if cluster.interrupts.reason is None:  # otherwise this process sent itself the signal, because of a loss
                print(f"interrupted: exit code {128 + number}; {how_to_resume(folder)}")
            raise KeyboardInterrupt from None
        try:
            for line in closing_lines(folder, settings, run._steps_trained, run.warm_up_steps, run.saved):
                print(line)
        except Exception as error:  # such as a damaged line of a file: the run has ended well all the same
            logger.warning("the last lines of the run cannot be made (%s); its files are in %s", error, folder)
        if settings.report:
            print(*page_lines(folder), sep="\n")


async def _train(
    train: Callable[[Run, S], Awaitable[None]],
    settings: S,
    cluster: Cluster,
    folder: Path,
    resumed: Resumed | None,
    task: Task | None,
) -> Run:
    """Call the recipe, and again after each warm restart; returns the ended run."""
    survivors: Survivors | None = None
    while True:
        run = Run(settings, cluster, folder, resumed, survivors, task)
        try:
            # In a task of its own, because a failing run cancels its task, which must not affect the next run.
            await asyncio.create_task(_call(train, run, settings))  # waits: as long as the run
            return run
        except Exception as error:
            cluster.interrupts.take_over = None
            if run._begun is None:
                if survivors is None:
                    raise
                logger.error("warm restart failed: %s", last_line(error))
                raise survivors.cause from error
            survivors = await find_survivors(error, run.actors, run._checkpoints, settings, cluster, folder, resumed)
            if survivors is None:
                raise
            resumed = survivors.resumed


async def _call(train: Callable[[Run, S], Awaitable[None]], run: Run, settings: S) -> None:
    async with run._opened():
        await train(run, settings)


# -- supervised rows: sending prompts and answers to the trainer ranks, and updates on them ---------------------------


def plan_rows(
    rows: Sequence[Row], s: RunSettings, rows_per_step: int, share: float = 1.0, lr_factor: float = 1.0
) -> SupervisedPlan:
    """The plan of supervised training on ``rows``. Raises ValueError for invalid rows or numbers."""
    rows = as_rows(rows)
    check_rows(rows)
    if rows_per_step < 1:
        raise SettingsError(f"rows_per_step must be at least 1, got {rows_per_step}")
    if not 0 < lr_factor < float("inf"):
        raise SettingsError(f"lr_factor must be positive and finite, got {lr_factor:g}")
    by_value = ByValue(rows, "supervised rows")
    chat = s.rollout.template_options, s.rollout.allow_control_tokens
    return SupervisedPlan(by_value, rows_per_step, share, lr_factor, *chat)


def plan_mixed_rows(rows: Sequence[Row], s: RunSettings, share: float) -> SupervisedPlan:
    """The plan for rows that make up ``share`` of the sequences, and of the loss, of each batch. Raises ValueError."""
    if not 0 < share < 1:
        raise SettingsError(
            f"share {share:g} of supervised rows must be above 0 and below 1: for 0, do not call run.mix"
        )
    rows_per_step = max(1, round(share / (1 - share) * s.groups_per_step * s.rollout.group_size))
    if rows_per_step < s.trainer.minibatches:
        raise SettingsError(
            f"share {share:g} of supervised rows is {rows_per_step} rows per batch, fewer than trainer.minibatches "
            f"{s.trainer.minibatches}: give a larger share, or fewer mini-batches"
        )
    return plan_rows(rows, s, rows_per_step, share)


async def use_rows(trainer: Trainer, plan: SupervisedPlan) -> None:
    """Have all trainer ranks read the rows. Raises ValueError if their numbers of rows differ."""
    call = trainer.use_rows.call(plan)
    answers = await within(SET_UP_DEADLINE_S, call, "trainer ranks to read the supervised rows", on="trainer ranks")
    found = sorted(set(answers.values()))
    if len(found) > 1:
        raise SettingsError(
            f"trainer ranks read different numbers of supervised rows, {found[0]} and {found[-1]}: each machine needs "
            "the same rows"
        )


async def supervised_update(trainer: Trainer, buffer: Buffer, version: int, limit_s: float) -> list[dict[str, float]]:
    """Make one optimiser step on rows only on every trainer rank; metrics by rank."""
    call, what = trainer.supervised.call(version), f"trainer ranks to make supervised step {version + 1}"
    answers = await within(limit_s, call, what, on="trainer ranks", flag="patience")
    noted = buffer.note_supervised_version.call_one(version + 1)
    await within(CALL_DEADLINE_S, noted, "the buffer to note the step", on="buffer")
    wait_registry.progress("step trained")
    return list(answers.values())
