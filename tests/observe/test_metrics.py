from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monarch_rl.observe import disk_thread
from monarch_rl.observe.metrics import Metrics
from monarch_rl.observe.trackers import TrackedRun, Trackers, make_trackers
from tests.patience import result_of

NAMES = ("reward/mean", "trainer/loss", "trainer/my_own", "lag/max")


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A working disk is waited for, however long the machine stalls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_thread, "ANSWER_S", 600.0)
        yield


def test_both_files_have_the_same_numbers(tmp_path: Path) -> None:
    reason = "dropped/episode score took over 1 s"
    folder = tmp_path / "new"
    boards = Trackers(make_trackers(["tensorboard"]), {}, TrackedRun("new", folder, 0))
    with Metrics(folder) as metrics, boards:
        for file in (metrics, boards):
            file.log(1, {"reward/mean": 0.5, "lag/max": 2})
            file.log(2, {"reward/mean": 0.75, reason: 3.0})
    lines = [json.loads(line) for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()]
    assert all(line.pop("seconds") >= 0 for line in lines)
    assert lines == [
        {"step": 1, "reward/mean": 0.5, "lag/max": 2.0},
        {"step": 2, "reward/mean": 0.75, reason: 3.0},
    ]
    board = EventAccumulator(str(tmp_path / "new" / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("1_learning/reward/mean")] == [(1, 0.5), (2, 0.75)]
    assert len(board.Tags()["scalars"]) == 3


def test_non_finite_numbers_are_null(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        metrics.log(0, dict(zip(NAMES, (math.nan, math.inf, -math.inf, 1), strict=True)))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    read = json.loads(line, parse_constant=lambda name: pytest_fail(name))
    assert [read[name] for name in NAMES] == [None, None, None, 1.0]


def pytest_fail(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_lines_are_written_immediately_and_a_second_run_appends(tmp_path: Path) -> None:
    first = Metrics(tmp_path)
    first.log(1, {"lag/mean": 1.0})
    assert result_of(first.position()) == (tmp_path / "metrics.jsonl").stat().st_size
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    first.close()
    with Metrics(tmp_path) as second:
        second.log(2, {"lag/mean": 2.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_name_that_is_not_in_the_registry_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        with pytest.raises(ValueError, match="reward_mean, speed;"):
            metrics.log(1, {"reward/mean": 0.5, "reward_mean": 0.5, "speed": 1.0})
        metrics.log(1, {"trainer/my_own": 1.0})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["trainer/my_own"] == 1.0
