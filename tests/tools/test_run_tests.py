"""Which failures count, and what the processes that run tests are given: a small project with all kinds of tests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.tiers import CostTable
from tools import run_tests
from tools.run_tests import Results, judged, repeatable

ROOT = Path(__file__).parents[2]

NAMES = ("quick", "core", "rest", "passed", "not_run")
QUICK, CORE, REST, PASSED, NOT_RUN = (f"tests/a/test_b.py::test_{name}" for name in NAMES)


def results(*failed: str, log: str = "assert 1 == 2") -> Results:
    tests = [QUICK, CORE, REST, PASSED]
    outcomes = {test: "failed" if test in failed else "passed" for test in tests}
    tiers = dict(zip(tests, ("quick", "core", "rest", "rest"), strict=True))
    return Results(1 if failed else 0, outcomes, dict.fromkeys(failed, log), tiers, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("log", "repeated"),
    [
        ("assert 1 == 2", {CORE, REST}),
        ("MemoryError", {QUICK, CORE, REST}),
        ("worker 'gw1' crashed", {QUICK, CORE, REST}),
    ],
)
def test_real_processes_are_repeated_and_all_others_only_where_the_machine_was_at_fault(
    log: str, repeated: set[str]
) -> None:
    assert repeatable(results(QUICK, CORE, REST, log=log)) == repeated


@pytest.mark.parametrize(
    ("again", "changed", "owed", "everything", "expected"),
    [
        ((), (), (), False, {"flaky": [CORE, REST], "failed": [QUICK]}),
        ((CORE, REST), (), (), False, {"failed": [QUICK, CORE], "owed": [REST]}),
        ((CORE, REST), ("tests/a",), (), False, {"failed": [QUICK, CORE, REST]}),
        ((CORE, REST), ("tests/a",), (REST,), False, {"failed": [QUICK, CORE], "owed": [REST]}),
        ((), (), (PASSED, NOT_RUN), False, {"flaky": [CORE, REST], "failed": [QUICK], "owed": [NOT_RUN]}),
        ((REST,), (), (REST,), True, {"flaky": [CORE], "failed": [QUICK, REST]}),
    ],
)
def test_a_failure_counts_if_it_comes_again_and_of_the_rest_if_its_package_has_changed(
    monkeypatch: pytest.MonkeyPatch,
    again: tuple[str, ...],
    changed: tuple[str, ...],
    owed: tuple[str, ...],
    everything: bool,
    expected: dict[str, list[str]],
) -> None:
    monkeypatch.setattr(run_tests, "pytest", lambda _: results(*again))
    found = judged(results(QUICK, CORE, REST), {CORE, REST}, changed, owed, everything)
    assert {name: tests for name, tests in vars(found).items() if tests} == expected


def test_what_a_repeat_did_not_come_to_run_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "pytest", lambda _: Results(-9, {}, {}, {}, {}))
    assert judged(results(CORE), {CORE}, (), (), everything=False).failed == [CORE]


def test_many_failures_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "pytest", lambda _: pytest.fail("repeated"))
    many = [f"{CORE}[{number}]" for number in range(run_tests.MOST_REPEATS + 1)]
    failed = Results(1, dict.fromkeys(many, "failed"), {}, dict.fromkeys(many, "core"), {})
    assert judged(failed, set(many), (), (), everything=False).failed == many


PROJECT = """
import pathlib, pytest
LOG = pathlib.Path({log!r})

def note(name):
    with LOG.open("a") as log:
        log.write(name + "\\n")

@pytest.mark.parametrize("case", range(3))
def test_quick(case): note("quick")

@pytest.mark.skip(reason="not here")
def test_skipped(): note("skipped")

@pytest.mark.slow
@pytest.mark.core
def test_core(): note("core")

@pytest.mark.slow
def test_rest(): note("rest"); assert False, "of the rest"
"""


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("sample", {"quick": 6, "core": 2, "rest": 2}),
        pytest.param("none", {"quick": 6, "core": 2}, marks=pytest.mark.slow),
        pytest.param("all", {"quick": 6, "core": 2, "rest": 2}, marks=pytest.mark.slow),
    ],
)
def test_two_processes_run_each_test_of_the_tiers_that_are_asked_for_once(
    tmp_path: Path, rest: str, expected: dict[str, int]
) -> None:
    log, plan = tmp_path / "log", tmp_path / "plan"
    plan.mkdir()
    for name in ("test_x.py", "test_y.py"):
        (tmp_path / name).write_text(PROJECT.format(log=str(log)))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow: long\n  core: a proof\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.plugin", "-n2", f"--plan={plan}", f"--rest={rest}", "."]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    done = patience.run(command, cwd=tmp_path, env=environment)
    lines = log.read_text().splitlines()
    assert {name: lines.count(name) for name in lines} == expected, done.stdout
    written = json.loads((plan / "outcomes.json").read_text())
    assert len(written["outcomes"]) == sum(expected.values()) + 2, done.stdout  # and what is skipped
    failed = {test.rpartition("::")[2] for test, outcome in written["outcomes"].items() if outcome == "failed"}
    assert failed == ({"test_rest"} if "rest" in expected else set())
    assert all("of the rest" in text for text in written["logs"].values())
    assert set(written["skips"].values()) == {"not here"}
    assert done.returncode == (1 if failed else 0), done.stdout
    costs = [json.loads(file.read_text()) for file in plan.glob("costs-*.json")]
    assert sorted(name for each in costs for name in each) == sorted(written["outcomes"])


def test_what_is_owed_stays_in_the_summary_until_it_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "test_all.txt"
    monkeypatch.setattr(run_tests, "SUMMARY", summary)
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    run_tests.write_owed([REST])
    assert not summary.exists()  # no full run has been committed
    verdict = run_tests.Verdict(failed=[CORE, REST])
    run_tests.write_summary(results(CORE, REST), verdict, run_tests.Clock(), ["commit: abc"])
    assert run_tests.tests_owed() == [REST]
    before = run_tests.last_full_run()
    run_tests.write_owed([PASSED, NOT_RUN])
    assert run_tests.tests_owed() == [NOT_RUN, PASSED]
    run_tests.write_owed([])
    assert run_tests.tests_owed() == []
    assert run_tests.last_full_run() | {"owed": REST} == before


def test_costs_are_written_in_the_seconds_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as fast a machine writes nothing new for what it has measured before."""
    file = tmp_path / "costs.json"
    before = CostTable.measured({CORE: run_tests.Cost(100.0)}, {CORE: "core"})
    before.write(file)
    monkeypatch.setattr(CostTable, "read", staticmethod(lambda: before))
    monkeypatch.setattr(CostTable, "write", lambda self: written.append(self))
    written: list[CostTable] = []
    measured = results()
    measured.costs = {CORE: run_tests.Cost(200.0), REST: run_tests.Cost(50.0)}
    run_tests.write_costs(measured)
    assert written[0].functions[f"{CORE}@core"].cpu_s == pytest.approx(100.0)
    assert written[0].functions[f"{REST}@rest"].cpu_s == pytest.approx(25.0)
