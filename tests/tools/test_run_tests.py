"""Which failures count, and which tests worker processes get; uses a small project with all kinds of tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import patience
from tests.tiers import CostTable
from tools import run_tests
from tools.run_tests import Clock, Results, Verdict, judged, repeatable, report

ROOT = Path(__file__).parents[2]

NAMES = ("quick", "core", "rest", "passed", "not_run")
QUICK, CORE, REST, PASSED, NOT_RUN = (f"tests/a/test_b.py::test_{name}" for name in NAMES)


def results(*failed: str, log: str = "assert 1 == 2") -> Results:
    tests = [QUICK, CORE, REST, PASSED]
    outcomes = {test: "failed" if test in failed else "passed" for test in tests}
    tiers = dict(zip(tests, ("quick", "core", "rest", "rest"), strict=True))
    code, logs = 1 if failed else 0, dict.fromkeys(failed, log)
    return Results(code, outcomes, logs, tiers, {}, heavy={CORE, REST})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("log", "repeated"),
    [
        ("assert 1 == 2", {CORE, REST}),
        ("E   MemoryError", {QUICK, CORE, REST}),
        (">   raise MemoryError", {CORE, REST}),
        ("worker 'gw1' crashed", {QUICK, CORE, REST}),
    ],
)
def test_failures_are_repeated_if_they_are_of_real_processes_or_of_the_machine(log: str, repeated: set[str]) -> None:
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
def test_a_failure_counts_if_it_repeats_and_in_the_rest_if_its_package_has_changed(
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


def test_a_test_that_the_repeat_did_not_reach_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "pytest", lambda _: Results(-9, {}, {}, {}, {}))
    assert judged(results(CORE), {CORE}, (), (), everything=False).failed == [CORE]


def test_many_failures_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "pytest", lambda _: pytest.fail("repeated"))
    many = [f"{CORE}[{number}]" for number in range(run_tests.MOST_REPEATS + 1)]
    failed = Results(1, dict.fromkeys(many, "failed"), {}, dict.fromkeys(many, "core"), {})
    assert judged(failed, set(many), (), (), everything=False).failed == many


@pytest.mark.parametrize(
    ("code", "failed", "given", "left_out", "culprit"),
    [
        (0, (), (PASSED,), (), ""),
        (1, (CORE,), (CORE, PASSED), (), ""),
        (1, (CORE,), (NOT_RUN,), (NOT_RUN,), ""),
        (1, (), (PASSED,), (), "pytest"),
        (2, (CORE,), (CORE,), (), "2"),
        (0, (), (PASSED, f"{NOT_RUN}[a]"), (), NOT_RUN),
    ],
)
def test_results_without_some_of_the_tests_are_incomplete(
    code: int, failed: tuple[str, ...], given: tuple[str, ...], left_out: tuple[str, ...], culprit: str
) -> None:
    found = results(*failed)
    found.code, found.given, found.left_out = code, set(given), dict.fromkeys(left_out, 1.0)
    assert (culprit in found.incomplete) if culprit else (found.incomplete == "")


def test_errors_of_failed_tests_are_printed_last(capsys: pytest.CaptureFixture[str]) -> None:
    found = results(QUICK, CORE, log="def test():\nE   ZeroDivisionError: by zero\nwhat it printed")
    report(found, Verdict(failed=[QUICK, CORE]), Clock(), sampled=False)
    end = capsys.readouterr().out.partition(f"FAILED: {CORE}")[2]
    assert end.count("ZeroDivisionError: by zero") == 2


def test_a_repeat_tries_the_same_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def pytest_with(arguments: list[str]) -> Results:
        asked.extend(arguments)
        return results(CORE)

    monkeypatch.setattr(run_tests, "pytest", pytest_with)
    judged(results(CORE), {CORE}, (), (), everything=True, examples=["--hypothesis-seed=3"])
    assert "--hypothesis-seed=3" in asked


def run_project(
    folder: Path, modules: dict[str, str], *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run test modules in two processes; returns pytest's output and the outcomes in ``folder / "plan"``."""
    plan = folder / "plan"
    plan.mkdir()
    for name, text in modules.items():
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow: long\n  core: a proof\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.plugin", "-n2", f"--plan={plan}", *options, "."]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    done = patience.run(command, cwd=folder, env=environment)
    return done, json.loads((plan / "outcomes.json").read_text())


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
def test_two_processes_run_each_test_of_the_requested_tiers_once(
    tmp_path: Path, rest: str, expected: dict[str, int]
) -> None:
    log, plan = tmp_path / "log", tmp_path / "plan"
    text = PROJECT.format(log=str(log))
    done, written = run_project(tmp_path, {"test_x.py": text, "test_y.py": text}, f"--rest={rest}")
    lines = log.read_text().splitlines()
    assert {name: lines.count(name) for name in lines} == expected, done.stdout
    assert len(written["outcomes"]) == sum(expected.values()) + 2, done.stdout  # including the skipped tests
    failed = {test.rpartition("::")[2] for test, outcome in written["outcomes"].items() if outcome == "failed"}
    assert failed == ({"test_rest"} if "rest" in expected else set())
    assert all("of the rest" in text for text in written["logs"].values())
    assert set(written["skips"].values()) == {"not here"}
    assert done.returncode == (1 if failed else 0), done.stdout
    costs = [json.loads(file.read_text()) for file in plan.glob("costs-*.json")]
    assert sorted(name for each in costs for name in each) == sorted(written["outcomes"])


BROKEN = """
import os, pathlib, pytest
LOG = pathlib.Path({log!r})

@pytest.fixture
def ends_badly():
    yield
    assert False, "of the teardown"

def test_both(ends_badly): assert False, "of the call"

@pytest.mark.parametrize("case", range(4))
def test_quick(case):
    with LOG.open("a") as log: log.write("quick ")

@pytest.mark.slow
@pytest.mark.core
def test_crashes(): os._exit(1)

@pytest.mark.slow
@pytest.mark.core
def test_after_it():
    with LOG.open("a") as log: log.write("after ")
"""


def test_a_crashed_worker_and_a_module_that_cannot_be_imported_fail_and_all_others_run_once(tmp_path: Path) -> None:
    log, plan = tmp_path / "log", tmp_path / "plan"
    modules = {"test_x.py": BROKEN.format(log=str(log)), "test_y.py": "import there_is_none"}
    done, written = run_project(tmp_path, modules, "--rest=none", "--max-worker-restart=2")
    failed = {test for test, outcome in written["outcomes"].items() if outcome == "failed"}
    assert failed == {"test_x.py::test_both", "test_x.py::test_crashes", "test_y.py"}, done.stdout
    assert sorted(log.read_text().split()) == ["after", *["quick"] * 4]
    assert set((plan / "given.txt").read_text().splitlines()) <= written["outcomes"].keys()
    assert all(cause in written["logs"]["test_x.py::test_both"] for cause in ("of the call", "of the teardown"))
    assert "there_is_none" in written["logs"]["test_y.py"]


def test_an_owed_test_stays_in_the_summary_until_it_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "test_all.txt"
    monkeypatch.setattr(run_tests, "SUMMARY", summary)
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    run_tests.write_owed([REST])
    assert not summary.exists()  # no full run has been committed
    verdict = run_tests.Verdict(failed=[CORE, REST])
    run_tests.write_summary(results(CORE, REST), verdict, run_tests.Clock(), ["commit: abc"])
    assert run_tests.tests_owed() == [REST]
    before = run_tests.last_full_run()
    with_a_space = f"{NOT_RUN}[a case]"
    run_tests.write_owed([PASSED, with_a_space])
    assert run_tests.tests_owed() == [with_a_space, PASSED]
    run_tests.write_owed([])
    assert run_tests.tests_owed() == []
    assert run_tests.last_full_run() | {"owed": before["owed"]} == before


def test_costs_are_written_in_the_seconds_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of half the speed does not change costs that the table has already."""
    file = tmp_path / "costs.json"
    before = CostTable.measured({CORE: run_tests.Cost(100.0)}, {CORE: "core"})
    before.write(file)
    monkeypatch.setattr(CostTable, "read", staticmethod(lambda: before))
    monkeypatch.setattr(CostTable, "write", lambda self: written.append(self))
    written: list[CostTable] = []
    measured = results()
    measured.costs = {CORE: run_tests.Cost(200.0), REST: run_tests.Cost(50.0)}
    run_tests.write_costs(measured, everything=True)
    assert written[0].functions[f"{CORE}@core"].cpu_s == pytest.approx(100.0)
    assert written[0].functions[f"{REST}@rest"].cpu_s == pytest.approx(25.0)
