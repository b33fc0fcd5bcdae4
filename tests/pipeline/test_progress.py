"""What a run prints while nothing is finished: simulated actors, in virtual time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.buffer.actor import AwaitedBatch
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.checkpoints import NoCheckpoints
from monarch_rl.pipeline.progress import FIRST_S, Progress, Start, describe_batch, reporting
from monarch_rl.pipeline.run import Run
from monarch_rl.rollout.statistics import EpisodeProgress, WorkerProgress
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.costs import Costs, DecodeCosts, Distribution, TrainerCosts
from monarch_rl.simulate.handles import LocalMesh
from monarch_rl.simulate.run import Plan, run_settings, simulated_actors

PLAN = Plan(groups_per_step=4, group_size=2, trainer_devices=1, replicas=2, buffer=BufferSettings(1))
TOKENS = Distribution(100)


def printed(costs: Costs, folder: Path, capsys: pytest.CaptureFixture[str], held_out: int = 0) -> list[str]:
    """Lines of a run of two steps, after an evaluation if there are held-out items."""

    async def run_two_steps() -> None:
        settings = replace(run_settings(PLAN, 1e6), held_out=max(held_out, 1), steps=2)
        async with Run.open(settings, folder=folder) as run:
            await run.begin(simulated_actors(PLAN, costs, grain=1))
            if held_out:
                await run.evaluate()
            async for _ in run.steps(2):
                await run.step()

    run_virtual(run_two_steps())
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("wait_s, lines", [(29, 0), (31, 1), (59, 1), (61, 2), (130, 3), (1000, 6)])
def test_a_wait_is_reported_after_30_s_and_each_time_that_it_has_doubled(wait_s: int, lines: int) -> None:
    noted: list[str] = []

    async def describe(seconds: float) -> str:
        return f"{seconds:.0f}"

    async def wait() -> None:
        async with reporting(noted.append, describe):
            await asyncio.sleep(wait_s)
        await asyncio.sleep(10_000)

    run_virtual(wait())
    assert noted == [str(30 * 2**place) for place in range(lines)]


def test_a_terminal_shows_the_wait_each_second_until_it_ends() -> None:
    shown, noted = list[str](), list[str]()

    async def describe(seconds: float) -> str:
        if seconds > 2.5:
            raise RuntimeError("the buffer is lost")
        return f"for {seconds:.0f} s"

    async def wait() -> None:
        async with reporting(noted.append, describe, status=shown.append):
            await asyncio.sleep(5.5)
        await asyncio.sleep(100)

    run_virtual(wait())
    assert shown == ["for 1 s", "for 2 s", ""] and not noted


def test_a_report_that_fails_costs_neither_the_wait_nor_later_reports() -> None:
    noted: list[str] = []

    async def describe(seconds: float) -> str:
        if seconds < 45:
            raise RuntimeError("the buffer is lost")
        return "later"

    async def wait() -> str:
        async with reporting(noted.append, describe):
            await asyncio.sleep(90)
        return "done"

    assert run_virtual(wait()) == "done" and noted == ["later"]


def test_a_long_wait_for_a_batch_is_reported_with_its_groups_and_its_longest_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(Costs(length=TOKENS, decode=DecodeCosts(step_s=0.5)), tmp_path, capsys)
    (report,) = [line for line in lines if "waiting for its batch" in line and line.startswith("step 1:")]
    assert re.search(r"waiting for its batch for 30 s: 0 of 4 groups are complete, 4 are running", report), report
    assert re.search(
        r"longest episode: 0 turns, \d+ tokens \(item \d+ of task simulated, waiting for a model's answer for 30 s\)",
        report,
    ), report
    assert lines.index(report) < next(place for place, line in enumerate(lines) if line.startswith("step 1/2"))


def test_a_short_wait_is_not_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not [line for line in printed(Costs(length=TOKENS), tmp_path, capsys) if "waiting" in line]


def test_a_trainer_that_takes_long_is_not_blamed_on_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(Costs(length=TOKENS, trainer=TrainerCosts(step_s=100)), tmp_path, capsys)
    reports = [line for line in lines if line.startswith("step 2:")]
    assert len(reports) == 2 and all("trainer" in line and "batch" not in line for line in reports), lines


def test_a_first_evaluation_is_announced_and_a_long_one_reported_with_the_episodes_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = Costs(length=TOKENS, decode=DecodeCosts(step_s=0.1, max_running=8))
    lines = printed(costs, tmp_path, capsys, held_out=60)
    assert [line for line in lines if "evaluating 60 held-out items" in line]
    first = next(line for line in lines if line.startswith("evaluating before training: "))
    done = re.search(
        r": (\d+) of 60 held-out episodes are done after 30 s; longest episode: .*held-out item \d+", first
    )
    assert done and 0 < int(done[1]) < 60, first


def test_a_long_evaluation_next_to_training_is_reported_between_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        settings = replace(run_settings(PLAN, 1e6), held_out=400, evaluate_every=1, steps=20)
        settings = replace(settings, evaluation=replace(settings.evaluation, share=0.1))
        async with Run.open(settings, folder=tmp_path) as run:
            costs = Costs(length=TOKENS, decode=DecodeCosts(step_s=0.1, max_running=16))
            await run.begin(simulated_actors(PLAN, costs, grain=1))
            async for step in run.steps(20):
                await run.step()
                await run.evaluate_after(step)

    run_virtual(test())
    lines = capsys.readouterr().out.splitlines()
    (at, first), *_ = [(at, line) for at, line in enumerate(lines) if line.startswith("evaluating after step 1: ")]
    assert re.search(r": \d+ of 400 held-out episodes are done after 30 s", first), first
    assert [line for line in lines[at:] if line.startswith("step ")], lines


def test_other_long_waits_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of a run: for an evaluation in parallel, and for a disk."""

    async def slow_disk(*_: Any, **__: Any) -> None:
        await asyncio.sleep(15)

    async def wait() -> None:
        settings = run_settings(PLAN, 1e6)
        async with Run.open(settings, folder=tmp_path) as run:
            await run.begin(simulated_actors(PLAN, Costs(length=TOKENS), grain=1))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run._components.evaluations, "end", lambda: asyncio.sleep(70))
                for method in ("settled", "after_step"):
                    patch.setattr(NoCheckpoints, method, slow_disk)
                patch.setattr(run, "_checkpoints", NoCheckpoints())
                async for _ in run.steps(1):
                    await run.step()
                patch.setattr("monarch_rl.pipeline.run.save", lambda *_: asyncio.sleep(40))
                await run.save()

    run_virtual(wait())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("waiting for")]
    assert ["evaluation" in line for line in lines] == [True, True, False, False], lines
    assert "checkpoint" in lines[2] and str(tmp_path / "model") in lines[3]


class AskedBuffer:
    def __init__(self, batch: AwaitedBatch) -> None:
        self._batch = batch

    async def awaited_batch(self) -> AwaitedBatch:
        return self._batch


class AskedWorker:
    """Answers, unless its event loop is blocked, for the groups that it has."""

    def __init__(self, *episodes: EpisodeProgress, blocked: bool = False) -> None:
        self._episodes, self._blocked = episodes, blocked

    async def progress(self, groups: list[int] | None) -> WorkerProgress:
        if self._blocked:
            await asyncio.Event().wait()
        found = [one for one in self._episodes if groups is not None and one.group in groups]
        return WorkerProgress(0, max(found, key=lambda one: one.tokens, default=None))


def of_batch(batch: AwaitedBatch, *workers: AskedWorker, state_of: Callable[[str], str] = lambda name: "") -> str:
    noted: list[str] = []

    async def wait() -> None:
        mesh: Any = LocalMesh
        pool: ActorPool[Any] = ActorPool("rollout worker", "rollout", {i: mesh([w]) for i, w in enumerate(workers)})
        async with Progress(noted.append, mesh([AskedBuffer(batch)]), pool, state_of).step("step 3"):
            await asyncio.sleep(FIRST_S + 10)

    run_virtual(wait())
    (line,) = noted
    return line


LACKS_TWO = AwaitedBatch(waited_s=30.0, groups=8, missing=[17, 19], unstarted=1, running=5, dropped={})


def test_the_longest_episode_is_of_a_group_that_the_batch_lacks() -> None:
    short = EpisodeProgress("letters", 3, 17, 2, 40, False, 1.0)
    long = EpisodeProgress("letters", 12, 19, 90, 700, True, 25.0)
    later = EpisodeProgress("letters", 5, 30, 200, 9000, False, 1.0)
    line = of_batch(LACKS_TWO, AskedWorker(short, later), AskedWorker(long))
    assert "step 3" in line and "5 of 8 groups are complete, 2 are running, 1 have not started" in line
    assert "longest episode: 90 turns, 700 tokens (item 12 of task letters, in its own code for 25 s)" in line


def test_a_batch_whose_groups_have_no_running_episode_says_so() -> None:
    assert "no episode" in of_batch(LACKS_TWO, AskedWorker())


def test_a_worker_that_does_not_answer_is_named_with_its_state() -> None:
    state = "has blocked its event loop for 31 s at mistakes.py:62"
    line = of_batch(LACKS_TWO, AskedWorker(), AskedWorker(blocked=True), state_of=lambda name: state)
    assert f"rollout worker 1 {state}" in line and "rollout worker 0" not in line
    assert "rollout worker 0 does not answer" in of_batch(LACKS_TWO, AskedWorker(blocked=True))


def test_groups_dropped_during_the_wait_are_counted_by_reason() -> None:
    text = describe_batch(replace(LACKS_TWO, dropped={"equal rewards": 36, "episode raised KeyError": 2}))
    assert "36 equal rewards" in text and "2 episode raised KeyError" in text


def test_a_start_reports_each_part_when_it_is_done_and_which_ones_take_long(capsys: pytest.CaptureFixture[str]) -> None:
    async def begin() -> None:
        start = Start()
        async with start.reporting():
            await asyncio.gather(
                start.part("the trainer", asyncio.sleep(12), "trainer ranks up: 2"),
                start.part("the engines", asyncio.sleep(94), "generators up: 1"),
            )

    run_virtual(begin())
    trainer, *waiting, generators = capsys.readouterr().out.splitlines()
    assert "trainer ranks up: 2 (12 s)" in trainer and "generators up: 1 (94 s)" in generators
    assert [re.findall(r"\d+ s", line)[0] for line in waiting] == ["30 s", "60 s", "90 s"]
    assert all("the engines" in line and "the trainer" not in line for line in waiting)
