"""Speed of the parts relative to the libraries that they are built on: ratios measured in one run.

    python benchmarks/speed.py
    python benchmarks/speed.py --parts trainer --model .cache/smollm2-135m-instruct --groups 2 --group-size 4 --rounds 4

Prints a line per part while it runs and, last, everything as one line of JSON; benchmarks/README.md describes the keys.
Both sides alternate within the run, so that other work on the machine slows both; absolute times hold for this machine
and hour only.
"""

from __future__ import annotations

import monarch_rl  # isort: skip  # noqa: F401  its settings for Monarch count only if it is imported first

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import speed_generator
import speed_recipe
import speed_swap
import speed_trainer
from reporting import run_benchmark, short
from speed_trainer import Training

from monarch_rl.generator.scheduler_process import quiet_imports
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.config import read_config
from monarch_rl.model.folder import resolve_model
from monarch_rl.pipeline.start import served_dtype
from monarch_rl.runtime.cluster import Cluster, devices, launch_cluster
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.trainer.settings import TrainerSettings

NOT_MEASURED = [
    "several replicas or hosts",
    "the cost of the trainer's work between steps (snapshot, sending), except in the recipe's idle shares",
    "memory",
    "idle shares do not see a side that is busy but waits for a core",
]

Part = Literal["trainer", "reference", "generator", "swap", "recipe"]


@dataclass(frozen=True)
class Settings:
    """Speed of the parts (see the top of this file)."""

    model: str = ".cache/tiny-qwen3"
    """Hugging Face folder or Hub name."""
    groups: int = 16
    """Groups of the trainer's batch, like `groups_per_step` of the recipe."""
    group_size: int = 8
    """Episodes of a group."""
    prompt_tokens: int = 48
    """Mean length of a prompt."""
    new_tokens: int = 64
    """Tokens generated per request, and the longest answer in the trainer's batch."""
    requests: int = 64
    """Requests in flight at the generator."""
    rounds: int = 12
    """Timed steps of the trainer, and of each reference side; in the parts trainer and reference."""
    generator_rounds: int = 12
    """Timed rounds of requests, on each side."""
    swaps: int = 8
    """Timed swaps."""
    steps: int = 12
    """Optimiser steps of the recipe's run."""
    skip: int = 3
    """First steps of that run, which do not count because the pipeline is still filling."""
    parts: tuple[Part, ...] = ("trainer", "reference", "generator", "swap", "recipe")
    """Parts to measure."""
    recipe_arguments: tuple[str, ...] = ()
    """Further arguments of the recipe."""
    deadline_s: float = 600.0
    """Deadline of an optimiser step in seconds."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    generator: GeneratorSettings = field(default_factory=lambda: GeneratorSettings(replicas=1))

    def __post_init__(self) -> None:
        for name in ("groups", "group_size", "new_tokens", "requests", "rounds", "generator_rounds", "swaps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.prompt_tokens < 2:
            raise ValueError(f"prompt-tokens must be at least 2, got {self.prompt_tokens}")
        if self.steps <= self.skip:
            raise ValueError(f"of {self.steps} steps the first {self.skip} are left out: nothing remains")
        if self.generator.replicas != 1:
            raise ValueError("one replica is measured: leave generator.replicas at 1")


Measure = Callable[[str, Awaitable[dict[str, Any]]], Awaitable[None]]
"""``measure(name, measurements of a part)``."""


async def measure_parts(cluster: Cluster, s: Settings, model: Path) -> dict[str, Any]:
    """Measure trainer, generator and swap, one after the other, while the other parts are idle."""
    vocabulary = read_config(model).vocab_size
    groups = speed_trainer.make_groups(vocabulary, s.groups, s.group_size, s.prompt_tokens, s.new_tokens)
    load = speed_generator.Load(s.requests, s.prompt_tokens, s.new_tokens, vocabulary)
    steps = 1 + s.rounds + speed_swap.WARM_UP + s.swaps
    plan = speed_trainer.plan_of(model, s.trainer, steps, s.new_tokens)
    measured: dict[str, Any] = {}

    async def part(name: str, measuring: Awaitable[dict[str, Any]]) -> None:
        started = time.perf_counter()
        found = await measuring
        measured.update(found)
        show(name, found, time.perf_counter() - started)

    training = await speed_trainer.Training.start(cluster, plan, groups, steps)
    if "trainer" in s.parts:
        await part("trainer", speed_trainer.measure(training, s.rounds, s.deadline_s))
    if "reference" in s.parts:
        with_reference = speed_trainer.measure_with_reference(cluster, plan, groups, s.rounds, s.deadline_s)
        await part("reference", with_reference)
    if {"generator", "swap"} & set(s.parts):
        await measure_generator(cluster, s, model, training, load, part)
    await within(CALL_DEADLINE_S, training.trainer.close.call(), "trainer ranks to leave their process group")
    return measured


async def measure_generator(
    cluster: Cluster, s: Settings, model: Path, training: Training, load: speed_generator.Load, part: Measure
) -> None:
    """Measure the parts with an engine; ``training`` publishes to it."""
    quiet_imports()
    async with AsyncExitStack() as stack:
        bare = []
        if "generator" in s.parts:
            for shipped in (True, False):
                engine = speed_generator.bare_engine(model, s.generator, shipped)
                bare.append(await stack.enter_async_context(engine))
        generator = await speed_generator.start(cluster, model, s.generator, s.trainer.ranks)
        if bare:
            await part("generator", speed_generator.measure(generator, *bare, load, s.generator_rounds))
    if "swap" in s.parts:
        dtype = served_dtype(s.generator, cluster)
        await part("swap", speed_swap.measure(training, generator, load, s.swaps, dtype, s.deadline_s))
    await within(CALL_DEADLINE_S, generator.shutdown.call_one(), "the generator to end its engine")


def show(name: str, found: dict[str, Any], seconds: float) -> None:
    """Print the measurements of a part."""
    print(f"{name} ({seconds:.0f} s):", ", ".join(f"{key} {short(value)}" for key, value in found.items()), flush=True)


def main(s: Settings) -> None:
    model = resolve_model(s.model).folder
    ranks = s.trainer.ranks + 1
    devices().check(ranks, f"{s.trainer.ranks} trainer ranks + 1 generator")
    result: dict[str, Any] = {
        "benchmark": "speed",
        "model": str(s.model),
        "device": devices().kind,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }
    started = time.perf_counter()
    if set(s.parts) - {"recipe"}:
        with launch_cluster() as cluster:
            if cluster is None:
                return
            result |= asyncio.run(measure_parts(cluster, s, model))
    if "recipe" in s.parts:
        then = time.perf_counter()
        found = speed_recipe.measure(model, s.steps, s.skip, list(s.recipe_arguments))
        show("recipe", found, time.perf_counter() - then)
        result |= found
    result |= {"seconds": time.perf_counter() - started, "not_measured": NOT_MEASURED}
    print(json.dumps(short(result)))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
