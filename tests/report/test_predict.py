"""What the simulator predicts, for the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monarch_rl.report import predict as module
from monarch_rl.report.page import make_page
from monarch_rl.report.predict import changes, write_prediction
from monarch_rl.report.read import read_run
from monarch_rl.simulate.fit import read_run as measured
from monarch_rl.simulate.run import Plan, predict
from monarch_rl.simulate.search import with_lag
from tests.report.test_page import data_of
from tests.simulate.test_fit import row, write


def test_the_page_has_what_the_simulator_says_of_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 4)
    monkeypatch.setattr(module, "WARM_UP", 1)
    write(tmp_path, [row(step) for step in range(1, 33)])
    write_prediction(tmp_path)
    made = measured(tmp_path)
    shown = data_of(make_page([read_run(tmp_path)]).html)["runs"][0]["prediction"]
    assert shown["step_s"] == made.step_s
    plans = dict(changes(made.plan))
    assert [case["change"] for case in shown["cases"]] == list(plans)
    for case in shown["cases"][::3]:
        direct = predict(plans[case["change"]], made.costs, 4, 1)
        assert (case["step_s"], case["trainer_idle_share"]) == (direct.step_s, direct.trainer_idle_share)
        assert (case["generator_idle_share"], case["lag_mean"]) == (direct.generator_idle_share, direct.lag_mean)


def test_each_change_is_one_that_a_run_accepts() -> None:
    plan = with_lag(Plan(trainer_devices=3, replicas=2, tp=2), 2)
    found = {
        change: (other.trainer_devices, other.replicas, other.buffer.max_policy_lag) for change, other in changes(plan)
    }
    assert found == {
        "none": (3, 2, 2),
        "one replica more": (3, 3, 2),
        "one trainer rank more": (4, 2, 2),
        "a replica in place of trainer ranks": (1, 3, 2),
        "trainer ranks in place of a replica": (5, 1, 2),
        "max-policy-lag 0": (3, 2, 0),
        "max-policy-lag 1": (3, 2, 1),
        "max-policy-lag 3": (3, 2, 3),
        "max-policy-lag 4": (3, 2, 4),
    }
    assert len(list(changes(with_lag(Plan(trainer_devices=1, replicas=1), 0)))) == 4


def test_a_run_that_is_too_short_is_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, [row(step) for step in range(1, 5)])
    write_prediction(tmp_path)
    found = json.loads((tmp_path / "prediction.json").read_text())
    assert "at least 8 steps are needed" in found["problem"] and "cases" not in found
