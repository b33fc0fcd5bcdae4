"""Output and plot of tools/simulate.py, and flags that override the values of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.simulate.costs import Costs, Distribution
from monarch_rl.simulate.run import Plan
from tests.simulate.test_fit import row, write
from tools import simulate

SMALL = simulate.Settings(
    devices=4,
    max_lag=2,
    steps=5,
    warm_up=1,
    plan=Plan(4, 2, buffer=BufferSettings(2)),
    costs=Costs(Distribution(20, 0.5, 80)),
)


def test_the_last_line_is_the_recommendation_and_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate.main(replace(SMALL, output=tmp_path / "plots" / "sizing.png"), None)
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert (tmp_path / "plots" / "sizing.png").read_bytes().startswith(b"\x89PNG")
    cases = {(case["max_policy_lag"], case["trainer_devices"]): case["step_s"] for case in found["cases"]}
    assert set(cases) == {(lag, devices) for lag in range(3) for devices in (1, 2, 3)}
    best = cases[found["max_policy_lag"], found["trainer_devices"]]
    assert found["step_s"] == best <= 1.05 * min(cases.values())
    assert found["trainer_devices"] + found["replicas"] == 4
    at_depth_0 = min(step_s for (lag, _), step_s in cases.items() if lag == 0)
    assert found["gain_over_depth_0"] == pytest.approx(at_depth_0 / best, rel=1e-3)
    assert sum(found["lag_share"]) == pytest.approx(1, abs=1e-3) and found["virtual_steps_per_s"] > 0
    assert len([line for line in lines if line.startswith("lag <=")]) == found["simulated_runs"] == 9


def test_a_run_is_predicted_first_and_flags_override_its_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [row(step) for step in range(1, 21)])
    flags = ["--from-run", str(tmp_path), "--steps", "4", "--warm-up", "1", "--max-lag", "1", "--plan.replicas", "5"]
    monkeypatch.setattr("sys.argv", ["simulate.py", *flags, "--output", str(tmp_path / "sizing.png")])
    settings, measured = simulate.parse()
    assert measured is not None and settings.costs == measured.costs
    assert settings.plan == replace(measured.plan, replicas=5)
    simulate.main(settings, measured)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["run"]["step_s"] == 2.0 and found["run"]["predicted_over_observed"] > 0
    assert found["simulated_runs"] == 3
