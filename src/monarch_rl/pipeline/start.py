"""The actors of a run: the meshes of its four kinds, how each is started, and what a run asks of them.

    buffer <-- groups -- rollout workers -- prompts --> generators
      |                                                     ^
      +-- batch --> trainer ranks -- new weights -----------+

Rollout data does not pass through here: workers put groups into the buffer, trainer ranks take batches from it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import ProcMesh

from monarch_rl.buffer.actor import Buffer, SavedBuffer
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.checkpoint.journal import FOLDER as JOURNAL
from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound
from monarch_rl.generator.actor import Generator
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.gpu import ON_SHARED_DEVICES
from monarch_rl.generator.memory import free_memory
from monarch_rl.generator.replica_memory import check_memory, cpu_memory
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.generator.settings import GeneratorSettings, resolve_dtype
from monarch_rl.model.folder import read_config
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.model.sizes import trained_model
from monarch_rl.model.tensors import model_bytes
from monarch_rl.pipeline.actor_pool import ActorFactory, ActorPool
from monarch_rl.pipeline.frozen import FrozenPlan, FrozenPool, start_all_frozen
from monarch_rl.pipeline.publishing import UpdateDispatch, answers
from monarch_rl.pipeline.resume import Resumed
from monarch_rl.pipeline.settings import RunSettings, episode_limits, loss_tokens
from monarch_rl.rollout.frozen import connect
from monarch_rl.rollout.scoring import PRELOAD as SCORING_PRELOAD
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.stages import Stage
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.cluster import Cluster, init_torch_distributed_env
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, Patience, disk_limit_s, now, within
from monarch_rl.runtime.forking.fork_server import Preload
from monarch_rl.tasks.task import Task
from monarch_rl.trainer.actor import Trainer
from monarch_rl.trainer.functions import TrainingFunctions
from monarch_rl.trainer.memory import checkpoint_bytes
from monarch_rl.trainer.plan import TrainerPlan
from monarch_rl.trainer.settings import TrainerSettings

PRELOADS = (
    Preload("torch", ("torch", "torch.distributed.tensor")),
    Preload(
        "trainer",
        ("monarch_rl.trainer.policy", "monarch_rl.weights.transport"),
        after="torch",
        asks_for_accelerators=True,
    ),
    Preload(
        "text",
        ("transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers"),
        after="torch",
    ),
    Preload(SCORING_PRELOAD, ("reasoning_gym.factory", "monarch_rl.rollout.scoring"), after="text"),
    Preload(
        ENGINE_PRELOAD,
        ("monarch_rl.generator.engine", "monarch_rl.generator.launching", "monarch_rl.generator.sglang_imports"),
        after="text",
        asks_for_accelerators=True,
    ),
)
"""What the hosts of a run import once, before processes are forked. Trainer ranks must not import SGLang: it changes
transformers."""
REPEAT_S = 30.0
"""Seconds after which workers are told again about replicas of which nothing has changed."""
SET_UP_DEADLINE_S = 600.0
"""Seconds to set up workers or the buffer."""
UPDATE_GRACE_S = 15.0
"""Seconds after a rank's own deadline for its batch, in which its error can arrive."""


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
        version: optimiser steps done, and served, at the start.
        bound: what each group may hold.
        resumed: what it goes on from instead of a version.
    """
    await cluster.fork_server.imported("torch")
    buffer: Buffer = cluster.spawn("buffer", 1, preload="torch").spawn(
        "buffer", Buffer, groups_per_step, settings, version, 0, resumed, bound
    )
    return buffer


async def set_up_buffer(cluster: Cluster, buffer: Buffer) -> None:
    """Wait until the buffer is there."""
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
    limit_s = disk_limit_s(model_bytes(plan.model)) + plan.settings.compile_limit_s
    await within(limit_s, trainer.setup.call(), what, on="trainer ranks")
    await cluster.locate(mesh)
    return trainer


async def restore_trainer(trainer: Trainer, folder: Path, version: int, optimizer_steps: int, nbytes: int) -> None:
    """Have all trainer ranks go on from a checkpoint of so many bytes."""
    what = f"trainer ranks to read {folder}"
    restoring = trainer.restore.call(str(folder), version, optimizer_steps)
    await within(disk_limit_s(nbytes), restoring, what, on="the disk")


async def start_generators(
    cluster: Cluster,
    model: Path,
    settings: GeneratorSettings,
    first_device: int,
    lora: LoraSettings = FULL_TRAINING,
    expert_routes: bool = False,
    kept: ActorPool[Generator] | None = None,
    shared: bool = False,
) -> ActorPool[Generator]:
    """Spawn the generator replicas, one process mesh each, with their engines running.

    Args:
        first_device: of replica 0; those of the others follow.
        lora: the trainer's; with adapters, a version is the adapter, or the weights that it is merged into.
        expert_routes: requests may ask which experts read each token.
        kept: replicas of the same settings; those that answer stay, and one is enough to go on with.
        shared: trainer ranks have the same devices.

    Raises RuntimeError if the one host of a run without GPUs has too little memory free for all of them.
    """
    if kept is None and cluster.devices.kind == "cpu" and cluster.num_hosts == 1:
        check_memory(read_config(model), settings, lora, free_memory(), engines=settings.replicas)

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
        start, name = generator.setup.call_one(str(model), settings, index, lora, expert_routes), f"generator {index}"
        limit_s = settings.start_limit_s(cluster.devices.kind == "cuda") + CALL_DEADLINE_S
        await within(limit_s, start, f"{name} to start", on=name)

    async def join(index: int, generator: Generator) -> None:
        await answers(f"generator {index}", generator)

    await cluster.fork_server.imported(ENGINE_PRELOAD)
    generators = kept or ActorPool("generator", "generator", factory=ActorFactory(cluster, spawn, set_up))
    await generators.start_all(settings.replicas, join=join if kept else None)
    return generators


async def start_rollout(
    cluster: Cluster,
    settings: RolloutSettings,
    task: ByValue[Task],
    model: Path,
    buffer: Buffer,
    generators: ActorPool[Generator],
    episode_limit: int,
    expert_routes: bool = False,
    stages: ByValue[Sequence[Stage]] | None = None,
    frozen: Sequence[FrozenPool] = (),
    kept: ActorPool[RolloutWorker] | None = None,
) -> ActorPool[RolloutWorker]:
    """Spawn the rollout workers on the first host: a process mesh each, and a dispatcher of its own over all replicas.

    Args:
        episode_limit: tokens that an episode may have; one that would be longer ends there.
        expert_routes: episodes keep which experts of the generators read each token.
        stages: what workers do with a group that was played, before they put it.
        frozen: the engines of the models that episodes may ask.
        kept: workers of the same settings, task and stages; those that can stay, and from now on play for ``buffer``.
    """

    def spawn(index: int) -> tuple[ProcMesh, RolloutWorker]:
        mesh = cluster.spawn(f"rollout{index}", 1, preload=SCORING_PRELOAD)
        name = f"rollout worker {index}"
        return mesh, mesh.spawn("rollout", RolloutWorker, settings, task, str(model), name, expert_routes, stages)

    async def set_up(index: int, worker: RolloutWorker) -> None:
        replicas = [generators.latest[replica] for replica in sorted(generators.latest)]
        models = [(pool.model, pool.dispatcher()) for pool in frozen]
        dispatcher = Dispatcher(replicas, settings.generate_limit_s)
        set_up = worker.setup.call_one(buffer, dispatcher, episode_limit, models)
        name = f"rollout worker {index}"
        await within(SET_UP_DEADLINE_S, set_up, f"{name} to set up", on=name)

    await cluster.fork_server.imported(SCORING_PRELOAD)
    workers = kept or ActorPool("rollout worker", "rollout")
    workers.factory = ActorFactory(cluster, spawn, set_up)
    await workers.start_all(settings.workers, join=set_up if kept else None)
    return workers


def replica_updates(workers: ActorPool[RolloutWorker], frozen: Sequence[FrozenPool] = ()) -> UpdateDispatch:
    """A function that tells all rollout workers which replicas take no new requests, and which are lost.

    It is called for every version. Workers that have been told the same are called again only after ``REPEAT_S``: one
    may have taken a replica for lost because of an error of its own, and would never ask it again. Then they also hear
    again which engines of ``frozen`` models are lost, of which they are told when something changes.
    """
    told: dict[int, tuple[RolloutWorker, list[int], list[int]]] = {}
    all_told_at = -math.inf

    async def tell(paused: list[int], lost: list[int]) -> None:
        nonlocal all_told_at
        if now() > all_told_at + REPEAT_S:
            told.clear()
            all_told_at = now()
            for pool in frozen:
                await pool.note_lost_engine(workers)
        news = {i: worker for i, worker in workers.handles.items() if told.get(i) != (worker, paused, lost)}
        what = "to take note of the replicas"
        answers = await workers.ask(
            CALL_DEADLINE_S, what, lambda _, worker: worker.update_replicas.call_one(paused, lost), news
        )
        told.update({i: (news[i], list(paused), list(lost)) for i in answers})

    return tell


def served_dtype(settings: GeneratorSettings, cluster: Cluster) -> str:
    """The dtype that generators serve and versions are sent in."""
    return resolve_dtype(settings.dtype, cluster.devices.kind == "cuda")


def schedule(groups_per_step: int, group_size: int, buffer: BufferSettings) -> str:
    """The schedule that follows from the settings, in sentences for the start of a run."""
    slots, window = buffer.slots_for(groups_per_step), buffer.window_for(groups_per_step)
    order = "any number of groups may" if window is None else f"at most {window} groups may"
    batch = f"{groups_per_step} prompts x {group_size} episodes = {groups_per_step * group_size} episodes a step; "
    if slots is None:
        return (
            f"{batch}stream: nothing bounds the lag. Tokens may be trained however old they are, above all where "
            f"generators are faster than the trainer; {order} overtake another."
        )
    late = {
        "wait": "the trainer waits for it then",
        "drop": "a group above the bound is dropped",
        "mask": "tokens above the bound are not trained",
    }[buffer.late]
    again = f", each in up to {buffer.replay} batches" if buffer.replay > 1 else ""
    return f"{batch}lag <= {buffer.max_policy_lag}; buffer of {slots} groups{again}; {order} overtake another: {late}."


async def update(trainer: Trainer, buffer: Buffer, version: int, patience: Patience) -> list[dict[str, float]]:
    """Make one optimiser step from ``version`` on every trainer rank, once its batch is there; metrics by rank.

    Args:
        patience: how long batch and update may take together, judged by the steps before.
    """
    with patience.step() as limit_s:
        # The rank's own deadline comes first: the buffer can say what its batch lacks.
        call = trainer.update.call(version, limit_s)
        what = f"trainer ranks to make step {version + 1}"
        answers = await within(limit_s + UPDATE_GRACE_S, call, what, on="trainer ranks", flag="update-deadline-s")
    await within(CALL_DEADLINE_S, buffer.trained.call_one(version + 1), "the buffer to note the step", on="buffer")
    wait_registry.progress("step trained")
    return list(answers.values())


async def save(trainer: Trainer, folder: Path, nbytes: int = 0) -> None:
    """Write the model as a Hugging Face folder, by all trainer ranks together; ``nbytes`` lengthen the deadline."""
    what = f"trainer ranks to save to {folder}"
    # The disk is not a process of the run: waiting for a slow one is no stall.
    limit_s = disk_limit_s(nbytes) + CALL_DEADLINE_S
    await within(limit_s, trainer.save.call(str(folder)), what, on="the disk")


# -- the actors of a run, and starting all of them --------------------------------------------------------------------

logger = logging.getLogger("monarch_rl")

Handed = tuple[ByValue[Task], ByValue[Sequence[Stage]]]
"""What workers play, and the stages of its groups."""


@dataclass(frozen=True)
class Actors:
    """Handles of all actors of a run. Generators and rollout workers can be replaced one by one."""

    buffer: Buffer
    trainer: Trainer
    generators: ActorPool[Generator]
    workers: ActorPool[RolloutWorker]
    model_bytes: int = 0
    """Of the weights that are trained, in their folder; 0 where there are none."""
    checkpoint_bytes: int = 0
    """Of the trainer's part of a checkpoint."""
    frozen: tuple[FrozenPool, ...] = ()
    """The engines of each frozen model."""
    handed: Handed | None = None
    """What the workers were started with; None where nothing can be started again."""


async def start_actors(
    cluster: Cluster,
    s: RunSettings,
    task: ByValue[Task],
    model: Path,
    functions: TrainingFunctions,
    stages: ByValue[Sequence[Stage]],
    frozen: Sequence[FrozenPlan] = (),
    resumed: Resumed | None = None,
    folder: Path | None = None,
    kept: Actors | None = None,
) -> Actors:
    """Spawn and set up every actor. Trainer ranks take the first devices, replicas the next ones, or the same.

    Args:
        task: what is played.
        model: the Hugging Face folder.
        functions: what it is trained with.
        stages: what workers do with a group that was played, before they put it.
        frozen: models that never change; their engines take the devices after those of the replicas.
        resumed: what buffer and trainer go on from; None starts with the model and nothing played.
        folder: of the run, seen by all hosts.
        kept: of this run, whose trainer and buffer have been killed; the other actors stay, if they can.
    """
    limits = episode_limits(s, read_config(model), cluster.devices.kind == "cuda")
    journal = folder / JOURNAL if folder is not None and s.journal.mib else None
    updates = s.steps * s.trainer.updates_per_batch
    plan = TrainerPlan(
        *(model, s.trainer, updates, s.rollout.temperature, loss_tokens(s, limits), functions),
        *(journal, s.journal.mib << 20, resumed.generation if resumed else 0),
    )
    routes = s.trainer.keeps_expert_routes
    beside = s.generator.replicas * sum(cpu_memory(read_config(model), s.generator, s.trainer.lora).values())
    bound = s.rollout.bound(min(limits.values()))
    buffer = await start_buffer(
        cluster, s.groups_per_step, s.buffer, bound=bound, resumed=resumed.buffer if resumed else None
    )
    trainer, generators, pools, _ = await asyncio.gather(
        start_trainer(cluster, plan, buffer, first_device=0),
        start_generators(
            *(cluster, model, s.generator, s.first_replica_device, s.trainer.lora, routes),
            *(kept.generators if kept else None, s.colocate),
        ),
        start_all_frozen(cluster, frozen, s.first_frozen_device, 0 if kept else beside, kept.frozen if kept else ()),
        set_up_buffer(cluster, buffer),
    )
    if resumed is not None:
        steps, nbytes = resumed.manifest.optimizer_steps, resumed.manifest.nbytes
        await restore_trainer(trainer, resumed.checkpoint, resumed.version, steps, nbytes)
    await connect([(pool.model, pool.dispatcher()) for pool in pools])
    workers = await start_rollout(
        *(cluster, s.rollout, task, model, buffer, generators, min(limits.values()), routes, stages, pools),
        kept=await _workers_to_keep(kept, (task, stages)) if kept else None,
    )
    return Actors(buffer, trainer, generators, workers, *_sizes(model, s), tuple(pools), (task, stages))


def _sizes(model: Path, s: RunSettings) -> tuple[int, int]:
    return model_bytes(model), whole_checkpoint_bytes(model, s.trainer)


def whole_checkpoint_bytes(model: Path, settings: TrainerSettings) -> int:
    """Of what all trainer ranks write."""
    trained = trained_model(read_config(model), settings.lora)
    return settings.ranks * checkpoint_bytes(trained, settings)


async def _workers_to_keep(kept: Actors, handed: Handed) -> ActorPool[RolloutWorker] | None:
    """Those that are there, if they play what the recipe hands over now; else they are ended."""
    if kept.handed == handed:
        return kept.workers
    logger.warning("the recipe hands over another task, or other stages, than before: rollout workers start anew")
    await kept.workers.stop_all()
    return None
