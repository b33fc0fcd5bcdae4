"""A mixture of experts between a trainer that divides its experts among ranks and an engine that holds them stacked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_rl import pipeline
from monarch_rl.runtime.cluster import Cluster, launch
from tests.generator.helpers import make_model
from tests.pipeline.system import System, start_inspected

LOGPROB_BOUND = 1e-5
"""Engine against trainer, float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts") / "model", "moe")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with launch() as cluster:
        assert cluster is not None
        yield cluster


@pytest.fixture(scope="module")
def generators(cluster: Cluster, model: Path) -> list[Any]:
    return asyncio.run(start_inspected(cluster, model, 1, 2, "generator"))


@pytest.mark.parametrize("degree", [1, 2])
def test_engine_and_trainer_hold_the_same_experts_and_agree_on_logprobs(
    cluster: Cluster, model: Path, generators: list[Any], tmp_path: Path, degree: int
) -> None:
    """Before and after updates; SGLang's own checksums are those of an engine that loads what the trainer saved."""

    async def go() -> None:
        system = await System.start(cluster, model, generators, lr=3e-3, version=10 * degree, expert_parallel=degree)
        start = await generators[0].engine_checksums.call_one()
        assert await system.mismatch(seed=1) < LOGPROB_BOUND
        for seed in range(3):
            await system.step(seed)
            assert await system.mismatch(seed=100 + seed) < LOGPROB_BOUND
        served = await generators[0].engine_checksums.call_one()
        assert all(start[name] != served[name] for name in served)
        await pipeline.save(system.trainer, tmp_path / "saved")
        (fresh,) = await start_inspected(cluster, tmp_path / "saved", 1, 3, f"fresh{degree}")
        assert served == await fresh.engine_checksums.call_one()
        await fresh.shutdown.call_one()

    asyncio.run(go())
