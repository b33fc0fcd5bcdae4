"""benchmarks/algorithms.py: it runs everything that has a name, and summarises finished runs."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.algorithms.objectives import Correction, Objective, PPOClip
from monarch_rl.settings.cli import cli
from monarch_rl.trainer.loss_settings import LossSettings, check_objective

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def imported(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))  # the benchmark imports its own modules
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def cases() -> Any:
    return imported("algorithms_cases")


@pytest.fixture(scope="module")
def algorithms() -> Any:
    return imported("algorithms")


def test_every_registered_name_is_run_or_listed_as_needing_more(cases: Any) -> None:
    run = {word for case in cases.plan((0, 1, 2, 3, 4)) for word in case.flags}
    assert not {*ADVANTAGES, *Objective.names(), *Correction.names()} - run - set(cases.NEEDS_MORE)


@dataclass(frozen=True)
class Loss:
    """Settings in which the cases differ."""

    objective: Objective = field(default_factory=PPOClip)
    loss: LossSettings = field(default_factory=LossSettings)


def test_the_flags_of_every_case_are_settings(cases: Any) -> None:
    """Otherwise a loss might refuse them after hours of other runs."""
    prefix = "--trainer.loss."
    for flags in cases.FLAGS.values():
        words, is_loss = list[str](), False
        for word in flags:
            is_loss = word.startswith((prefix, "--objective")) if word.startswith("--") else is_loss
            words += [word.replace(prefix, "--loss.")] if is_loss else []
        found = cli(Loss, args=words)
        check_objective(found.objective, found.loss)
        assert found.objective.name in flags or "--objective" not in flags


def row(step: int, **values: float) -> dict[str, Any]:
    names = ("trainer/entropy", "trainer/mismatch_k3_all", "trainer/clipped", "trainer/grad_norm", "lag/mean")
    return {"step": step, "reward/mean": 0.5, "trainer/tokens": 90.0} | dict.fromkeys(names, 0.25) | values


def finished(algorithms: Any, cases: Any, name: str, lag: int, seed: int, end: float) -> dict[str, Any]:
    """A line of the results file."""
    rows = [{"step": 0, "held_out/accuracy": 0.2}, *(row(step) for step in range(1, 11))]
    rows += [{"step": 10, "held_out/accuracy": end}]
    rows[-2]["wasted/tokens"] = 100.0
    case = cases.Case(name, lag, seed)
    arguments = algorithms.arguments_of(case, 10)
    return {"name": name, "lag": lag, "seed": seed, "steps": 10, "arguments": arguments} | algorithms.summarise(rows)


def test_finished_runs_are_shown_and_missing_runs_are_listed(
    algorithms: Any, cases: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = [("dapo", 0, 0, 0.8), ("dapo", 0, 1, 0.6), ("dapo", 8, 0, 0.5), ("dapo", 8, 1, 0.4), ("rows", 2, 0, 0.3)]
    ends[4:4] = [("decoupled", 8, 0, 0.3), ("decoupled, opsm", 8, 0, 0.6), ("cispo", 0, 0, 0.7), ("cispo", 0, 1, 0.7)]
    lines = [finished(algorithms, cases, *end) for end in ends[:-1]]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    algorithms.main(algorithms.Settings(show=True, results=results, steps=10, seeds=(0, 1)))
    output = capsys.readouterr().out
    assert "| dapo | 0 | 2 | 20.0% | 70.0% | 0.0% to 100.0% | 0.25 to 0.25 |" in output
    assert "dapo: lag 8 ends -25.0% beside lag 0 (95 %: -88.5% to +38.5%; 2 seeds)." in output
    assert "decoupled, opsm: lag 8 ends +30.0% beside decoupled at lag 8, of one seed." in output
    assert "runs of one seed lie up to 10.0% apart (standard deviation 7.1%, of 2 x 2 runs)" in output
    assert "10.0%" in output  # 100 tokens of 1000 are wasted
    assert (
        "gspo (lag 8, seed 1)" in output
        and "decoupled, opsm (lag 8, seed 1)" in output
        and "decoupled, opsm (lag 2" not in output
        and "dapo (lag 8, seed 1)" not in output
        and "advantage gae (lag 2, seed 0)" in output
    )
    assert json.loads(output.splitlines()[-1])["runs"] == 8


def test_the_interval_is_students(algorithms: Any) -> None:
    low, high = imported("algorithms_table").interval([0.1, 0.2, 0.3])
    half = 4.303 * 0.1 / math.sqrt(3)
    assert (low, high) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))
