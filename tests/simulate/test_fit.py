"""Costs fitted to a run with known costs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_rl.checkpoint.folders import write_checked
from monarch_rl.errors import SettingsError
from monarch_rl.simulate.costs import Distribution, uniform
from monarch_rl.simulate.fit import group_share, line, read_run

SETTINGS = {
    "groups_per_step": 8,
    "trainer": {"ranks": 2},
    "generator": {"replicas": 3, "tp": 1, "max_running_requests": 64, "in_flight": "continue"},
    "rollout": {
        "workers": 1,
        "concurrent_groups": 16,
        "group_size": 4,
        "max_new_tokens": 50,
        "scorer_processes": 2,
    },
    "buffer": {"max_policy_lag": 1},
}


def row(step: int) -> dict[str, Any]:
    """A training step with decoding steps of 0.01 + 0.002 n seconds and an update of 0.5 + 0.001 s per token."""
    running, tokens, idle, step_s = 4.0 + step // 11 % 5, 400.0 + 50 * (step % 7), 0.25, 2.0
    busy_s = (1 - idle) * 3
    return {
        "step": step,
        "time/step_s": step_s,
        "generator/running": running,
        "generator/idle_share": idle,
        "generator/replicas": 3.0,
        "tokens_per_second": running * busy_s / (0.01 + 0.002 * running),
        "trainer/tokens": tokens,
        "trainer/step_s": 0.5 + 0.001 * tokens,
        "trainer/wait_s": step_s - (0.5 + 0.001 * tokens) - 0.01 - 5 * 0.004,
        "reward/equal_groups_share": 0.25,
        "weights/snapshot_ms": 10.0,
        "weights/transfer_ms": 200.0,
        "weights/swap_ms": 30.0,
    }


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    samples = [{"kind": "train", "group": i // 4, "tokens": 10 + i % 4} for i in range(40)]
    others = [{"kind": kind, "group": 50, "tokens": 1} for kind in ("failed", "dropped", "held_out")]
    (folder / "rollouts").mkdir(exist_ok=True)
    for number in (1, 2):
        lines = [json.dumps(one) + "\n" for one in samples[20 * number - 20 : 20 * number] + others]
        (folder / "rollouts" / f"episodes-{number:06}.jsonl").write_text("".join(lines))


def test_costs_of_a_run_are_recovered(tmp_path: Path) -> None:
    write(tmp_path, [{"step": 0, "held_out/accuracy": 0.5}, *(row(step) for step in range(1, 45))])
    made = read_run(tmp_path)
    assert (made.costs.decode.step_s, made.costs.decode.sequence_s) == pytest.approx((0.01, 0.002), rel=0.01)
    assert (made.costs.trainer.step_s, made.costs.trainer.token_s) == pytest.approx((0.5, 0.002))  # on 2 devices
    assert (made.costs.snapshot_s, made.costs.transfer_s, made.costs.commit_s) == pytest.approx((0.01, 0.2, 0.03))
    assert made.costs.call_s == pytest.approx(0.004)
    assert made.costs.length.average == 11.5 and made.costs.length.maximum == 50
    assert made.costs.length.group_share == 0.0
    assert (made.plan.replicas, made.plan.places, made.plan.buffer.max_policy_lag) == (3, 16, 1)
    assert made.step_s == 2.0


def test_a_run_with_too_few_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        read_run(tmp_path)
    write(tmp_path, [row(1)])
    with pytest.raises(ValueError, match="1 steps.* 8 "):
        read_run(tmp_path)
    old = [{name: value for name, value in row(step).items() if name != "generator/running"} for step in range(10)]
    write(tmp_path, old)
    with pytest.raises(ValueError, match="generator/running.* 8 steps"):
        read_run(tmp_path)


@pytest.mark.parametrize(("y", "expected"), [([3, 5, 7], (1, 2)), ([5, 3, 1], (3, 0)), ([0.5, 3, 5.5], (0, 23 / 14))])
def test_a_line_has_no_negative_coefficients(y: list[float], expected: tuple[float, float]) -> None:
    assert line(np.asarray([1.0, 2, 3]), np.asarray(y), "slope") == pytest.approx(expected, abs=1e-9)


def test_a_constant_x_gives_no_slope_to_fit() -> None:
    assert line(np.asarray([4.0, 4, 4]), np.asarray([8.0, 8, 8]), "slope") == (0.0, 2.0)
    assert line(np.asarray([4.0, 4.1, 4]), np.asarray([8.0, 9, 7]), "constant") == (8.0, 0.0)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_lengths_have_the_given_mean_spread_and_group_share(share: float) -> None:
    lengths = Distribution(100, 0.8, group_share=share)
    groups = {g: [lengths.draw(g, (g, e)) for e in range(8)] for g in range(1500)}
    values = np.log(np.concatenate([np.asarray(group) for group in groups.values()]))
    assert np.std(values) == pytest.approx(0.8, rel=0.06)
    assert np.mean(values) == pytest.approx(np.log(100) - 0.32, abs=0.06)
    assert group_share(groups) == pytest.approx(share, abs=0.05)


def test_samples_have_their_measured_frequencies() -> None:
    measured = Distribution(samples=(1.0, 1.0, 2.0, 50.0), maximum=20)
    sampled = [measured.draw(0, i) for i in range(8000)]
    assert {value: sampled.count(value) / 8000 for value in set(sampled)} == pytest.approx(
        {1.0: 0.5, 2.0: 0.25, 20.0: 0.25}, abs=0.03
    )


def test_uniform_numbers_are_uniform() -> None:
    counts, _ = np.histogram([uniform("x", i) for i in range(10_000)], bins=10, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # chi-squared, 9 degrees of freedom: 1 in 1,000


def test_a_damaged_line_of_a_run_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, [row(step) for step in range(1, 45)])
    whole = read_run(tmp_path)
    with (tmp_path / "rollouts" / "episodes-000002.jsonl").open("a") as file:
        file.write('{"group": 9, "tok\n')
    assert read_run(tmp_path) == whole
    assert re.search(
        r"episodes-000002\.jsonl: line 24, at byte \d+, is damaged .* 1 such lines .* other 84", caplog.text
    )


def test_a_run_of_an_earlier_version_is_fitted_to_its_rollouts_file(tmp_path: Path) -> None:
    write(tmp_path, [row(step) for step in range(1, 45)])
    whole = read_run(tmp_path)
    pieces = sorted((tmp_path / "rollouts").iterdir())
    rows = [json.loads(line) for piece in pieces for line in piece.read_text().splitlines()]
    earlier = [{"group": one["group"], "tokens": one["tokens"]} for one in rows if one["kind"] == "train"]
    for piece in pieces:
        piece.unlink()
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in earlier))
    assert read_run(tmp_path) == whole


def test_damaged_settings_of_a_run_are_named(tmp_path: Path) -> None:
    write(tmp_path, [row(step) for step in range(1, 45)])
    path = tmp_path / "settings.json"
    write_checked(path, SETTINGS)
    read_run(tmp_path)
    path.write_text(path.read_text().replace('"groups_per_step": 8', '"groups_per_step": 9'))
    with pytest.raises(SettingsError, match=f"{path} is damaged: .*crc32"):
        read_run(tmp_path)
