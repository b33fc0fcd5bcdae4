"""The best checkpoint, over simulated actors: the one of the version with the best evaluation."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_rl.checkpoint import folders
from monarch_rl.checkpoint.folders import Manifest, Measurement, complete, read_manifest
from monarch_rl.checkpoint.settings import CheckpointSettings
from monarch_rl.rollout.evaluation import Evaluation, EvaluationSettings
from monarch_rl.simulate.clock import run_virtual
from tests.pipeline.test_checkpoints import StalledDisk, one_checkpoint, simulated_run

ACCURACY = "held_out/accuracy"
Accuracies = Callable[[float], None]


@pytest.fixture
def next_accuracy(monkeypatch: pytest.MonkeyPatch) -> Accuracies:
    """Return a function that sets the accuracy of the next evaluations."""
    values = {ACCURACY: 0.0}
    monkeypatch.setattr(Evaluation, "metrics", lambda _: dict(values))

    def set_accuracy(accuracy: float) -> None:
        values[ACCURACY] = accuracy

    return set_accuracy


def best_result(run: Path) -> Measurement:
    return Measurement(**json.loads((run / "best.json").read_text()))


def best_checkpoint(run: Path) -> Manifest:
    return read_manifest(run / "checkpoints" / os.readlink(run / "checkpoints" / "best"))


def test_an_evaluation_after_the_last_checkpoint_counts_for_it(tmp_path: Path, next_accuracy: Accuracies) -> None:
    """For example, the evaluation at the end of a recipe."""

    async def whole() -> None:
        async with simulated_run(tmp_path, CheckpointSettings(every_steps=1, every_minutes=0)) as (run, _):
            next_accuracy(0.1)
            await run.evaluate()
            async for _ in run.steps(6):
                await run.step()
                await run._checkpoints.settled()
            assert not os.path.lexists(tmp_path / "checkpoints" / "best"), "only version 0 was measured"
            next_accuracy(0.9)
            await run.evaluate()

    run_virtual(whole())
    best = Measurement(ACCURACY, 0.9, 6)
    manifest = best_checkpoint(tmp_path)
    assert best_result(tmp_path) == best and (manifest.version, manifest.measured) == (6, best)
    assert manifest.best == best, "a run that resumes from there has it"


def test_the_best_version_has_a_checkpoint_of_its_own(tmp_path: Path, next_accuracy: Accuracies) -> None:
    """It is saved in addition to those that are due, even while the disk still writes another one."""
    found = {3: 0.5, 5: 0.75, 7: 0.25, 12: 0.625}

    async def whole() -> None:
        async with simulated_run(tmp_path, CheckpointSettings(every_steps=4, every_minutes=0, keep=1)) as (run, _):
            async for step in run.steps(12):
                await run.step()
                if step in found:
                    next_accuracy(found[step])
                    await run.evaluate()
                    assert step != 5 or run._checkpoints.writing

    run_virtual(whole())
    assert best_result(tmp_path) == Measurement(ACCURACY, 0.75, 5)
    saved = complete(tmp_path / "checkpoints")
    assert list(saved) == [5, 12] and best_checkpoint(tmp_path).version == 5
    assert read_manifest(saved[12]).measured == Measurement(ACCURACY, 0.625, 12)


def test_an_evaluation_during_training_counts_for_the_next_checkpoint(
    tmp_path: Path, next_accuracy: Accuracies
) -> None:
    """Its tokens are of several versions, none of which can be saved any more because training continued."""
    settings = {"held_out": 40, "evaluate_every": 1, "evaluation": EvaluationSettings(share=0.02), "steps": 100}

    async def whole() -> None:
        async with simulated_run(tmp_path, CheckpointSettings(every_minutes=1e6, keep=1), **settings) as (run, _):
            run.on_best.append(worse)
            next_accuracy(0.75)
            async for step in run.steps(30):
                await run.step()
                await run.evaluate_after(step)

    async def worse(_: Measurement) -> None:
        next_accuracy(0.5)

    run_virtual(whole())
    best, manifest = best_result(tmp_path), best_checkpoint(tmp_path)
    assert manifest.measured == best and best.value == 0.75
    assert 0 < best.version <= manifest.version <= best.version + 1
    assert list(complete(tmp_path / "checkpoints")) == [manifest.version, 30]


@pytest.mark.parametrize(
    "checkpoints", [CheckpointSettings(keep_best=False, every_minutes=1e6), CheckpointSettings(every_minutes=0)]
)
def test_the_best_version_gets_no_checkpoint_unless_asked_for(
    tmp_path: Path, next_accuracy: Accuracies, checkpoints: CheckpointSettings
) -> None:
    async def whole() -> None:
        async with simulated_run(tmp_path, checkpoints) as (run, trainer):
            async for step in run.steps(4):
                await run.step()
                next_accuracy(step / 10)
                await run.evaluate()
            assert trainer.copies == (checkpoints.every_minutes > 0), "after the last step"

    run_virtual(whole())
    assert not os.path.lexists(tmp_path / "checkpoints" / "best")


def test_a_result_that_cannot_be_written_is_reported_and_costs_no_checkpoint(
    tmp_path: Path, next_accuracy: Accuracies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "measure", full)

    async def whole() -> None:
        async with simulated_run(tmp_path, CheckpointSettings(every_minutes=1e6)) as (run, _):
            async for _ in run.steps(2):
                await run.step()
            next_accuracy(0.9)
            await run.evaluate()

    with caplog.at_level(logging.WARNING):
        run_virtual(whole())
    assert (
        "the evaluation of version 2 was recorded in no checkpoint: [Errno 28] No space left on device" in caplog.text
    )
    assert list(complete(tmp_path / "checkpoints")) == [2]


@pytest.mark.parametrize("flushed", [False, True])
def test_a_result_found_while_its_checkpoint_is_written_is_recorded_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    """Before its manifest is written, and after that."""
    disk = StalledDisk(monkeypatch)

    async def ends() -> None:
        checkpoints = await one_checkpoint(tmp_path, metric=ACCURACY)
        if flushed:
            await disk.until_waiting()
        checkpoints.evaluated(Measurement(ACCURACY, 0.9, 1), best=True)
        await asyncio.sleep(0)  # tasks that start before the disk is done
        disk.resume()
        await checkpoints.settled()

    asyncio.run(ends())
    assert best_checkpoint(tmp_path).measured == best_checkpoint(tmp_path).best == Measurement(ACCURACY, 0.9, 1)
