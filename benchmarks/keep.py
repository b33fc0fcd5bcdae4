"""Cost of expert routes and sampling masks: tokens per second, step time and bytes per token.

    python tools/make_tiny_model.py --kind moe && python benchmarks/keep.py

Two engines alternately generate answers to the same prompts in four modes: neither, sampling masks, routes, and both.
The last two use an engine that records routes for every token, requested or not. Two trainers of one rank make steps on
the answers, one with its own router and one with the engine's routes. A ratio is relative to "neither", median over
rounds. The last line is JSON.
"""

from __future__ import annotations

import monarch_rl  # isort: skip  # noqa: F401  its settings for Monarch count only if it is imported first

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from reporting import run_benchmark, short
from speed_generator import ObservedGenerator
from speed_trainer import Training

from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.sampling import Sampling
from monarch_rl.episode.serialization import serialize_group
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.config import ModelConfig, read_config
from monarch_rl.model.folder import resolve_model
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.runtime.cluster import Cluster, launch_cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.trainer.plan import TrainerPlan
from monarch_rl.trainer.settings import TrainerSettings

NEITHER, ROUTES, KEPT, BOTH = "neither", "routes", "kept_sets", "both"
ROUND_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Settings:
    """Cost of expert routes and sampling masks (see the top of this file)."""

    model: str = ".cache/tiny-qwen3-moe"
    """Hugging Face folder or Hub name of a mixture of experts."""
    rounds: int = 8
    """Measured rounds, after one that warms up."""
    groups: int = 8
    group_size: int = 8
    prompt_tokens: int = 16
    new_tokens: int = 64
    top_k: int = 20
    top_p: float = 0.95


def modes(s: Settings) -> dict[str, Sampling]:
    plain = Sampling(max_new_tokens=s.new_tokens)
    truncated = replace(plain, top_k=s.top_k, top_p=s.top_p)
    expert_routes, both = replace(plain, expert_routes_from=0), replace(truncated, expert_routes_from=0)
    return {NEITHER: plain, ROUTES: expert_routes, KEPT: truncated, BOTH: both}


async def generate(
    dispatcher: Dispatcher, prompts: list[list[int]], s: Settings, sampling: Sampling
) -> tuple[float, list[Group]]:
    """Generate all groups concurrently; returns tokens per second, and the groups."""
    started = time.perf_counter()
    requests = [
        dispatcher.generate(ids, sampling, group) for group, ids in enumerate(prompts) for _ in range(s.group_size)
    ]
    completions = await within(ROUND_DEADLINE_S, asyncio.gather(*requests), "a round of completions", on="generator 0")
    rate = sum(len(completion.token_ids) for completion in completions) / (time.perf_counter() - started)
    groups = []
    for index, ids in enumerate(prompts):
        own = completions[index * s.group_size : (index + 1) * s.group_size]
        episodes = [
            Episode(
                [Turn.from_completion(ids, one)], float(place % 2), one.finish_reason, expert_routes=one.expert_routes
            )
            for place, one in enumerate(own)
        ]
        groups.append(Group(index, index, episodes))
    return rate, groups


async def start_engine(cluster: Cluster, model: Path, slot: int, expert_routes: bool) -> Dispatcher:
    settings, name = GeneratorSettings(replicas=1), f"generator{slot}"
    generator = cluster.spawn(name, 1, first_device=slot).spawn(name, ObservedGenerator)
    start = generator.setup.call_one(str(model), settings, slot, expert_routes=expert_routes)
    await within(settings.start_limit_s(cluster.devices.kind == "cuda"), start, f"{name} to start", on=name)
    return Dispatcher([generator], ROUND_DEADLINE_S, max_losses=0)


async def measure(cluster: Cluster, s: Settings, model: Path) -> dict[str, Any]:
    dispatchers = {
        expert_routes: await start_engine(cluster, model, 2 + expert_routes, expert_routes)
        for expert_routes in (False, True)
    }
    config, sampler = read_config(model), np.random.default_rng(0)
    rates: dict[str, list[float]] = {mode: [] for mode in modes(s)}
    steps: dict[str, list[float]] = {mode: [] for mode in modes(s)}
    groups_by_mode: dict[str, list[Group]] = {}
    for turn in range(s.rounds + 1):
        prompts = [sampler.integers(2, config.vocab_size, s.prompt_tokens).tolist() for _ in range(s.groups)]
        for mode, sampling in modes(s).items() if turn % 2 else reversed(modes(s).items()):
            rate, groups_by_mode[mode] = await generate(
                dispatchers[sampling.expert_routes_from is not None], prompts, s, sampling
            )
            rates[mode] += [rate] if turn else []
    trainers = {}
    for slot, router_replay in enumerate(("off", "replay")):
        settings = TrainerSettings(1, router_replay=router_replay)  # type: ignore[arg-type]  # one of its names
        plan = TrainerPlan(model, settings, 1000, 1.0, s.new_tokens)
        trainers[router_replay] = await Training.start(cluster, plan, groups_by_mode[BOTH], 1000, first_device=slot)
    for turn in range(s.rounds + 1):
        for mode in modes(s) if turn % 2 else reversed(modes(s)):
            training = trainers["replay" if mode in (ROUTES, BOTH) else "off"]
            training.groups = groups_by_mode[mode]
            _, metrics = await training.step(ROUND_DEADLINE_S)
            await training.served()
            steps[mode] += [metrics[0]["step_s"]] if turn else []
    return summary(s, config, rates, steps, groups_by_mode)


def summary(
    s: Settings,
    config: ModelConfig,
    rates: dict[str, list[float]],
    steps: dict[str, list[float]],
    groups_by_mode: dict[str, list[Group]],
) -> dict[str, Any]:
    def median(values: list[float], base: list[float]) -> float:
        return statistics.median(one / other for one, other in zip(values, base, strict=True))

    tokens = {mode: sum(e.num_tokens for g in groups for e in g.episodes) for mode, groups in groups_by_mode.items()}
    nbytes = {
        mode: sum(len(serialize_group(group)) for group in groups) / tokens[mode]
        for mode, groups in groups_by_mode.items()
    }
    sampling_masks = [episode.sampling_masks for group in groups_by_mode[KEPT] for episode in group.episodes]
    counts = np.concatenate([one.counts[one.counts > 0] for one in sampling_masks if one is not None])
    return {
        "benchmark": "keep",
        "layers_with_experts": len(config.sparse_layers),
        "experts": config.num_experts,
        "experts_of_a_token": config.num_experts_per_tok,
        "ids_in_a_kept_set": float(counts.mean()),
        "bytes_a_token": nbytes,
        "engine_rate_ratio": {mode: median(rates[mode], rates[NEITHER]) for mode in rates},
        "step_time_ratio": {mode: median(steps[mode], steps[NEITHER]) for mode in steps},
        "rounds": s.rounds,
    }


def main(s: Settings) -> None:
    config = resolve_model(s.model)
    model = config.folder
    if not config.sparse_layers:
        raise ValueError(f"{model} has no experts, so there are no routes to measure")
    RolloutSettings(top_k=s.top_k, top_p=s.top_p, keep_sampling_mask=True)
    with launch_cluster() as cluster:
        assert cluster is not None, "not under torchrun"
        found = asyncio.run(measure(cluster, s, model))
    for name, value in short(found).items():
        print(f"{name}: {value}")
    print(json.dumps(short(found)))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
