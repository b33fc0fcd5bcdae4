"""Expert routes and sampling masks from the engine to the trainer's update (Keep Routing, Keep Sampling Mask)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from monarch_rl.episode.episode import Group
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.episode.serialization import serialize_group
from monarch_rl.generator.actor import Generator
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.scheduler_process import ENGINE_PRELOAD
from monarch_rl.model.lora import LoraSettings
from monarch_rl.runtime.cluster import Cluster, init_torch_distributed_env
from monarch_rl.runtime.endpoint import concurrent_endpoint
from monarch_rl.trainer.actor import Trainer
from monarch_rl.trainer.plan import TrainerPlan
from monarch_rl.trainer.settings import RouterReplay, TrainerSettings
from tests.generator.helpers import LOGPROB_BOUND, make_model
from tests.pipeline.system import ALL_TOKENS, ENGINES, InspectedGenerator, System, episode, start_inspected

ROUTES = replace(ALL_TOKENS, expert_routes_from=0)
TEMPERATURE = 0.7
TRUNCATED_BOUND = LOGPROB_BOUND / TEMPERATURE
"""Bound for log-probs within sampling masks: logits, with their rounding errors, are divided by the temperature."""
TRUNCATED = {
    "top_k": Sampling(24, TEMPERATURE, top_k=7, expert_routes_from=0),
    "top_p": Sampling(24, TEMPERATURE, top_k=400, top_p=0.7, expert_routes_from=0),
    "min_p": Sampling(24, TEMPERATURE, top_k=400, min_p=0.1, expert_routes_from=0),
    "all": Sampling(24, TEMPERATURE, top_k=300, top_p=0.9, min_p=0.1, expert_routes_from=0),
}
LORA = LoraSettings(rank=3, alpha=6.0)


@pytest.fixture(scope="module", params=["moe", "deepseek"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("keep") / request.param, request.param)


@pytest.fixture(scope="module")
def generator(cluster: Cluster, model: Path) -> Iterator[InspectedGenerator]:
    device = {"moe": 4, "deepseek": 5}[model.name]
    (generator,) = asyncio.run(start_inspected(cluster, model, 1, device, model.name, expert_routes=True))
    yield generator

    async def end() -> None:
        await generator.shutdown.call_one()

    asyncio.run(end())


def test_engine_and_trainer_agree_with_route_replay_and_sampling_masks(
    cluster: Cluster, model: Path, generator: InspectedGenerator
) -> None:
    """With every kind of truncation, before and after updates; the trainer's router would choose the same experts."""

    async def go() -> None:
        system = await System.start(
            cluster, model, [generator], 3e-3, expert_parallel=2, router_replay="replay", temperature=TEMPERATURE
        )
        for seed, sampling in enumerate(TRUNCATED.values()):
            assert await system.mismatch(seed, sampling) < TRUNCATED_BOUND
            metrics = await system.step(seed, sampling)
            assert metrics["on_policy_share"] == 1.0
            assert metrics["logprob_difference_max"] < 1.5 * TRUNCATED_BOUND, "the upper edge of a bin"
            assert metrics["kept_mass"] < 0.98
            assert metrics["routes_differ"] < 0.01, "weights and precision are the same"
        await system.trainer.close.call()

    asyncio.run(go())


def test_log_probs_of_other_routes_differ(cluster: Cluster, model: Path, generator: InspectedGenerator) -> None:
    """The trainer uses the engine's routes: a wrong order shows in log-probs and in the metric."""

    async def go() -> None:
        version = (await generator.stats.call_one())["version"] + 1
        system = await System.start(
            cluster, model, [generator], 3e-3, version=version, expert_parallel=2, router_replay="replay"
        )
        assert await system.mismatch(1, ROUTES) < LOGPROB_BOUND
        generate = system.generate

        async def generate_reversed(prompts: list[list[int]], sampling: Sampling = ROUTES) -> list[Completion]:
            completions = await generate(prompts, sampling)
            return [
                replace(completion, expert_routes=completion.expert_routes[::-1].copy())
                for completion in completions
                if completion.expert_routes is not None
            ]

        system.generate = generate_reversed  # type: ignore[method-assign]
        assert await system.mismatch(1, ROUTES) > 100 * LOGPROB_BOUND
        metrics = await system.step(2, ROUTES)
        assert metrics["routes_differ"] > 0.05
        await system.trainer.close.call()

    asyncio.run(go())


def test_sampling_masks_work_with_adapters(cluster: Cluster, tmp_path: Path) -> None:
    """A dense model whose adapter is trained and served."""
    model = make_model(tmp_path / "model", "qwen3")

    async def go() -> None:
        (generator,) = await start_inspected(cluster, model, 1, 6, "adapted", lora=LORA)
        system = await System.start(cluster, model, [generator], 3e-3, lora=LORA, temperature=TEMPERATURE)
        for seed, truncated in enumerate((TRUNCATED["top_p"], TRUNCATED["all"])):
            sampling = replace(truncated, expert_routes_from=None)
            assert await system.mismatch(seed, sampling) < TRUNCATED_BOUND
            metrics = await system.step(seed, sampling)
            assert metrics["logprob_difference_max"] < 1.5 * TRUNCATED_BOUND, "the upper edge of a bin"
            assert metrics["kept_mass"] < 0.98
        await system.trainer.close.call()
        await generator.shutdown.call_one()

    asyncio.run(go())


class OwnWeights(Generator):
    """A generator that serves the model as it was loaded, without waiting for a version."""

    def __init__(self) -> None:
        super().__init__()
        self._verified.set()


class InspectedTrainer(Trainer):
    """A trainer rank that also returns the experts used for each token."""

    @concurrent_endpoint
    async def experts(self, groups: list[bytes]) -> list[np.ndarray]:
        """Return the experts of each episode, in the form of its routes: int64 [tokens - 1, layers, k]."""
        return await self._on(self._compute, self._experts, groups)

    def _experts(self, groups: list[bytes]) -> list[np.ndarray]:
        import torch

        from monarch_rl.trainer.moe import ReplayRouter

        used: list[np.ndarray] = []
        routers = [module for module in self.policy.module.modules() if isinstance(module, ReplayRouter)]
        hooks = [router.register_forward_hook(lambda _m, _i, out: used.append(out[1][0].numpy())) for router in routers]
        by_episode = []
        for data in groups:
            used.clear()
            with torch.no_grad():
                self._logprobs([data], 0)
            by_episode.append(np.stack(used, 1))
        for hook in hooks:
            hook.remove()
        return by_episode


def test_route_replay_compensates_for_different_precision(cluster: Cluster, tmp_path: Path) -> None:
    """An engine in bfloat16 and a trainer in float32 with the same weights route some tokens to different experts. With
    replay all experts are the engine's, and log-probs differ less."""
    model = make_model(tmp_path / "model", "moe")
    mismatch: dict[str, float] = {}

    async def trained_by(router_replay: RouterReplay, groups: list[bytes]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        mesh = cluster.spawn(f"trainer-{router_replay}", 1, first_device=0, preload="trainer")
        await init_torch_distributed_env(mesh)
        plan = TrainerPlan(model, TrainerSettings(1, router_replay=router_replay), 1, 1.0, 200)
        trainer: InspectedTrainer = mesh.spawn("trainer", InspectedTrainer, plan, None)
        await trainer.setup.call()
        experts, logprobs = await trainer.experts.call_one(groups), await trainer.logprobs.call_one(groups, 0)
        await trainer.close.call()
        return experts, logprobs

    async def go() -> None:
        mesh = cluster.spawn("coarse", 1, first_device=7, preload=ENGINE_PRELOAD)
        generator: OwnWeights = mesh.spawn("coarse", OwnWeights)
        await generator.setup.call_one(str(model), replace(ENGINES, dtype="bfloat16"), 0, expert_routes=True)
        prompts = [[5, 6, 7, i] for i in range(8)]
        sampling = Sampling(200, expert_routes_from=0)
        dispatcher = Dispatcher([generator], 120.0, max_losses=0)
        completions = await asyncio.gather(*(dispatcher.generate(prompt, sampling, 0) for prompt in prompts))
        episodes = [episode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        groups = [serialize_group(Group(0, 0, [rollout])) for rollout in episodes]
        same: dict[str, float] = {}
        for router_replay in ("compare", "replay"):
            experts, logprobs = await trained_by(router_replay, groups)
            tokens = [
                (np.sort(rollout.expert_routes, -1) == np.sort(used, -1)).all((1, 2))
                for rollout, used in zip(episodes, experts, strict=True)
                if rollout.expert_routes is not None
            ]
            assert len(tokens) == len(episodes)
            same[router_replay] = float(np.concatenate(tokens).mean())
            mismatch[router_replay] = max(
                float(np.abs(computed - completion.logprobs).max())
                for computed, completion in zip(logprobs, completions, strict=True)
            )
        assert same["replay"] == 1.0
        assert same["compare"] < 0.999
        assert mismatch["replay"] < 0.7 * mismatch["compare"], mismatch
        await generator.shutdown.call_one()

    asyncio.run(go())
