"""Supervised steps of a run, and rows mixed into batches; over simulated actors. The updates themselves are tested in
tests/trainer/test_policy.py, a real run in tests/recipe/test_recipe.py."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.buffer.ledger import Counts
from monarch_rl.checkpoint.folders import Manifest, complete, read_manifest
from monarch_rl.checkpoint.settings import CheckpointSettings
from monarch_rl.pipeline.resume import Resumed
from monarch_rl.pipeline.run import Run, plan_mixed_rows, plan_rows
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.trainer.settings import TrainerSettings
from tests.pipeline.test_checkpoints import SUPERVISED_S, newest, simulated_run

ROWS = [{"prompt": f"{n} + {n} = ", "answer": str(2 * n)} for n in range(10)]
NONE = CheckpointSettings(every_minutes=0.0, grace_s=0.0)


def test_supervised_steps_make_the_first_versions_and_the_bound_holds_after_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a lag of at most 1, a group sampled by the initial model could not be trained after 3 versions."""

    async def warm() -> tuple[list[int], Counts]:
        async with simulated_run(tmp_path, CheckpointSettings(every_steps=2, every_minutes=0)) as (run, trainer):
            await run.supervised(ROWS, steps=3, rows_per_step=5, lr_factor=2.0)
            assert (await run.counts()).published in (0, 3) and trainer.plans[0].rows_per_step == 5
            await run.supervised(ROWS, steps=3)  # as in a resumed recipe
            await run.mix(ROWS, share=0.2)
            steps = []
            async for step in run.steps(5):
                steps.append(step)
                await run.step()
                counts = await run.counts()
            assert [plan.share for plan in trainer.plans] == [1.0, 0.2]
            return steps, counts

    steps, counts = run_virtual(warm())
    assert steps == [1, 2, 3, 4, 5]
    assert counts.trained == 5 * 4 and not counts.dropped and counts.version == 8
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert ["trainer/supervised_loss" in row for row in rows] == [True] * 3 + [False] * 5
    assert [row["buffer/admitted"] for row in rows[:3]] == [0, 0, 0]
    assert not any("weights/swap_ms" in row for row in rows[:3])
    found = {version: read_manifest(path).warm_up_steps for version, path in complete(tmp_path / "checkpoints").items()}
    assert found[8] == 3 and set(found.values()) <= {2, 3}
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "warning" in line and "supervised(steps=3)" in line and "trains nothing" in line]
    said = [line.split(" |")[0] for line in lines if "|" in line]
    assert said == [*(f"warm-up {n}/3" for n in (1, 2, 3)), *(f"step {n}/{RunSettings().steps}" for n in range(1, 6))]


@pytest.mark.parametrize(
    ("version", "counted", "left"),
    [(0, 0, True), (2, 2, True), (3, 3, False), (5, 3, False), (5, None, False), (5, 0, None), (2, None, None)],
)
def test_a_resumed_run_makes_the_supervised_steps_that_are_left(
    tmp_path: Path, version: int, counted: int | None, left: bool | None
) -> None:
    """After ``counted`` supervised steps (None: of a version that counted them as steps); None left: it is refused."""
    manifest = Manifest(version, version, 0, 0.0, {}, warm_up_steps=counted)
    run = Run(RunSettings(), resumed=Resumed(tmp_path, tmp_path, manifest, 1))
    assert run.version - run.warm_up_steps == (version if counted is None else version - counted)
    if left is None:
        with pytest.raises(ValueError, match=r"run\.supervised\(steps=3\)"):
            run._warms_up(3)
    else:
        assert run._warms_up(3) is left


def test_a_warm_start_that_is_interrupted_is_saved(tmp_path: Path) -> None:
    """The step in flight is included, because it waits for no other process."""

    async def ends() -> None:
        async with simulated_run(tmp_path, CheckpointSettings(every_steps=2, grace_s=1e6)) as (run, _):
            runs.append(run)
            warming = asyncio.ensure_future(run.supervised(ROWS, steps=100))
            await asyncio.sleep(2.5 * SUPERVISED_S)
            warming.cancel()
            raise KeyError("a mistake")

    runs: list[Run] = []
    with pytest.raises(KeyError, match="a mistake"):
        run_virtual(ends())
    assert newest(tmp_path) == runs[0].version >= 3
    assert 2 in complete(tmp_path / "checkpoints")


def test_supervised_steps_come_before_groups(tmp_path: Path) -> None:
    async def late() -> None:
        async with simulated_run(tmp_path, NONE) as (run, _):
            async for _step in run.steps(2):
                await run.step()
                with pytest.raises(RuntimeError, match=r"run\.steps.* run\.mix"):
                    await run.supervised(ROWS, steps=5)

    run_virtual(late())


def settings(minibatches: int = 1) -> RunSettings:
    return RunSettings(
        groups_per_step=4, trainer=TrainerSettings(minibatches=minibatches), rollout=RolloutSettings(group_size=8)
    )


def test_supervised_rows_are_rendered_with_the_chat_settings_of_the_rollouts() -> None:
    plan = plan_rows(ROWS, RunSettings(rollout=RolloutSettings(chat_options='{"a": 1}', allow_control_tokens=True)), 4)
    assert (plan.chat_options, plan.allow_control_tokens) == ({"a": 1}, True)


def test_mixed_rows_are_their_share_of_the_sequences() -> None:
    for share in (0.01, 0.1, 0.5, 0.9):
        plan = plan_mixed_rows(ROWS, settings(), share)
        assert plan.share == share
        assert plan.rows_per_step == 1 or abs(plan.rows_per_step / (plan.rows_per_step + 32) - share) < 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 0.0}, "share 0 "),
        ({"share": 1.0}, "share 1 "),
        ({"share": 0.05, "s": settings(minibatches=4)}, "2 rows .*trainer.minibatches 4"),
        ({"share": 0.5, "rows": []}, "no supervised rows"),
    ],
)
def test_an_impossible_share_of_mixed_rows_is_refused(arguments: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"rows": ROWS, "s": settings()}
    with pytest.raises(ValueError, match=message):
        plan_mixed_rows(**defaults | arguments)


@pytest.mark.parametrize("numbers", [{"rows_per_step": 0}, {"rows_per_step": 1, "lr_factor": 0.0}])
def test_invalid_numbers_of_rows_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(numbers)[-1]} must be"):
        plan_rows(ROWS, settings(), **numbers)
