"""Asynchronous GRPO: train a language model by reinforcement learning while it generates.

    python recipes/grpo.py                                     this machine
    torchrun --nproc-per-node=4 recipes/grpo.py                its GPUs, or 4 CPU ranks
    torchrun --nnodes=2 ... recipes/grpo.py                    the same, on two machines

Trainer ranks and generator replicas hold different devices. Rollout workers play groups of episodes on the
generators and put them into a buffer; the trainer takes a batch, makes one optimiser step, and the new weights
flow to the generators while they decode. No token is trained that is more than buffer.max-policy-lag versions old.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tyro

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.generator.settings import GeneratorSettings, check_served
from monarch_rl.model.folder import read_config, resolve_model
from monarch_rl.observe.console import Console
from monarch_rl.observe.metrics import Metrics
from monarch_rl.pipeline.evaluation import evaluate
from monarch_rl.pipeline.observer import Observer
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.pipeline.recovery import Recovery, RecoverySettings
from monarch_rl.pipeline.start import (
    replica_updates,
    save,
    schedule,
    served_dtype,
    start_buffer,
    start_generators,
    start_rollout,
    start_trainer,
    update,
)
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime.cluster import Cluster, devices, launch
from monarch_rl.runtime.deadlines import Patience
from monarch_rl.runtime.watch import STALL_S, watched
from monarch_rl.tasks.reasoning_gym import TaskSettings, TaskSource
from monarch_rl.trainer.actor import TrainerPlan
from monarch_rl.trainer.settings import TrainerSettings, check_experts
from monarch_rl.weights.endpoint import TransferSettings

# The tiny model of tools/make_tiny_model.py learns to spell words backward. What these settings give is in
# benchmarks/results/main_job_cpu.txt; a larger model wants a far smaller learning rate (TRL's and verl's is 1e-6).
TASK = TaskSettings(
    name="spell_backward", config='{"min_word_len": 3, "max_word_len": 5}', template="{word} -> ", pass_mark=1.0
)


@dataclass(frozen=True)
class Settings:
    """Asynchronous GRPO (see the top of this file)."""

    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder or Hub name of the model to train (Qwen3, Qwen3-MoE, Llama, DeepSeek-V3)."""
    steps: int = 250
    """Optimiser steps."""
    groups_per_step: int = 32
    """Prompts of one optimiser step; each is played rollout.group-size times."""
    held_out: int = 200
    """Held-out items played before and after training."""
    output: Path = Path("runs")
    """Folder in which the run's own folder is made."""
    update_deadline_s: float = 600.0
    """Seconds that a step may take, its batch and its update, before the run fails. After the first one it is 10 times
    the longest recent one, if that is less, but at least as long as a generator may take to start + 60."""
    stall_s: float = STALL_S
    """Seconds after which a process that cannot go on ends the run, with a report; a stall without one takes twice."""
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    buffer: BufferSettings = field(default_factory=BufferSettings)
    task: TaskSettings = field(default_factory=lambda: TASK)
    trainer: TrainerSettings = field(default_factory=lambda: TrainerSettings(lr=3e-4, lr_warmup_steps=5))
    generator: GeneratorSettings = field(default_factory=GeneratorSettings)
    rollout: RolloutSettings = field(default_factory=lambda: RolloutSettings(max_new_tokens=8, concurrent_groups=64))
    weights: TransferSettings = field(default_factory=TransferSettings)


def check(s: Settings) -> Path:
    """Refuse what cannot work, before anything is spawned; returns the model's folder."""
    if s.groups_per_step < 1 or s.steps < 1 or s.held_out < 1 or min(s.update_deadline_s, s.stall_s) <= 0:
        raise ValueError(
            "groups-per-step, steps and held-out must be at least 1, update-deadline-s and stall-s above 0"
        )
    if s.held_out > s.task.held_out_size:
        raise ValueError(f"held-out {s.held_out} is more than task.held-out-size {s.task.held_out_size}: raise that")
    if s.rollout.group_size < 2:
        raise ValueError("rollout.group-size must be at least 2: advantages compare the episodes of a group")
    if s.rollout.temperature == 0:
        raise ValueError("rollout.temperature must be above 0: greedy episodes of a group are all the same")
    s.buffer.window_for(s.groups_per_step)
    episodes = s.groups_per_step * s.rollout.group_size
    if episodes % s.trainer.ranks:
        raise ValueError(
            f"{s.groups_per_step} groups x {s.rollout.group_size} episodes = {episodes} episodes a step cannot be "
            f"shared equally by {s.trainer.ranks} trainer ranks: change groups-per-step or trainer.ranks"
        )
    offered, ranks = devices(), s.trainer.ranks + s.generator.replicas * s.generator.tp
    replicas = f"{s.generator.replicas} generator replicas" + (f" of {s.generator.tp}" if s.generator.tp > 1 else "")
    offered.check(ranks, f"{s.trainer.ranks} trainer ranks + {replicas}")
    if s.trainer.ranks > offered.per_host and s.trainer.ranks % offered.per_host:
        raise ValueError(f"trainer.ranks {s.trainer.ranks} must fill whole hosts: a multiple of {offered.per_host}")
    if s.rollout.min_p and s.generator.deterministic:
        raise ValueError("rollout.min-p cannot be used with generator.deterministic, which seeds every draw")
    TaskSource(s.task).check()
    model = resolve_model(s.model)
    check_served(read_config(model), s.generator, offered.kind == "cuda")
    check_experts(read_config(model), s.trainer)
    check_lengths(s, read_config(model))
    check_output(s.output)
    return model


def check_lengths(s: Settings, config: dict[str, Any]) -> None:
    """Refuse episodes that cannot be drawn or trained whatever the prompt is."""
    drawn = s.rollout.max_turns * s.rollout.max_new_tokens
    asked = f"rollout.max-turns {s.rollout.max_turns} x rollout.max-new-tokens {s.rollout.max_new_tokens}"
    for name, tokens in episode_limits(s, config).items():
        if drawn >= tokens:
            raise ValueError(f"{asked} leaves no room for a prompt within {name}, which is {tokens}")
    if s.generator.context_length > config["max_position_embeddings"]:
        raise ValueError(
            f"generator.context-length {s.generator.context_length} is more than the model's own limit of "
            f"{config['max_position_embeddings']} tokens"
        )


def episode_limits(s: Settings, config: dict[str, Any]) -> dict[str, int]:
    """Tokens that an episode may have, by the setting that limits them."""
    context = s.generator.context_length or config["max_position_embeddings"]
    return {"trainer.tokens-per-microbatch": s.trainer.tokens_per_microbatch, "generator.context-length": context}


def check_output(folder: Path) -> None:
    """Refuse an output folder in which no run folder can be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output {folder} cannot be made ({error.strerror}): choose another folder") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"output {folder} is not writable: choose another folder")


async def train(cluster: Cluster, s: Settings, model: Path, folder: Path) -> None:
    """The run: start the four kinds of actor, then take, update, publish, repeat."""
    drawn = s.rollout.max_turns * s.rollout.max_new_tokens
    plan = TrainerPlan(model, s.trainer, s.steps, s.rollout.temperature, drawn)
    expert_routes = s.trainer.router_replay != "off"  # generators tell them, and they travel with the tokens
    buffer = await start_buffer(cluster, s.groups_per_step, s.buffer)
    trainer, generators = await asyncio.gather(
        start_trainer(cluster, plan, buffer, first_device=0),
        start_generators(cluster, model, s.generator, s.trainer.ranks, s.trainer.lora, expert_routes),
    )
    limit = min(episode_limits(s, read_config(model)).values())
    limit -= 1 if expert_routes else 0  # those of a lost generator's episode may take one token more
    workers = await start_rollout(cluster, s.rollout, s.task, model, buffer, generators, limit, expert_routes)
    dtype = served_dtype(s.generator, cluster)
    tell_workers = replica_updates(workers)
    publisher = await Publisher.connect(trainer, generators.handles, buffer, s.weights, dtype, tell_workers)
    await publisher.publish(0)  # nothing is drawn before the weights are known to be the trainer's
    await publisher.settled()

    observer = Observer(publisher, workers, buffer, folder / "rollouts.jsonl")
    recovery = Recovery(generators, workers, publisher, buffer, s.recovery, folder)
    with Metrics(folder) as metrics, Console(s.steps) as console:
        async with watched(cluster, folder, s.stall_s, recovery.recover) as watch, recovery.tended():
            before = await evaluate(workers, s.held_out)
            metrics.log(0, before.metrics())
            console.note(f"before: {before}")
            async with recovery.rolling_out():
                await observer.begin()
                patience = Patience(
                    s.update_deadline_s, floor_s=s.generator.start_deadline_s + 60
                )  # one may be replaced
                for version in range(s.steps):
                    updating = update(trainer, buffer, version, patience)
                    trained = await publisher.or_failed(updating)
                    await publisher.publish(version + 1)
                    values = await observer.step(trained) | watch.loop_lag() | recovery.metrics()
                    metrics.log(version + 1, values)
                    console.show(version + 1, values)
                await publisher.settled()
            await save(trainer, folder / "model")
            after = await evaluate(workers, s.held_out)
        metrics.log(s.steps, after.metrics())
        console.note(f"after:  {after}")
        console.note(f"metrics, rollouts and the model are in {folder}")


def main(s: Settings) -> None:
    try:
        model = check(s)
    except ValueError as error:
        sys.exit(f"error: {error}")
    with launch() as cluster:
        if cluster is None:  # a torchrun rank other than 0: its part was to host
            return
        folder = s.output / f"grpo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps(asdict(s), indent=2, default=str))
        print(schedule(s.groups_per_step, s.rollout.group_size, s.buffer), f"Run folder: {folder}")
        asyncio.run(train(cluster, s, model, folder.resolve()))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
