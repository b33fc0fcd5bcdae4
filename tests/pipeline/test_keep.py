"""Routes and kept sets from the engine to the trainer's update: Keep Routing and Keep Sampling Mask, end to end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.episode import Sampling
from monarch_rl.runtime.cluster import Cluster, launch
from tests.generator.helpers import make_model
from tests.pipeline.system import ALL_TOKENS, System, start_inspected

LOGPROB_BOUND = 1e-5
"""Engine against trainer, float32, among the kept sets."""
ROUTES = replace(ALL_TOKENS, routes_from=0)
CUT = {
    "top_k": Sampling(24, top_k=7, routes_from=0),
    "top_p": Sampling(24, top_k=400, top_p=0.7, routes_from=0),
    "all": Sampling(24, top_k=300, top_p=0.9, min_p=0.1, routes_from=0),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with launch() as cluster:
        assert cluster is not None
        yield cluster


@pytest.fixture(scope="module", params=["moe", "deepseek"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("keep") / request.param, request.param)


@pytest.fixture(scope="module")
def generator(cluster: Cluster, model: Path) -> Iterator[Any]:
    slot = {"moe": 4, "deepseek": 5}[model.name]
    (generator,) = asyncio.run(start_inspected(cluster, model, 1, slot, model.name, routes=True))
    yield generator

    async def end() -> None:
        await generator.shutdown.call_one()

    asyncio.run(end())


def test_with_replay_and_kept_sets_engine_and_trainer_agree_after_updates(
    cluster: Cluster, model: Path, generator: Any
) -> None:
    """Under every kind of truncation, before and after updates; the trainer's own router would choose alike here."""

    async def go() -> None:
        system = await System.start(cluster, model, [generator], 3e-3, expert_parallel=2, routing="replay")
        for seed, sampling in enumerate(CUT.values()):
            assert await system.mismatch(seed, sampling) < LOGPROB_BOUND
            metrics = await system.step(seed, sampling)
            assert metrics["on_policy_share"] == 1.0
            assert metrics["logprob_difference_max"] < LOGPROB_BOUND
            assert metrics["kept_mass"] < 0.98
            assert metrics["routes_differ"] < 0.01, "of the same weights in the same precision"
        await system.trainer.close.call()

    asyncio.run(go())


def test_log_probs_of_other_routes_differ(cluster: Cluster, model: Path, generator: Any) -> None:
    """The trainer takes what the engine tells: routes in the wrong order are seen in log-probs and in the metric."""

    async def go() -> None:
        version = (await generator.stats.call_one())["version"] + 1
        system = await System.start(
            cluster, model, [generator], 3e-3, version=version, expert_parallel=2, routing="replay"
        )
        assert await system.mismatch(1, ROUTES) < LOGPROB_BOUND
        draw = system.draw

        async def spoilt(prompts: list[list[int]], sampling: Sampling = ROUTES) -> Any:
            drawn = await draw(prompts, sampling)
            return [replace(one, routes=one.routes[::-1].copy()) for one in drawn if one.routes is not None]

        system.draw = spoilt  # type: ignore[method-assign]
        assert await system.mismatch(1, ROUTES) > 100 * LOGPROB_BOUND
        metrics = await system.step(2, ROUTES)
        assert metrics["routes_differ"] > 0.05
        await system.trainer.close.call()

    asyncio.run(go())
