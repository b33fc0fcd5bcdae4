"""Runs whose episodes fail: messages, counts, and when the run ends; over simulated actors."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.episode.episode import Group
from monarch_rl.episode.failure import KINDS
from monarch_rl.errors import EpisodesFail, ScoringFailed
from monarch_rl.pipeline.failures import MIN_ITEMS
from monarch_rl.pipeline.run import Run
from monarch_rl.rollout.submit import GroupSubmitter
from monarch_rl.runtime.deadlines import now
from monarch_rl.simulate import run as simulation
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.costs import Costs
from monarch_rl.simulate.run import SimulatedDispatcher, SimulatedWorker, run_settings, simulated_actors
from monarch_rl.tasks.task import Outcome
from tests.pipeline.test_run import PLAN, virtual

TRACEBACK = """Traceback (most recent call last):
  File "reward.py", line 3, in score
KeyError: 'x'"""
Scoring = Callable[[int], bool]
"""Takes the number of the call of score (from 1); returns whether it raises."""


def failing(monkeypatch: pytest.MonkeyPatch, fails: Scoring, reason: str = "score raised KeyError") -> None:
    """Make ``score`` raise whenever ``fails`` returns True."""
    score, count = SimulatedWorker.score, 0

    async def scored(self: SimulatedWorker, *args: Any) -> Outcome:
        nonlocal count
        count += 1
        if fails(count):
            raise ScoringFailed(reason, "", "reward.py:3", TRACEBACK)
        return await score(self, *args)

    monkeypatch.setattr(SimulatedWorker, "score", scored)


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    yield lambda fails, **more: failing(monkeypatch, fails, **more)


def test_held_out_items_that_all_fail_end_the_run_with_the_first_traceback(patch: Callable[..., None]) -> None:
    patch(lambda _: True)

    @virtual
    async def test() -> None:
        with pytest.raises(EpisodesFail) as ended:
            async with Run.open(run_settings(PLAN, 1e6)) as run:
                await run.begin(simulated_actors(PLAN, Costs(), grain=8))
                await run.evaluate()
        first, *report = str(ended.value).splitlines()
        assert first.startswith("score raised KeyError: 200 of 200 held-out items failed")
        assert report[:3] == TRACEBACK.splitlines() and report[3].startswith("Item 0, prompt: ")

    test()


def test_a_run_continues_if_only_some_held_out_items_fail(patch: Callable[..., None]) -> None:
    patch(lambda count: count > 1)

    @virtual
    async def test() -> None:
        async with Run.open(run_settings(PLAN, 1e6)) as run:
            await run.begin(simulated_actors(PLAN, Costs(), grain=8))
            assert (await run.evaluate()).failed == {"score raised KeyError": 199}

    test()


@pytest.mark.parametrize("items", [MIN_ITEMS - 1, MIN_ITEMS])
def test_few_held_out_items_that_fail_after_a_step_are_a_warning(
    patch: Callable[..., None], caplog: pytest.LogCaptureFixture, items: int
) -> None:
    """Before training, even few failures end the run."""
    broken = False
    patch(lambda _: broken)

    @virtual
    async def test() -> None:
        nonlocal broken
        async with Run.open(replace(run_settings(PLAN, 1e6), held_out=items)) as run:
            await run.begin(simulated_actors(PLAN, Costs(), grain=8))
            await run.evaluate()
            async for _ in run.steps(1):
                await run.step()
            broken = True
            if items == MIN_ITEMS:
                with pytest.raises(EpisodesFail, match=f"{items} of {items} held-out"):
                    await run.evaluate()
            else:
                assert (await run.evaluate()).failed == {"score raised KeyError": items}
                (warning,) = [record.getMessage() for record in caplog.records if "too few" in record.getMessage()]
                assert f"{items} of {items} held-out" in warning and TRACEBACK in warning

    with caplog.at_level(logging.WARNING, "monarch_rl"):
        test()


def test_one_held_out_item_that_fails_before_training_ends_the_run(patch: Callable[..., None]) -> None:
    patch(lambda _: True)

    @virtual
    async def test() -> None:
        with pytest.raises(EpisodesFail, match="1 of 1 held-out"):
            async with Run.open(replace(run_settings(PLAN, 1e6), held_out=1)) as run:
                await run.begin(simulated_actors(PLAN, Costs(), grain=8))
                await run.evaluate()

    test()


def test_groups_that_all_fail_from_the_start_on_end_the_run_at_once(patch: Callable[..., None]) -> None:
    patch(lambda _: True)

    @virtual
    async def test() -> None:
        began = now()
        with pytest.raises(EpisodesFail) as ended:
            async with Run.open(run_settings(PLAN, 1e6)) as run:
                await run.begin(simulated_actors(PLAN, Costs(), grain=8))
                async for _ in run.steps(3):
                    await run.step()
        assert str(ended.value).startswith("score raised KeyError: all of the first 8 groups")
        assert TRACEBACK in str(ended.value)
        assert now() - began < 10 * Costs().trainer.step_s + 60

    test()


def ends_early(monkeypatch: pytest.MonkeyPatch, ends: Scoring) -> None:
    """Let an episode end before the policy's turn, with the reward 5, whenever ``ends`` returns True."""
    play, count = simulation._play, 0

    async def played(item: Any, policy: Any) -> Any:
        nonlocal count
        count += 1
        return 5.0 if ends(count) else await play(item, policy)

    monkeypatch.setattr(simulation, "_play", played)


async def steps(run: Run, count: int) -> dict[str, float]:
    """The metrics of step ``count`` of the run."""
    values: dict[str, float] = {}
    async for _ in run.steps(count):
        values = await run.step()
    return values


def test_episodes_that_end_before_the_policys_turn_count_in_evaluations_and_are_not_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends_early(monkeypatch, lambda count: count % 4 == 0)
    groups, submit = list[Group](), GroupSubmitter.submit

    async def recorded(self: GroupSubmitter, ticket: Any, item: Any, group: Group) -> None:
        groups.append(group)
        await submit(self, ticket, item, group)

    monkeypatch.setattr(GroupSubmitter, "submit", recorded)
    plan = replace(PLAN, group_size=4)

    @virtual
    async def test() -> None:
        async with Run.open(replace(run_settings(plan, 1e6), held_out=40)) as run:
            await run.begin(simulated_actors(plan, Costs(), grain=8))
            result = await run.evaluate()
            values = result.metrics()
            assert not result.failed and values["held_out/without_turn"] == 10
            assert (result.rewards == 5).sum() == 10 and values["held_out/reward"] == result.rewards.mean()
            assert f"{10} ended before" in str(result)
            values = await steps(run, 3)
            assert values["length/without_turn"] >= 12 and values["recovery/infrastructure_failures"] == 0
            assert groups and all(2 <= len(group.episodes) <= 4 for group in groups)
            assert all(episode.turns and episode.reward < 5 for group in groups for episode in group.episodes)
            assert not any(name.startswith("dropped/") for name in values)

    test()


@pytest.mark.parametrize("trains", [False, True])
def test_an_episode_that_never_awaits_a_reply_is_told_so(monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    ends_early(monkeypatch, lambda _: True)

    @virtual
    async def test() -> None:
        with pytest.raises(EpisodesFail, match=r"await policy\.reply"):
            async with Run.open(run_settings(PLAN, 1e6)) as run:
                await run.begin(simulated_actors(PLAN, Costs(), grain=8))
                await (steps(run, 3) if trains else run.evaluate())

    test()


def test_failures_of_infrastructure_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    count, away = 0, True

    async def scored(self: SimulatedWorker, *args: Any) -> Outcome:
        nonlocal count
        count += 1
        if count % 4 == 0 and away:
            raise ScoringFailed("score raised SandboxFailed", infrastructure=True)
        if count % 4 == 1:
            raise ScoringFailed("score raised KeyError")
        return Outcome(1.0)

    monkeypatch.setattr(SimulatedWorker, "score", scored)
    plan = replace(PLAN, group_size=4)

    @virtual
    async def test() -> None:
        nonlocal away
        async with Run.open(replace(run_settings(plan, 1e6), held_out=40)) as run:
            await run.begin(simulated_actors(plan, Costs(), grain=8))
            result = await run.evaluate()
            values = result.metrics()
            assert (values["held_out/left_out"], values["held_out/failed"]) == (10, 10)
            # 20 right answers, and 10 failures of the task's own code.
            assert values["held_out/accuracy"] == pytest.approx(2 / 3) == values["held_out/reward"]
            assert sum(result.failed.values()) == 20
            async for step in run.steps(8):
                values = await run.step()
                if step == 3:
                    assert 0.1 < values["recovery/infrastructure_failures"] < 0.4
                    assert values["dropped/episode score raised SandboxFailed"] > 0
                    away = False
            assert values["recovery/infrastructure_failures"] == 0, "it is not the share since the last step"

    test()


def test_endless_kinds_of_failures_do_not_fill_the_console(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, the location may be a line of generated code."""
    score, count = SimulatedWorker.score, 0

    async def scored(self: SimulatedWorker, *args: Any) -> Outcome:
        nonlocal count
        count += 1
        if count % 5 == 0:
            raise ScoringFailed("score raised KeyError", "", f"generated.py:{count}", TRACEBACK)
        return await score(self, *args)

    monkeypatch.setattr(SimulatedWorker, "score", scored)

    @virtual
    async def test() -> None:
        async with Run.open(run_settings(PLAN, 1e6)) as run:
            await run.begin(simulated_actors(PLAN, Costs(), grain=8))
            await run.evaluate()
            async for _ in run.steps(12):
                await run.step()

    with caplog.at_level(logging.WARNING, "monarch_rl"):
        test()
    shown = [record.getMessage() for record in caplog.records if "fail" in record.getMessage()]
    assert len(shown) == KINDS + 1
    assert shown[-1].endswith(f"{KINDS} kinds of failures were shown: further kinds are only counted")


def test_prompts_that_never_fit_end_the_run_with_a_message_that_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokens are sampled for them, so groups are dropped as fast as they start."""

    def set_up(worker: SimulatedWorker, buffer: Any, replicas: Any) -> None:
        worker.connect(buffer, SimulatedDispatcher(replicas), worker._stand_ins, episode_limit=5)

    monkeypatch.setattr(SimulatedWorker, "set_up", set_up)

    @virtual
    async def test() -> None:
        with pytest.raises(EpisodesFail) as ended:
            async with Run.open(run_settings(PLAN, 1e6)) as run:
                await run.begin(simulated_actors(PLAN, Costs(), grain=8))
                async for _ in run.steps(3):
                    await run.step()
        assert re.match(r"prompt .* 5 tokens: all of the first 8 groups", str(ended.value))
        assert "--trainer.tokens-per-microbatch" in str(ended.value)

    test()


def test_groups_that_all_fail_later_end_the_run_after_twice_stall_s(patch: Callable[..., None]) -> None:
    broken = False
    patch(lambda _: broken)

    @virtual
    async def test() -> None:
        nonlocal broken
        since = 0.0
        with pytest.raises(EpisodesFail) as ended:
            async with Run.open(run_settings(PLAN, 1e6)) as run:
                await run.begin(simulated_actors(PLAN, Costs(), grain=8))
                async for step in run.steps(1000):
                    await run.step()
                    if step == 2:
                        broken, since = True, now()
        assert str(ended.value).startswith("score raised KeyError: for ")
        assert now() - since >= 30

    test()


def test_failures_are_shown_once_and_counted(
    patch: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    patch(lambda count: count % 20 == 0)

    async def test() -> None:
        async with Run.open(run_settings(PLAN, 1e6), folder=tmp_path) as run:
            await run.begin(simulated_actors(PLAN, Costs(), grain=8))
            await run.evaluate()
            async for _ in run.steps(12):
                await run.step()

    with caplog.at_level(logging.WARNING, "monarch_rl"):
        run_virtual(test())
    shown = [record.getMessage() for record in caplog.records if "an episode failed" in record.getMessage()]
    assert len(shown) == 1
    assert "the first failure of this kind: score raised KeyError" in shown[0] and TRACEBACK in shown[0]
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    counted = last["dropped/episode score raised KeyError"]
    summary = capsys.readouterr().out.splitlines()[-1]
    assert counted >= 1 and summary.startswith("failed: ")
    episodes, held_out = (int(part.split()[0]) for part in summary.removeprefix("failed: ").split("; "))
    assert episodes >= counted and held_out == 10
    assert summary == (
        f"failed: {episodes} episodes: score raised KeyError; {held_out} held-out items: score raised KeyError"
    )
