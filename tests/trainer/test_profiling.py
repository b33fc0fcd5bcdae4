"""Profiler traces of chosen steps."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_rl.trainer.profiling import StepProfiler


def run_steps(profiler: StepProfiler, steps: range) -> None:
    weight = torch.ones(4, 3)
    for step in steps:
        with profiler.step(step):
            weight @ torch.full((3, 2), float(step))
        torch.sin(weight)  # between steps


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def inside(event: dict[str, Any], step: dict[str, Any]) -> bool:
    return step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"]


def test_the_chosen_steps_are_in_the_trace_with_their_operators(tmp_path: Path) -> None:
    run_steps(StepProfiler(2, 4, tmp_path / "traces", 1, torch.device("cpu")), range(1, 6))
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["rank1.json.gz"]
    found = events(tmp_path / "traces" / "rank1.json.gz")
    steps = [event for event in found if event.get("name", "").startswith("step ")]
    assert sorted(event["name"] for event in steps) == ["step 2", "step 3", "step 4"]
    products = [event for event in found if event.get("name") == "aten::mm"]
    assert [sum(inside(event, step) for event in products) for step in steps] == [1, 1, 1] and len(products) == 3
    assert products[0]["args"]["Input Dims"] == [[4, 3], [3, 2]]


def test_a_resumed_run_profiles_the_remaining_steps(tmp_path: Path) -> None:
    run_steps(StepProfiler(2, 4, tmp_path, 0, torch.device("cpu")), range(3, 5))
    names = {event.get("name") for event in events(tmp_path / "rank0.json.gz")}
    assert {"step 3", "step 4"} <= names and "step 2" not in names


def test_a_trace_that_cannot_be_written_is_named_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "traces").write_text("a file where the folder should be")
    with caplog.at_level(logging.ERROR, "monarch_rl"):
        run_steps(StepProfiler(1, 1, tmp_path / "traces", 0, torch.device("cpu")), range(1, 4))
    assert [str(tmp_path / "traces" / "rank0.json.gz") in record.getMessage() for record in caplog.records] == [True]
