"""benchmarks/async_gain.py: its bound holds for any schedule, and injected latencies have the requested length."""

from __future__ import annotations

import asyncio
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.sampling import Sampling
from monarch_rl.generator.requests import BusyClock
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.costs import Costs, DecodeCosts, Distribution, TrainerCosts
from monarch_rl.simulate.run import RunMetrics, predict

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def async_gain() -> Any:
    """The benchmark, imported with its folder on ``sys.path``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("async_gain")


def simulate(s: Any, lag: int) -> RunMetrics:
    costs = Costs(s.length, 1, DecodeCosts(s.token_s, 0.0, max_running=s.places), TrainerCosts(s.update_s, 0.0))
    return predict(replace(s.plan, buffer=BufferSettings(lag)), costs, s.steps, s.warm_up, grain=1)


def test_the_demand_of_the_generator_is_that_of_its_sampled_tokens(async_gain: Any) -> None:
    s = async_gain.Settings()
    found = simulate(s, lag=0)  # all tokens sampled in a step are trained in it
    seconds = found.tokens_per_s * found.step_s * s.token_s / (s.places * s.replicas)
    assert async_gain.generator_demand(s) == pytest.approx(seconds, rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    lag=st.integers(0, 5),
    places=st.integers(2, 40),
    update_s=st.floats(0.01, 5),
    sigma=st.floats(0, 1.2),
)
def test_no_run_is_faster_than_the_demand_of_the_busier_side(
    async_gain: Any, lag: int, places: int, update_s: float, sigma: float
) -> None:
    s = async_gain.Settings(
        steps=5, warm_up=0, places=places, update_s=update_s, length=Distribution(20, sigma, 120), groups_per_step=4
    )
    found = simulate(s, lag)
    steps = async_gain.Steps(found.step_s, s.update_s, async_gain.generator_demand(s), found.lag_mean, 0)
    assert steps.step_s >= steps.demand_s * (1 - 1e-6)
    assert steps.bound >= 1 - 1e-6


def test_the_bound_is_the_idle_share_of_the_busier_side(async_gain: Any) -> None:
    steps = async_gain.Steps(step_s=10.0, trainer_s=2.5, generator_s=1.0, lag_mean=0.0, lag_max=0.0)
    assert steps.idle_share == 0.75
    assert steps.bound == 4.0
    assert replace(steps, generator_s=5.0).bound == 2.0


class _Engine:
    """An engine that answers immediately."""

    def __init__(self) -> None:
        self.requests = SimpleNamespace(clock=BusyClock())

    async def generate(self, prompt_ids: list[int], sampling: Sampling, on_part: Any = None) -> list[int]:
        return prompt_ids


def test_answers_wait_for_a_slot_and_then_for_their_latency(async_gain: Any) -> None:
    recipe = sys.modules["async_gain_recipe"]
    length, token_s = Distribution(10), 0.01

    async def seconds_for(places: int, seeds: list[int | None]) -> float:
        generator, engine = recipe.SlowGenerator.__new__(recipe.SlowGenerator), _Engine()
        generator.latencies = recipe.Latencies(length, token_s, places, 0.0)
        generator._slow_down(engine)
        requests = [engine.generate([index], Sampling(8, 1.0, (), seed)) for index, seed in enumerate(seeds)]
        assert await asyncio.gather(*requests) == [[index] for index in range(len(seeds))]
        return asyncio.get_running_loop().time()

    assert run_virtual(seconds_for(4, [1, 2])) == pytest.approx(10 * token_s)
    assert run_virtual(seconds_for(1, [1, 2, 3, 4, 5])) == pytest.approx(5 * 10 * token_s)
    assert run_virtual(seconds_for(1, [None] * 50)) == 0, "held-out items neither wait nor are slowed down"
