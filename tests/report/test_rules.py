"""The rules of the diagnosis on recorded runs: sick ones, each in one way, and healthy ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import diagnose
from monarch_rl.report.diagnose import as_json, as_text, evidence_of
from monarch_rl.report.read import read_run
from monarch_rl.report.rules import RULES, Evidence, SampledEpisode, findings

RECORDED = {name: (expected, evidence) for name, expected, evidence in map(diagnose.recorded, diagnose.lines())}
SICK = [name for name, (expected, _) in RECORDED.items() if expected]
HEALTHY = [name for name, (expected, _) in RECORDED.items() if not expected]
NAMES = sorted({metric for _, evidence in RECORDED.values() for metric in evidence.metrics})


def test_there_is_a_sick_run_for_each_rule_and_forty_nine_healthy_ones() -> None:
    assert sorted(expected for expected, _ in RECORDED.values() if expected) == sorted(rule.__name__ for rule in RULES)
    assert set(diagnose.commands()) == set(RECORDED) and len(HEALTHY) == 49


@pytest.mark.parametrize("name", SICK)
def test_the_sickness_is_named_first(name: str) -> None:
    expected, evidence = RECORDED[name]
    found = findings(evidence)
    assert [one.rule for one in found][:1] == [expected]
    steps = evidence.metrics[found[0].metric][0]
    assert found[0].since in steps and np.isfinite(found[0].value) and found[0].change


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_problem(name: str) -> None:
    assert [one for one in findings(RECORDED[name][1]) if one.level == "problem"] == []


@pytest.mark.parametrize("name", SICK)
def test_findings_can_be_read_and_parsed(name: str) -> None:
    found = findings(RECORDED[name][1])
    rows = json.loads(as_json(found))
    assert [row["rule"] for row in rows] == [one.rule for one in found]
    text = as_text(found)
    assert all(one.sentence in text and one.change in text for one in found)


series = st.lists(st.floats(0, 1), min_size=1, max_size=50).map(
    lambda values: (np.arange(1, len(values) + 1), np.asarray(values))
)


@settings(max_examples=50, deadline=None)
@given(
    metrics=st.dictionaries(st.sampled_from(NAMES), series, max_size=12),
    steps=series,
    given=st.dictionaries(
        st.sampled_from(["held-out", "evaluation.samples", "generator.dtype", "generator.replicas", "trainer.lr"]),
        st.one_of(st.none(), st.text(max_size=3), st.integers(-1, 100), st.lists(st.integers(), max_size=1)),
    ),
    episodes=st.lists(st.builds(SampledEpisode, st.integers(1, 50), st.floats(-1, 1), st.booleans()), max_size=20),
)
def test_rules_accept_whatever_a_run_left(
    metrics: dict[str, tuple[np.ndarray, np.ndarray]],
    steps: tuple[np.ndarray, np.ndarray],
    given: dict[str, object],
    episodes: list[SampledEpisode],
) -> None:
    metrics = {
        name: (at, values if name.endswith(("share", "weight", "clipped")) else 1000 * values - 1)
        for name, (at, values) in metrics.items()
    }
    found = findings(Evidence(metrics | {"reward/mean": steps}, given, episodes))
    assert all(0 <= one.lost <= 1 for one in found)
    assert [one.level for one in found] == sorted((one.level for one in found), reverse=True)  # problems first


def run_of(steps: int, **metrics: object) -> Evidence:
    """A run whose metrics are functions of the step, named with _ for /; every 50 steps it evaluates."""
    every, evaluated = np.arange(1, steps + 1), np.arange(0, steps + 1, 50)
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    at = {name: evaluated if name.startswith("held_out") else every for name in named}
    values = {name: np.asarray([float(value(step)) for step in at[name]]) for name, value in named.items()}  # type: ignore[operator]
    return Evidence({name: (at[name], values[name]) for name in named}, {"trainer.lr": 1e-6})


HEALTHY_METRICS = {
    "a reward that rises as held-out items do, last evaluated long before the end": run_of(
        99,
        reward__mean=lambda step: 0.2 + step / 200,
        held_out__accuracy=lambda step: 0.2 + step / 200,
        held_out__accuracy_high=lambda step: 0.22 + step / 200,
        held_out__reward=lambda step: 0.2 + step / 200,
    ),
    "rewards of 0 to 10": run_of(
        100,
        reward__mean=lambda step: 2 + step / 20,
        held_out__accuracy=lambda step: 0.2 + step / 300,
        held_out__accuracy_high=lambda step: 0.22 + step / 300,
        held_out__reward=lambda step: 1.8 + step / 20,
    ),
    "a penalty that is never due": run_of(
        50,
        reward__mean=lambda step: 0.5,
        reward__words__penalty=lambda step: 0.0,
        reward__words__right=lambda step: 0.5,
    ),
    "a learning rate that has decayed to 0": run_of(
        1000,
        reward__mean=lambda step: 0.5,
        trainer__grad_norm=lambda step: 1.0,
        trainer__lr=lambda step: 1e-6 * (1 - step / 1000),
        trainer__changed_share=lambda step: 0.02 * (1 - step / 1000),
    ),
    "many epochs without evaluations": run_of(50, reward__mean=lambda step: 0.5, data__epochs=lambda step: step),
    "rounding, in a dtype that is not known": run_of(
        50, reward__mean=lambda step: 0.5, trainer__mismatch_k3_on_policy=lambda step: 5e-4
    ),
}


@pytest.mark.parametrize("name", HEALTHY_METRICS)
def test_what_looks_like_a_problem_and_is_none(name: str) -> None:
    assert [one for one in findings(HEALTHY_METRICS[name]) if one.level == "problem"] == []


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("name", ["wrong", "cut", "few"])
def test_a_run_made_sick_anew_is_diagnosed(name: str, tmp_path: Path) -> None:
    run = diagnose.record(name, diagnose.commands()[name], tmp_path)
    expected, _ = RECORDED[name]
    assert findings(evidence_of(read_run(run)))[0].rule == expected
