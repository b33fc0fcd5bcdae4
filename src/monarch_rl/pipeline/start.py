"""The actors of a run: the meshes of its four kinds, how each is started, and the calls that a run makes to them.

    buffer <-- groups -- rollout workers -- prompts --> generators
      |                                                     ^
      +-- batch --> trainer ranks -- new weights -----------+

Rollout data does not pass through the controller: workers submit groups to the buffer, and trainer ranks take batches
from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import ProcMesh

from monarch_rl.buffer.actor import Buffer, SavedBuffer
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.checkpoint.journal import FOLDER as JOURNAL
from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound
from monarch_rl.episode.logged import NOT_LOGGED, LoggedGroups
from monarch_rl.generator.actor import Generator
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.gpu import ON_SHARED_DEVICES
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.generator.settings import GeneratorSettings, resolve_dtype
from monarch_rl.model.config import ModelConfig, read_config
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.model.sizes import trained_model
from monarch_rl.model.tensors import model_bytes
from monarch_rl.pipeline.actor_pool import ActorFactory, ActorPool, ping
from monarch_rl.pipeline.frozen import FrozenPlan, FrozenPool, start_all_frozen
from monarch_rl.pipeline.memory import checkpoint_bytes, cpu_memory
from monarch_rl.pipeline.progress import Start, say
from monarch_rl.pipeline.resume import Resumed
from monarch_rl.pipeline.settings import RunSettings, episode_limits, normaliser_tokens
from monarch_rl.rollout.frozen import connect_frozen_models
from monarch_rl.rollout.scoring import PRELOAD as SCORING_PRELOAD
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.stages import Stage, columns_filled
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.cluster import Cluster, init_torch_distributed_env
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, Patience, disk_limit_s, within
from monarch_rl.runtime.machine_memory import check_free, free_memory
from monarch_rl.tasks.task import Task
from monarch_rl.trainer.actor import Trainer
from monarch_rl.trainer.functions import TrainingFunctions
from monarch_rl.trainer.plan import TRACES, TrainerPlan
from monarch_rl.trainer.settings import TrainerSettings

SET_UP_DEADLINE_S = 600.0
"""Seconds to set up workers or the buffer."""
ALIVE_S = 5.0
"""Seconds for trainer and buffer to answer at the end of a run; Monarch notices a lost process within 2 s."""
UPDATE_GRACE_S = 15.0
"""Seconds for a rank's error to arrive after the rank's own deadline for its batch."""


async def start_buffer(
    cluster: Cluster,
    groups_per_step: int,
    settings: BufferSettings,
    version: int = 0,
    bound: GroupBound = UNBOUNDED,
    resumed: SavedBuffer | None = None,
) -> Buffer:
    """Spawn the buffer actor on the first host.

    Args:
        version: version that is trained and served at the start.
        bound: limits of each group.
        resumed: saved state to restore instead of starting at ``version``.
    """
    await cluster.fork_server.imported("torch")
    buffer: Buffer = cluster.spawn("buffer", 1, preload="torch").spawn(
        "buffer", Buffer, groups_per_step, settings, version, 0, resumed, bound
    )
    return buffer


async def set_up_buffer(cluster: Cluster, buffer: Buffer) -> None:
    """Wait until the buffer has started."""
    await within(SET_UP_DEADLINE_S, buffer.setup.call_one(), "the buffer to come up", on="buffer")
    await cluster.locate(cluster.named("buffer"))


async def start_trainer(cluster: Cluster, plan: TrainerPlan, buffer: Buffer, first_device: int) -> Trainer:
    """Spawn the trainer mesh in one torch.distributed world, with the model loaded and sharded."""
    await cluster.fork_server.imported("trainer")
    mesh = cluster.spawn("trainer", plan.settings.ranks, first_device=first_device, preload="trainer")
    await init_torch_distributed_env(mesh)
    trainer: Trainer = mesh.spawn("trainer", Trainer, plan, buffer)
    what = f"{plan.settings.ranks} trainer ranks to load {plan.model}"
    if plan.settings.compile:
        what += " and compile its blocks"
    limit_s = disk_limit_s(model_bytes(read_config(plan.model))) + plan.settings.compile_limit_s
    await within(limit_s, trainer.setup.call(), what, on="trainer ranks")
    await cluster.locate(mesh)
    return trainer


async def restore_trainer(trainer: Trainer, folder: Path, version: int, optimizer_steps: int, nbytes: int) -> None:
    """Have all trainer ranks restore a checkpoint of ``nbytes``, which lengthen the deadline."""
    what = f"trainer ranks to read {folder}"
    restoring = trainer.restore.call(str(folder), version, optimizer_steps)
    await within(disk_limit_s(nbytes), restoring, what, on="the disk")


async def start_generators(
    cluster: Cluster,
    model: ModelConfig,
    settings: GeneratorSettings,
    first_device: int,
    lora: LoraSettings = FULL_TRAINING,
    expert_routes: bool = False,
    survivors: ActorPool[Generator] | None = None,
    shared: bool = False,
) -> ActorPool[Generator]:
    """Spawn the generator replicas, one process mesh each, with their engines running.

    Args:
        first_device: first device of replica 0; the other replicas' devices follow.
        lora: the trainer's settings; with adapters, a version is the adapter, or the weights that it is merged into.
        expert_routes: whether requests may ask for the experts of each token.
        survivors: replicas with the same settings that survive a warm restart; those that answer are reused, and one
            running replica is enough to continue.
        shared: whether trainer ranks share the devices.

    Raises RuntimeError if the only host of a run without GPUs has too little free memory for all replicas.
    """
    on_gpu = cluster.devices.kind == "cuda"
    memory = None if on_gpu else cpu_memory(model, settings, lora)
    if survivors is None and memory is not None and cluster.num_hosts == 1:
        check_free(memory, free_memory(), engines=settings.replicas)

    def spawn(index: int) -> tuple[ProcMesh, Generator]:
        device = first_device + index * settings.tp
        mesh = cluster.spawn(
            f"generator{index}",
            1,
            first_device=device,
            devices_per_process=settings.tp,
            env=ON_SHARED_DEVICES if shared else None,
            preload=ENGINE_PRELOAD,
        )
        return mesh, mesh.spawn(f"generator{index}", Generator)

    async def set_up(index: int, generator: Generator) -> None:
        name = f"generator {index}"
        start = generator.setup.call_one(str(model.folder), settings, index, lora, expert_routes, memory)
        limit_s = settings.start_limit_s(on_gpu) + CALL_DEADLINE_S
        await within(limit_s, start, f"{name} to start", on=name)

    async def join(index: int, generator: Generator) -> None:
        await ping(f"generator {index}", generator)

    await cluster.fork_server.imported(ENGINE_PRELOAD)
    generators = survivors or ActorPool("generator", "generator", factory=ActorFactory(cluster, spawn, set_up))
    await generators.start_all(settings.replicas, join=join if survivors else None)
    return generators


Engines = tuple[ActorPool[Generator], Sequence[FrozenPool]]
"""The engines that rollout workers ask: those of the policy, and those of each frozen model."""


async def start_rollout(
    cluster: Cluster,
    settings: RolloutSettings,
    task: ByValue[Task],
    model: Path,
    buffer: Buffer,
    engines: asyncio.Future[Engines],
    episode_limit: int,
    expert_routes: bool = False,
    stages: ByValue[Sequence[Stage]] | None = None,
    asks_frozen: bool = False,
    survivors: ActorPool[RolloutWorker] | None = None,
    logged: LoggedGroups | None = None,
) -> tuple[ActorPool[RolloutWorker], tuple[int, ...]]:
    """Spawn the rollout workers on the first host, each with its own process mesh and a dispatcher over all replicas.
    Returns them, and the ids at which the policy's turns end.

    The workers load what episodes need while the engines start.

    Args:
        engines: the engines that episodes may ask, once they run.
        episode_limit: maximum tokens of a sequence, prompts included; a longer one is cut there.
        expert_routes: whether episodes record the generators' experts for each token.
        stages: applied to each rolled-out group before it is submitted.
        asks_frozen: whether there are frozen models. The task may ask one while it is loaded, so it is loaded later.
        survivors: workers with the same settings, task and stages that survive a warm restart; those that can be set up
            again are reused, for ``buffer``.
        logged: the groups whose trained episodes workers record; None records no episodes.
    """

    end_tokens: tuple[int, ...] = ()

    def spawn(index: int) -> tuple[ProcMesh, RolloutWorker]:
        mesh = cluster.spawn(f"rollout{index}", 1, preload=SCORING_PRELOAD)
        name = f"rollout worker {index}"
        return mesh, mesh.spawn(
            "rollout", RolloutWorker, settings, task, str(model), name, expert_routes, stages, logged
        )

    async def set_up(index: int, worker: RolloutWorker) -> None:
        name = f"rollout worker {index}"
        if not asks_frozen:
            await within(SET_UP_DEADLINE_S, worker.load.call_one(), f"{name} to load the task", on=name)
        generators, frozen = await asyncio.shield(engines)  # waits: the starts of the engines have deadlines
        replicas = [generators.latest[replica] for replica in sorted(generators.latest)]
        models = [(pool.model, pool.dispatcher()) for pool in frozen]
        dispatcher = Dispatcher(replicas, settings.generate_limit_s)
        set_up = worker.setup.call_one(buffer, dispatcher, episode_limit, models)
        nonlocal end_tokens
        end_tokens = await within(SET_UP_DEADLINE_S, set_up, f"{name} to set up", on=name)

    await cluster.fork_server.imported(SCORING_PRELOAD)
    workers = survivors or ActorPool("rollout worker", "rollout")
    workers.factory = ActorFactory(cluster, spawn, set_up)
    await workers.start_all(settings.workers, join=set_up if survivors else None)
    return workers, end_tokens


def logged_groups(s: RunSettings) -> LoggedGroups:
    """The groups of a run that are recorded with their tokens."""
    return LoggedGroups(s.rollout.logged_groups, s.groups_per_step, s.rollout.seed or 0)


def served_dtype(settings: GeneratorSettings, cluster: Cluster) -> str:
    """The dtype in which generators serve, and in which versions are sent."""
    return resolve_dtype(settings.dtype, cluster.devices.kind == "cuda")


def schedule(groups_per_step: int, group_size: int, buffer: BufferSettings) -> str:
    """How rollouts and training overlap according to the settings, in two lines to print at the start of a run."""
    slots, window = buffer.slots_for(groups_per_step), buffer.window_for(groups_per_step)
    batch = (
        f"Each step trains on {groups_per_step} prompts x {group_size} episodes = {groups_per_step * group_size} "
        "episodes; the episodes of a prompt are a group."
    )
    order = "any number of groups" if window is None else f"at most {window} groups"
    overtaken = f"a slow group may be overtaken by {order}"
    if slots is None:
        return (
            f"{batch}\nAsynchronous without a bound: generators never wait, so tokens of any age may be trained, in "
            f"particular if generators are faster than the trainer; {overtaken}."
        )
    late = {
        "wait": "then the trainer waits for it",
        "drop": "a group whose tokens would become older is dropped",
        "mask": "tokens that would become older are not trained",
    }[buffer.late]
    lag = buffer.max_policy_lag
    meaning = (
        f"Asynchronous: when a token is trained, the policy is at most {lag} version{'s' * (lag > 1)} newer than the "
        "one that sampled it"
        if lag
        else "Synchronous: a token is trained by the policy version that sampled it"
    )
    again = f", each trained up to {buffer.replay} times" if buffer.replay > 1 else ""
    ahead = f"rollouts are started and stored for at most {slots} groups"
    return f"{batch}\n{meaning} (lag <= {lag}; {ahead}{again}; {overtaken}, {late})."


async def update(trainer: Trainer, buffer: Buffer, version: int, patience: Patience) -> list[dict[str, float]]:
    """Wait for the next batch and train on it, from ``version``, on every trainer rank; metrics by rank.

    Args:
        patience: deadline for batch and update together, derived from earlier steps.
    """
    with patience.step() as limit_s:
        # The rank's own deadline comes first, because its error has the buffer's report on what the batch lacks.
        call = trainer.update.call(version, limit_s)
        what = f"trainer ranks to make step {version + 1}"
        answers = await within(limit_s + UPDATE_GRACE_S, call, what, on="trainer ranks", flag="patience")
    await within(CALL_DEADLINE_S, buffer.trained.call_one(version + 1), "the buffer to note the step", on="buffer")
    wait_registry.progress("step trained")
    return list(answers.values())


async def check_alive(trainer: Trainer, buffer: Buffer) -> None:
    """Raise immediately if a trainer rank or the buffer is lost, so that no checkpoint can be written."""
    for who, call in (("trainer ranks", trainer.ready.call()), ("buffer", buffer.counts.call_one())):
        await within(ALIVE_S, call, f"{who} to answer before a last checkpoint", on=who)


async def hold(buffer: Buffer) -> int:
    """Have the buffer stop handing out batches; returns the version after the update in progress, if any."""
    call = buffer.hold.call_one()
    return await within(CALL_DEADLINE_S, call, "the buffer to stop handing out batches", on="buffer")


async def save(trainer: Trainer, folder: Path, nbytes: int = 0, end_tokens: Sequence[int] = ()) -> None:
    """Have the trainer ranks write the model as a Hugging Face folder that stops at ``end_tokens``; its ``nbytes``
    lengthen the deadline."""
    what = f"trainer ranks to save to {folder}"
    # on="the disk": the disk is no process of the run, so waiting for a slow one is not a stall.
    limit_s = disk_limit_s(nbytes) + CALL_DEADLINE_S
    await within(limit_s, trainer.save.call(str(folder), end_tokens), what, on="the disk")


# -- the actors of a run, and starting all of them --------------------------------------------------------------------

logger = logging.getLogger("monarch_rl")

WorkerInputs = tuple[ByValue[Task], ByValue[Sequence[Stage]]]
"""The task that workers roll out, and the stages that they apply to its groups."""


@dataclass(frozen=True)
class Actors:
    """Handles of all actors of a run. Generators, frozen engines and rollout workers can be replaced one by one."""

    buffer: Buffer
    trainer: Trainer
    generators: ActorPool[Generator]
    workers: ActorPool[RolloutWorker]
    model_bytes: int = 0
    """Size of the model's weight files; 0 if there are none."""
    checkpoint_bytes: int = 0
    """Size of the trainer's part of a checkpoint."""
    frozen: tuple[FrozenPool, ...] = ()
    """The engines of each frozen model."""
    end_tokens: tuple[int, ...] = ()
    """Ids at which the policy's turns end."""
    worker_inputs: WorkerInputs | None = None
    """Task and stages that the workers were started with; None if workers cannot be restarted."""


async def start_actors(
    cluster: Cluster,
    s: RunSettings,
    task: ByValue[Task],
    model: ModelConfig,
    functions: TrainingFunctions,
    stages: ByValue[Sequence[Stage]],
    frozen: Sequence[FrozenPlan] = (),
    resumed: Resumed | None = None,
    folder: Path | None = None,
    survivors: Actors | None = None,
) -> Actors:
    """Spawn and set up all actors. Trainer ranks use the first devices; replicas use the next ones, or the same.

    Args:
        task: the task to roll out.
        model: config of the model that is trained, and its Hugging Face folder.
        functions: advantage and objective.
        stages: applied by workers to each rolled-out group before it is submitted.
        frozen: frozen models; their engines use the devices after those of the replicas.
        resumed: state from which buffer and trainer resume; None starts from the model.
        folder: the run's folder, visible on all hosts.
        survivors: actors of a warm restart, whose trainer and buffer have been killed; the others are reused if they
            can be.
    """
    episode_limit = min(episode_limits(s, model, cluster.devices.kind == "cuda").values())
    journal = folder / JOURNAL if folder is not None and s.journal.mib else None
    updates = s.steps * s.trainer.updates_per_batch
    plan = TrainerPlan(
        model=model.folder,
        settings=s.trainer,
        total_steps=updates,
        temperature=s.rollout.temperature,
        normaliser_tokens=normaliser_tokens(s),
        functions=functions,
        journal=journal,
        journal_bytes=s.journal.mib << 20,
        generation=resumed.generation if resumed else 0,
        traces=folder / TRACES if folder is not None else None,
        logged=logged_groups(s) if folder is not None else NOT_LOGGED,
    )
    routes = s.trainer.keeps_expert_routes
    engine_bytes = s.generator.replicas * sum(cpu_memory(model, s.generator, s.trainer.lora).values())
    bound = s.rollout.bound(episode_limit)
    numbers = {"trainer rank": s.trainer.ranks, "generator": s.generator.replicas, "rollout worker": s.rollout.workers}
    parts = [f"{count} {name}{'s' * (count > 1)}" for name, count in numbers.items()]
    say(f"starting {', '.join([*parts, *(f'frozen model {plan.model.name}' for plan in frozen)])} and the buffer")
    start = Start()
    async with start.reporting():
        spawning = start_buffer(
            cluster,
            s.groups_per_step,
            s.buffer,
            bound=bound,
            resumed=resumed.buffer(columns_filled(stages.load())) if resumed else None,
        )
        buffer = await start.part("the import of PyTorch", spawning, "PyTorch is imported")
        reusable = await _reusable_workers(survivors, (task, stages)) if survivors else None
        engines: asyncio.Future[Engines] = asyncio.get_running_loop().create_future()

        async def start_engines() -> tuple[Trainer, ActorPool[Generator], Sequence[FrozenPool]]:
            starting_frozen = start_all_frozen(
                cluster,
                frozen,
                s.first_frozen_device,
                generator_bytes=0 if survivors else engine_bytes,  # surviving generators have their memory already
                survivors=survivors.frozen if survivors else (),
            )
            if frozen:
                names = ", ".join(plan.model.name for plan in frozen)
                starting_frozen = start.part(
                    "the frozen models' engines", starting_frozen, f"frozen models up: {names}"
                )
            trainer, generators, pools, _ = await asyncio.gather(
                start.part(
                    "the trainer to load the model",
                    start_trainer(cluster, plan, buffer, first_device=0),
                    f"trainer ranks up: {s.trainer.ranks}",
                ),
                start.part(
                    "the generators' engines",
                    start_generators(
                        cluster,
                        model,
                        s.generator,
                        s.first_replica_device,
                        s.trainer.lora,
                        routes,
                        survivors.generators if survivors else None,
                        s.colocate,
                    ),
                    f"generators up: {s.generator.replicas}",
                ),
                starting_frozen,
                set_up_buffer(cluster, buffer),
            )
            if resumed is not None:
                steps, nbytes = resumed.manifest.optimizer_steps, resumed.manifest.nbytes
                restoring = restore_trainer(trainer, resumed.checkpoint, resumed.version, steps, nbytes)
                await start.part("the checkpoint to be read", restoring, f"checkpoint read: step {resumed.version}")
            await connect_frozen_models([(pool.model, pool.dispatcher()) for pool in pools])
            engines.set_result((generators, pools))
            return trainer, generators, pools

        starting_engines = asyncio.ensure_future(start_engines())
        starting_workers = asyncio.ensure_future(
            start.part(
                "the rollout workers",
                start_rollout(
                    cluster,
                    s.rollout,
                    task,
                    model.folder,
                    buffer,
                    engines,
                    episode_limit,
                    routes,
                    stages,
                    asks_frozen=bool(frozen),
                    survivors=reusable,
                    logged=None if folder is None else logged_groups(s),
                ),
                f"rollout workers up: {s.rollout.workers}",
            )
        )
        try:
            (trainer, generators, pools), (workers, end_tokens) = await asyncio.gather(
                starting_engines, starting_workers
            )
        finally:  # of what is still starting when another part has failed
            starting_engines.cancel()
            starting_workers.cancel()
    return Actors(
        buffer,
        trainer,
        generators,
        workers,
        model_bytes=model_bytes(model),
        checkpoint_bytes=whole_checkpoint_bytes(model, s.trainer),
        frozen=tuple(pools),
        end_tokens=end_tokens,
        worker_inputs=(task, stages),
    )


def whole_checkpoint_bytes(model: ModelConfig, settings: TrainerSettings) -> int:
    """Size of the checkpoint files of all trainer ranks."""
    trained = trained_model(model, settings.lora)
    return settings.ranks * checkpoint_bytes(trained, settings)


async def _reusable_workers(survivors: Actors, inputs: WorkerInputs) -> ActorPool[RolloutWorker] | None:
    """The surviving workers, if the recipe passes the same task and stages again; otherwise they are stopped."""
    if survivors.worker_inputs == inputs:
        return survivors.workers
    logger.warning("the recipe passed another task or other stages than before: rollout workers are restarted")
    await survivors.workers.stop_all()
    return None
