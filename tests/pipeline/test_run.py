"""The life cycle of a run: a loop left early, an error of the recipe, calls in the wrong order; simulated actors."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from monarch_rl.algorithms.advantages import grpo
from monarch_rl.algorithms.objectives import GSPO, PPOClip
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.errors import SettingsError
from monarch_rl.observe.trackers import Rows, TrackedRun
from monarch_rl.pipeline.run import Run
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.runtime.devices import Devices
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.costs import Costs
from monarch_rl.simulate.run import Plan, run_settings, simulated_actors
from monarch_rl.tasks.questions import Questions
from monarch_rl.tasks.reasoning_gym import ReasoningGym, TaskSettings
from monarch_rl.tasks.task import Task
from monarch_rl.trainer.objective import supervised
from tests.model.configs import qwen3

PLAN = Plan(groups_per_step=4, group_size=2, trainer_devices=1, replicas=2, buffer=BufferSettings(1))


@asynccontextmanager
async def simulated_run() -> AsyncIterator[Run]:
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
    async with simulated_run() as run:
        steps = []
        async for step in run.steps(3):
            values = await run.step()
            steps.append((step, run.version, values["buffer/trained"]))
        assert steps == [(1, 1, 4), (2, 2, 8), (3, 3, 12)]
        counts = await run.counts()
        assert counts.playing == 0 and counts.published == 3


@virtual
async def test_a_run_ends_cleanly_when_its_loop_is_left_early() -> None:
    """Its workers continue until the run is closed, and do not delay it."""
    async with simulated_run() as run:
        async for step in run.steps(100):
            await run.step()
            if step == 2:
                break
        assert (await run.counts()).playing > 0
        actors = run.actors
    counts = await actors.buffer.counts.call_one()
    assert counts.playing == 0 and counts.trained == 2 * PLAN.groups_per_step


@virtual
async def test_an_error_of_the_recipe_propagates_unchanged() -> None:
    with pytest.raises(KeyError, match="a mistake") as caught:
        async with simulated_run() as run:
            async for _ in run.steps(10):
                await run.step()
                raise KeyError("a mistake")
    assert any(entry.name == "test_an_error_of_the_recipe_propagates_unchanged" for entry in caught.traceback)


@virtual
async def test_run_steps_can_be_iterated_only_once() -> None:
    async with simulated_run() as run:
        async for _ in run.steps(1):
            await run.step()
        with pytest.raises(RuntimeError, match=r"run\.steps"):
            await anext(run.steps(1))


@virtual
async def test_a_failed_publication_is_an_error_even_after_a_loop_left_early() -> None:
    with pytest.raises(RuntimeError, match="the network is gone"):
        async with simulated_run() as run:
            async for _ in run.steps(10):
                await run.update()

                async def fail() -> None:
                    raise RuntimeError("the network is gone")

                run.publisher._unfinished.append(asyncio.ensure_future(fail()))
                break


@virtual
async def test_calls_in_a_wrong_order_are_refused() -> None:
    async with simulated_run() as run:
        with pytest.raises(RuntimeError, match=r"run\.update.*run\.steps"):
            await run.update()
        with pytest.raises(RuntimeError, match="start"):
            await run.begin(run.actors)
    async with Run.open(run_settings(PLAN, 1e6)) as run:
        actors = simulated_actors(PLAN, Costs(), grain=8)
        with pytest.raises(RuntimeError, match=r"run\.start\(\) in the task"):
            await asyncio.create_task(run.begin(actors))


@virtual
async def test_a_run_without_actors_names_the_missing_call() -> None:
    async with Run.open(RunSettings()) as run:
        with pytest.raises(RuntimeError, match=r"run\.start"):
            await run.update()
        with pytest.raises(RuntimeError, match="cluster"):
            await run.start(ReasoningGym(TaskSettings()), advantage=grpo, objective=lambda *_: (_[0], {}))


@virtual
async def test_settings_are_checked_before_anything_is_spawned() -> None:
    """This includes the task passed to start(), which may differ from the task of the settings."""
    cluster: Any = SimpleNamespace(
        devices=Devices("cpu", 1, 4), spawn=lambda *_, **__: pytest.fail("spawned before the settings were checked")
    )
    rewards = (reward for reward in (0.0, 1.0))
    async with Run.open(RunSettings(), cluster) as run:

        async def episode(item: Any, policy: Any) -> Any:
            return next(rewards)

        task = ReasoningGym(TaskSettings()).with_episode(episode)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError, match="chain_sum"):
            patch.setattr("monarch_rl.pipeline.run.prepare", lambda settings, *_: (settings, qwen3()))
            await run.start(task, advantage=grpo, objective=supervised)
    wrong = {"held-out 201 ": RunSettings(held_out=201), "'spel_backward'": RunSettings()}
    for message, settings in wrong.items():
        async with Run.open(settings, cluster) as run:
            with pytest.raises(ValueError, match=message):
                await run.start(ReasoningGym(TaskSettings("spel_backward")), advantage=grpo, objective=supervised)
    async with Run.open(RunSettings(objective=GSPO()), cluster) as run:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="objective gspo: .*supervised"):
            patch.setattr("monarch_rl.pipeline.run.prepare", lambda settings, *_: (settings, qwen3()))
            await run.start(ReasoningGym(TaskSettings()), advantage=grpo, objective=supervised)
    wrong_filter = RunSettings(buffer=BufferSettings(drop_equal_rewards=True))
    async with Run.open(wrong_filter, cluster) as run:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="supervised .*rewards"):
            patch.setattr("monarch_rl.pipeline.run.prepare", lambda settings, *_: (settings, qwen3()))
            await run.start(ReasoningGym(TaskSettings()), advantage=grpo, objective=supervised)
    async with Run.open(replace(wrong_filter, objective=GSPO()), cluster) as run:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SettingsError) as refused:
            patch.setattr("monarch_rl.pipeline.run.prepare", lambda settings, *_: (settings, qwen3()))
            await run.start(ReasoningGym(TaskSettings()), advantage=grpo, objective=supervised)
    assert len(refused.value.problems) == 2, "all at once"


@virtual
async def test_a_run_has_the_task_of_its_launch_and_no_other() -> None:
    """Also if a recipe's train() builds the same task again. What differs is found in its name, code, sets or items."""

    def questions(reward: Any = lambda row, answer: 1.0, rows: Any = ("a", "b", "c"), **more: Any) -> Task:
        return Questions([{"question": row} for row in rows], reward, **more)

    async def spawn(*arguments: Any, **__: Any) -> None:
        raise RuntimeError(f"spawned {arguments[2].load().name}")

    cluster: Any = SimpleNamespace(devices=Devices("cpu", 1, 4))
    apart = {"test": [{"question": "d"}]}
    launched = questions(held_out=apart)
    others = [
        questions(held_out={"test": [{"question": "e"}]}),
        questions(lambda row, answer: 0.0, held_out=apart),
        questions(rows="xyz", held_out=apart),
        questions(held_out=1),
        questions(success_reward=0.5, held_out=apart),
        questions(name="mine", held_out=apart),
    ]
    others.insert(0, questions(rows=("a", "b", "f"), held_out=apart))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("monarch_rl.pipeline.run.prepare", lambda settings, *_: (settings, qwen3()))
        patch.setattr("monarch_rl.pipeline.run.start_actors", spawn)
        async with Run.open(RunSettings(probe=False), cluster) as run:
            with pytest.raises(RuntimeError, match="launch"):
                await run.start(advantage=grpo, objective=PPOClip())
            with pytest.raises(RuntimeError, match="spawned mine"):
                await run.start(others[-1], advantage=grpo, objective=PPOClip())
        async with Run.open(RunSettings(probe=False), cluster, task=launched) as run:
            assert run.task is launched
            for same in (None, launched, questions(held_out=apart)):
                with pytest.raises(RuntimeError, match="spawned questions"):
                    await run.start(same, advantage=grpo, objective=PPOClip())
            for other in others:
                with pytest.raises(SettingsError, match=r"run\.start.*launch"):
                    await run.start(other, advantage=grpo, objective=PPOClip())


@virtual
async def test_a_filter_that_drops_useful_groups_warns_before_anything_is_spawned() -> None:
    async def spawn(*_: Any, **__: Any) -> None:
        raise RuntimeError("spawned")

    cluster: Any = SimpleNamespace(devices=Devices("cpu", 1, 4))
    async with Run.open(RunSettings(buffer=BufferSettings(drop_equal_rewards=True), probe=False), cluster) as run:
        for advantage, warns in (("reinforce_pp", True), ("grpo", False)):
            output = io.StringIO()
            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
                patch.setattr("monarch_rl.pipeline.run.prepare", lambda settings, *_: (settings, qwen3()))
                patch.setattr("monarch_rl.pipeline.run.start_actors", spawn)
                with pytest.raises(RuntimeError, match="spawned"):
                    await run.start(ReasoningGym(TaskSettings()), advantage=advantage, objective=PPOClip())
            assert (bool(re.search("warning: buffer.drop-equal-rewards: .*reinforce_pp", output.getvalue()))) == warns


class Lines:
    """A tracker of a recipe."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, settings: Mapping[str, Any], run: TrackedRun) -> None:
        self.calls.append(("start", run.folder))

    def log(self, step: int, values: Mapping[str, float], rows: Rows) -> None:
        self.calls.append(("log", step, values["buffer/trained"]))

    def end(self, state: str) -> None:
        self.calls.append(("end", state))


def test_a_recipe_s_own_tracker_gets_all_steps(tmp_path: Path) -> None:
    own, none = Lines(), Lines()

    async def test() -> None:
        async with Run.open(replace(run_settings(PLAN, 1e6), track=("none",)), folder=tmp_path) as run:
            run.track("lines", own)
            with pytest.raises(ValueError, match="'lines'"):
                run.track("lines", none)
            with pytest.raises(ValueError, match="'wandb'"):
                run.track("wandb", none)
            for wrong in [print, Lines]:
                with pytest.raises(TypeError, match="start, log and end"):
                    run.track("wrong", cast(Any, wrong))
            await run.begin(simulated_actors(PLAN, Costs(), grain=8))
            with pytest.raises(RuntimeError, match=r"before it"):
                run.track("late", none)
            async for _ in run.steps(2):
                await run.step()

    run_virtual(test())
    assert own.calls == [("start", tmp_path), ("log", 1, 4), ("log", 2, 8), ("end", "finished")]
    assert not none.calls
