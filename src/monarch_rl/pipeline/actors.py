"""The actors of a run, and starting all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from monarch_rl.algorithms.advantages import Advantage
from monarch_rl.buffer.actor import Buffer
from monarch_rl.generator.actor import Generator
from monarch_rl.model.folder import read_config
from monarch_rl.model.tensors import model_bytes
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.settings import RunSettings, episode_limits
from monarch_rl.pipeline.start import SET_UP_DEADLINE_S, start_buffer, start_generators, start_rollout, start_trainer
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.tasks.task import Task
from monarch_rl.trainer.actor import Trainer, TrainerPlan
from monarch_rl.trainer.objective import Objective


@dataclass(frozen=True)
class Actors:
    """Handles of all actors of a run. Generators and rollout workers can be replaced one by one."""

    buffer: Buffer
    trainer: Trainer
    generators: ActorPool[Generator]
    workers: ActorPool[RolloutWorker]
    model_bytes: int = 0
    """Of the weights that are trained; 0 where there are none."""


async def start_actors(
    cluster: Cluster, s: RunSettings, task: ByValue[Task], model: Path, advantage: Advantage, objective: Objective
) -> Actors:
    """Spawn and set up every actor. Trainer ranks take the first devices, replicas the next ones, or the same.

    Args:
        task: what is played.
        model: the Hugging Face folder.
        advantage: from the rewards of a group to the advantages of its episodes.
        objective: the loss of a micro-batch.
    """
    plan = TrainerPlan(model, s.trainer, s.steps, s.rollout.temperature, s.new_tokens_per_episode, advantage, objective)
    routes = s.trainer.keeps_expert_routes
    buffer = await start_buffer(cluster, s.groups_per_step, s.buffer)
    trainer, generators, _ = await asyncio.gather(
        start_trainer(cluster, plan, buffer, first_device=0),
        start_generators(cluster, model, s.generator, s.first_replica_device, s.trainer.lora, routes),
        within(SET_UP_DEADLINE_S, buffer.setup.call_one(), "the buffer to come up", on="buffer"),
    )
    limit = min(episode_limits(s, read_config(model), cluster.devices.kind == "cuda").values())
    workers = await start_rollout(cluster, s.rollout, task, model, buffer, generators, limit, routes)
    return Actors(buffer, trainer, generators, workers, model_bytes(model))
