"""The life of a run: its loop left early, an error of the recipe, calls in a wrong order. Over simulated actors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.pipeline.run import Run
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.costs import Costs
from monarch_rl.simulate.run import Plan, run_settings, simulated_actors

PLAN = Plan(groups_per_step=4, group_size=2, trainer_devices=1, replicas=2, buffer=BufferSettings(1))


@asynccontextmanager
async def begun() -> AsyncIterator[Run]:
    async with Run.open(run_settings(PLAN, 1e6)) as run:
        await run.begin(simulated_actors(PLAN, Costs(), grain=8))
        yield run


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a coroutine function as a test, in virtual time."""

    def run() -> None:
        run_virtual(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtual
async def test_steps_count_versions_and_end_with_all_rollouts() -> None:
    async with begun() as run:
        seen = []
        async for step in run.steps(3):
            values = await run.step()
            seen.append((step, run.version, values["buffer/trained"]))
        assert seen == [(1, 1, 4), (2, 2, 8), (3, 3, 12)]
        counts = await run.counts()
        assert counts.playing == 0 and counts.published == 3


@virtual
async def test_a_loop_left_early_ends_as_well() -> None:
    """Its workers go on playing until the run is closed, and hold nothing up."""
    async with begun() as run:
        async for step in run.steps(100):
            await run.step()
            if step == 2:
                break
        assert (await run.counts()).playing > 0
        actors = run.actors
    counts = await actors.buffer.counts.call_one()
    assert counts.playing == 0 and counts.trained == 2 * PLAN.groups_per_step


@virtual
async def test_an_error_of_the_recipe_comes_through_as_it_is() -> None:
    with pytest.raises(KeyError, match="a mistake") as caught:
        async with begun() as run:
            async for _ in run.steps(10):
                await run.step()
                raise KeyError("a mistake")
    assert any(entry.name == "test_an_error_of_the_recipe_comes_through_as_it_is" for entry in caught.traceback)


@virtual
async def test_steps_are_for_one_loop() -> None:
    async with begun() as run:
        async for _ in run.steps(1):
            await run.step()
        with pytest.raises(RuntimeError, match="used once"):
            await anext(run.steps(1))


@virtual
async def test_a_run_without_actors_says_what_to_call() -> None:
    async with Run.open(RunSettings()) as run:
        with pytest.raises(RuntimeError, match=r"await run\.start"):
            await run.update()
        with pytest.raises(RuntimeError, match="open the run with a cluster"):
            await run.start(run.settings.task, advantage=lambda rewards: rewards, objective=lambda *_: (_[0], {}))
