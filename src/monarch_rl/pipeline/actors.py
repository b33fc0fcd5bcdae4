"""The actors of a run, and starting all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch_rl.buffer.actor import Buffer
from monarch_rl.checkpoint.journal import FOLDER as JOURNAL
from monarch_rl.generator.actor import Generator
from monarch_rl.generator.replica_memory import cpu_memory
from monarch_rl.model.folder import read_config
from monarch_rl.model.sizes import trained_model
from monarch_rl.model.tensors import model_bytes
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.frozen import FrozenPlan, FrozenPool, start_all_frozen
from monarch_rl.pipeline.resume import Resumed
from monarch_rl.pipeline.settings import RunSettings, episode_limits, loss_tokens
from monarch_rl.pipeline.start import (
    restore_trainer,
    set_up_buffer,
    start_buffer,
    start_generators,
    start_rollout,
    start_trainer,
)
from monarch_rl.rollout.frozen import connect
from monarch_rl.rollout.stages import Stage
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.tasks.task import Task
from monarch_rl.trainer.actor import Trainer
from monarch_rl.trainer.functions import TrainingFunctions
from monarch_rl.trainer.memory import checkpoint_bytes
from monarch_rl.trainer.plan import TrainerPlan
from monarch_rl.trainer.settings import TrainerSettings

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
