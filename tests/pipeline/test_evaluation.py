"""Evaluations between steps and during them, over simulated actors; the best result is saved."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.checkpoint.folders import Measurement
from monarch_rl.pipeline import evaluation
from monarch_rl.pipeline.evaluation import BestResult, items_to_run
from monarch_rl.pipeline.run import Run
from monarch_rl.rollout.evaluation import EvaluationSettings
from monarch_rl.simulate.costs import Costs
from monarch_rl.simulate.run import Plan, run_settings, simulated_actors
from monarch_rl.tasks.task import Task
from tests.patience import happened
from tests.pipeline.test_run import virtual

PLAN = Plan(groups_per_step=4, group_size=2, trainer_devices=1, replicas=2, buffer=BufferSettings(1))


@asynccontextmanager
async def simulated_run(evaluation: EvaluationSettings, folder: Path | None = None) -> AsyncIterator[Run]:
    settings = replace(run_settings(PLAN, 1e6), held_out=40, evaluate_every=1, steps=20, evaluation=evaluation)
    async with Run.open(settings, folder=folder) as run:
        await run.begin(simulated_actors(PLAN, Costs(), grain=8))
        yield run


@virtual
async def test_an_evaluation_between_steps_uses_one_version_and_names_it() -> None:
    async with simulated_run(EvaluationSettings()) as run:
        async for step in run.steps(3):
            await run.step()
            result = await run.evaluate()
            assert result.versions == (step, step) and f"version {step}" in str(result)


def test_steps_continue_during_an_evaluation_that_names_all_its_versions(tmp_path: Path) -> None:
    @virtual
    async def test() -> None:
        async with simulated_run(EvaluationSettings(share=0.01), tmp_path) as run:
            async for step in run.steps(12):
                await run.step()
                await run.evaluate_after(step)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        results = [line for line in lines if "held_out/accuracy" in line]
        steps = [line["step"] for line in lines if "held_out/accuracy" not in line]
        assert steps == list(range(1, 13))
        assert 1 < len(results) < 12, "evaluations do not take several steps each"
        for line in results:
            assert line["step"] - 1 <= line["held_out/oldest_version"] < line["held_out/newest_version"] <= 12
        assert lines.index(results[0]) > lines.index(next(line for line in lines if line["step"] == 2))

    test()


@virtual
async def test_an_error_of_an_evaluation_during_training_ends_the_run() -> None:
    with pytest.raises(ValueError, match="'missing'"):
        async with simulated_run(EvaluationSettings(share=0.5, sets=("missing",))) as run:
            async for step in run.steps(3):
                await run.step()
                await run.evaluate_after(step)


def test_a_best_result_that_cannot_be_written_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best_result = BestResult(["held_out/reward"], tmp_path / "run")
    for version, value in enumerate((0.5, 0.75)):
        assert best_result.note(Measurement("held_out/reward", value, version))
    best_result.close()
    assert caplog.text.count("best.json") == 1
    (tmp_path / "run").mkdir()
    best = Measurement("held_out/reward", 1.0, 3)
    assert best_result.note(best)
    best_result.close()
    assert json.loads((tmp_path / "run" / "best.json").read_text()) == asdict(best)


def test_a_stalled_disk_does_not_delay_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    write = evaluation.write_whole

    def stalled(path: Path, content: str) -> None:
        happened(disk, "the disk to resume")
        write(path, content)

    monkeypatch.setattr(evaluation, "write_whole", stalled)
    best_result = BestResult(["held_out/reward"], tmp_path)
    assert all(
        best_result.note(Measurement("held_out/reward", value, version)) for value, version in ((0.5, 1), (1.0, 2))
    )
    assert not (tmp_path / "best.json").exists()
    disk.set()
    best_result.close()
    assert json.loads((tmp_path / "best.json").read_text())["version"] == 2


def test_the_best_result_is_saved_and_reported(tmp_path: Path) -> None:
    best_result = BestResult(["held_out/reward"], tmp_path)
    found = [Measurement("held_out/reward", *result) for result in ((0.5, 1), (0.5, 2), (0.25, 3), (0.75, 4))]
    assert [best_result.note(result) for result in found] == [True, False, False, True]
    last = found[-1]
    best_result.close()
    assert json.loads((tmp_path / "best.json").read_text()) == asdict(last)
    assert BestResult(["held_out/reward"], tmp_path, last).best == last
    assert BestResult(["held_out/accuracy"], tmp_path, last).best is None
    assert not list(tmp_path.glob(".*"))

    @virtual
    async def test() -> None:
        reported: list[Measurement] = []

        async def report(best: Measurement) -> None:
            reported.append(best)

        async with simulated_run(EvaluationSettings(best="held_out/reward")) as run:
            run.on_best.append(report)
            await run.evaluate()
            assert run.best is not None and reported == [run.best] and run.best.version == 0
            await run.evaluate()
            assert len(reported) == 1

    test()


ACCURACY, REWARD = "held_out/accuracy", "held_out/reward"


def test_accuracy_decides_where_there_is_one_and_else_the_mean_reward(tmp_path: Path) -> None:
    metrics = EvaluationSettings().best_metrics
    for values, expected in (({ACCURACY: 0.5, REWARD: 0.7}, ACCURACY), ({REWARD: -0.7}, REWARD)):
        best_result = BestResult(metrics, None)
        found = best_result.measured(values, 3)
        assert found == Measurement(expected, values[expected], 3) and best_result.note(found)
        assert best_result.measured({"held_out/hard/reward": 1.0}, 4) is None, "another set decides"
        resumed = BestResult(metrics, None, found)
        assert resumed.best == found and resumed.metric == expected
        # A run that is resumed with a success_reward keeps the mean reward.
        measured = resumed.measured({ACCURACY: 0.9, REWARD: 0.9}, 5)
        assert measured == Measurement(expected, 0.9, 5) and resumed.best == found
    only_reward = BestResult(metrics, None, Measurement(ACCURACY, 0.0, 0)).measured({REWARD: -2.0}, 6)
    assert only_reward == Measurement(REWARD, -2.0, 6), "a metric that is no longer measured would decide for ever"


@virtual
async def test_the_first_named_set_decides_which_version_is_best() -> None:
    async with simulated_run(EvaluationSettings(sets=("held_out",))) as run:
        await run.evaluate()
        assert run.best is not None and run.best.metric == "held_out/held_out/accuracy"


def test_an_unknown_best_metric_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    @virtual
    async def test() -> None:
        async with simulated_run(EvaluationSettings(best="held_out/sums/accuracy")) as run:
            await run.evaluate("held_out")
            assert not caplog.messages, "a single set may lack the metric"
            for _ in range(2):
                await run.evaluate()

    with caplog.at_level("WARNING", "monarch_rl"):
        test()
    (message,) = caplog.messages
    assert "held_out/sums/accuracy" in message and "held_out/reward" in message


def test_an_empty_held_out_set_is_refused_by_name() -> None:
    async def episode(item: object, policy: object) -> float:
        return 1.0

    task = Task(int, episode, {"test": [], "hard": [1, 2]}, name="sums")
    for held_out in ("", "test"):
        with pytest.raises(ValueError, match="'test' of task sums"):
            items_to_run(task, held_out, 5)
    assert items_to_run(task, "hard", 5) == 2
