"""Run the project's checks: lint, types and contracts, then the tests by tiers (``tests/tiers.py``), in two processes.

    python tools/run_tests.py            all quick tests, an end-to-end test of each mechanism, and a sample of the rest
    python tools/run_tests.py --quick    short tests that start no engine, no mesh and no ranks
    python tools/run_tests.py --core     only the end-to-end tests of the mechanisms
    python tools/run_tests.py --all      everything; writes benchmarks/results/test_all.txt
    python tools/run_tests.py --all --costs    also writes tests/costs.json

A heavy test that fails is repeated once, alone, after all others have ended: if it then passes, it counts as flaky and
does not fail the checks. Other tests are repeated only if the machine was at fault (no memory, no disk). If more than
eight tests have failed, none is repeated. A test of the sample fails the checks only if it fails twice and its package
has changed since the last ``--all``; otherwise it is pending ("owed"): listed in the summary, and first in each later
sample until it passes. The exit code is 0 if the checks pass.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.tiers import (  # noqa: E402
    SAMPLE_S,
    TIERS,
    Cost,
    CostTable,
    Tier,
    all_folders,
    changed_folders,
    dearer,
    folder_of,
    function_of,
    slowness,
    table,
)

PYTHON = sys.executable
CHECKS: dict[str, list[str]] = {
    "ruff": [PYTHON, "-m", "ruff", "check", "."],
    "ruff format": [PYTHON, "-m", "ruff", "format", "--check", "."],
    "waits": [PYTHON, "tools/lint_waits.py"],
    "streams": [PYTHON, "tools/lint_streams.py"],
    "clocks": [PYTHON, "tools/lint_clocks.py"],
    "imports": [str(Path(PYTHON).with_name("lint-imports")), "--no-logo", "--no-cache"],
    "metrics table": [PYTHON, "tools/metrics_table.py", "--check"],
    "locks": [PYTHON, "tools/lock.py", "--check"],
}
TYPES = [PYTHON, "-m", "mypy"]
CHECK_S = 1800.0
"""Seconds for one check; only ends a hang."""
TESTS_S = 4 * 3600.0
"""Seconds for all tests; each test has its own deadline."""
END_S = 90.0
"""Seconds for an interrupted pytest to end the processes that its tests have started."""
MARK = "MONARCH_RL_CHECKS"
"""Environment variable of all descendants, by which processes that a crashed test leaves behind are found and ended."""
SUMMARY = ROOT / "benchmarks" / "results" / "test_all.txt"
MOST_REPEATS = 8
"""Maximum number of tests to repeat: if more have failed, the cause is one that repeating does not change."""
ERROR_LINES = 30
"""Number of lines of each failed test's error that are printed again at the end."""
INFRASTRUCTURE = re.compile(
    r"^(E\s.*)?(MemoryError|Cannot allocate memory|No space left on device|worker '\w+' crashed|Could not fetch|"
    r"Temporary failure in name resolution)",
    re.MULTILINE,
)
"""Log lines that show that the machine is at fault; does not match lines of source code."""


@dataclass
class Results:
    """Outcomes of one call of pytest."""

    code: int
    outcomes: dict[str, str]
    logs: dict[str, str]
    tiers: dict[str, Tier]
    costs: dict[str, Cost]
    left_out: dict[str, float] = field(default_factory=dict)
    """Test functions of the rest that are not in the sample, with their seconds in the cost table."""
    skips: dict[str, str] = field(default_factory=dict)
    """Reasons of skipped tests."""
    heavy: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    """Tests that were assigned to a worker."""

    @property
    def failed(self) -> list[str]:
        return [test for test, outcome in self.outcomes.items() if outcome == "failed"]

    @property
    def incomplete(self) -> str:
        """Why results of requested tests are missing; empty if none are."""
        if self.code not in (0, 1):  # 1: tests have failed
            return f"pytest ended with exit code {self.code}"
        if self.code == 1 and not self.failed:
            return "pytest failed, but no test did"
        # A function of the sample that a crashed worker did not finish may be left out in the end.
        missing = {test for test in self.given - self.outcomes.keys() if function_of(test) not in self.left_out}
        return f"{len(missing)} tests have not ended, such as {min(missing)}" if missing else ""


@dataclass
class Verdict:
    """Which failures count."""

    failed: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    owed: list[str] = field(default_factory=list)


@dataclass
class Clock:
    """Durations of the phases of the checks."""

    began: float = field(default_factory=time.time)
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def minutes(self) -> float:
        """Minutes since the checks began."""
        return (time.time() - self.began) / 60

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.time()
        yield
        self.phases[name] = time.time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    for name in ("quick", "core", "all"):
        which.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--costs", action="store_true", help="write the costs of the tests to tests/costs.json")
    parser.add_argument("--no-repeats", action="store_true", help="do not repeat failed tests")
    parser.add_argument("--at-a-time", type=int, default=2, help="number of test processes (default 2)")
    parser.add_argument("paths", nargs="*", help="run only tests in these files and folders, of all tiers")
    asked = parser.parse_args()
    if asked.all and asked.paths:
        parser.error("--all runs all tests: give no paths")
    if asked.costs and any("::" in path for path in asked.paths):
        parser.error("--costs writes whole modules: give files or folders, not single tests")
    if asked.costs and not (asked.all or asked.quick or asked.core or asked.paths):
        parser.error("--costs needs whole tiers or modules, not a sample: give --all, --quick, --core or paths")
    for signum in (signal.SIGINT, signal.SIGTERM):  # a signal that is ignored here would be ignored by pytest, too
        signal.signal(signum, signal.default_int_handler)
    os.environ[MARK] = uuid.uuid4().hex
    os.environ["SPT_NOENV"] = "1"  # otherwise SGLang's process titles overwrite the environment that has the mark
    clock, types = Clock(), None
    if not asked.core and not asked.paths:
        with clock.phase("lint and contracts"):
            wrong = checked()
        if wrong:
            return closed(clock, f"{', '.join(wrong)} failed; no test was run")
        types = subprocess.Popen(TYPES, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return tested(asked, clock, types)
    finally:
        if types:
            types.kill()
        sweep()


def checked() -> list[str]:
    """Run the checks other than tests; returns the names of those that failed."""
    wrong = []
    for name, command in CHECKS.items():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CHECK_S)
        if done.returncode:
            wrong.append(name)
            print(f"-- {name}\n{done.stdout}{done.stderr}", flush=True)
    return wrong


def tested(asked: argparse.Namespace, clock: Clock, types: subprocess.Popen[str] | None) -> int:
    """Run the tests, decide which failures count, and print and write the summaries; returns the exit code.

    Args:
        asked: parsed command line.
        clock: clock of the checks.
        types: mypy's process, which runs alongside the tests; None if it was not requested.
    """
    tiers = "all" if asked.all or asked.paths else "none" if asked.quick or asked.core else "sample"
    sources, changed, owed = commit_and_trees(), changed_since_summary(), tests_owed()
    examples = examples_of(asked, clock.began)
    with clock.phase("tests"):
        results = pytest([*arguments_of(asked, tiers, clock.began, changed, owed), *examples])
    wrong = [results.incomplete] if results.incomplete else []
    if types:
        with clock.phase("types (alongside the tests)"):
            output, _ = types.communicate(timeout=CHECK_S)
        if types.returncode:
            wrong.append("types")
            print(f"-- types\n{output}", flush=True)
    with clock.phase("tests that failed, once more"):
        sweep()  # so that nothing left behind by a crashed test runs alongside them
        repeats = set() if asked.no_repeats else repeatable(results)
        verdict = judged(results, repeats, changed, owed, everything=tiers == "all", examples=examples)
    report(results, verdict, clock, sampled=tiers == "sample")
    if wrong:
        print(f"no files are written, because of: {'; '.join(wrong)}")
    else:
        if asked.costs:
            write_costs(results, everything=not asked.paths)
        if asked.all:
            write_summary(results, verdict, clock, sources)
        elif tiers == "sample":
            write_owed(verdict.owed)
    return closed(clock, "; ".join(wrong), verdict, results)


def examples_of(asked: argparse.Namespace, began: float) -> list[str]:
    """pytest's options for the examples of property tests: the same for each commit, but new ones with ``--all``."""
    if not asked.all:
        return []
    print(f"property tests: --hypothesis-seed={int(began)}", flush=True)
    return ["--hypothesis-profile=random", f"--hypothesis-seed={int(began)}"]


def arguments_of(
    asked: argparse.Namespace, rest: str, began: float, changed: Collection[str], owed: Collection[str]
) -> list[str]:
    """pytest's other arguments."""
    arguments = [f"-n{asked.at_a_time}", "--max-worker-restart=2", f"--rest={rest}", f"--began={began}"]
    arguments += [f"--changed={','.join(sorted(changed))}", f"--commit-number={commits_up_to('HEAD')}"]
    arguments += [f"--owed={test}" for test in owed]
    if asked.quick or asked.core:
        arguments += ["-m", "core" if asked.core else "not heavy and not slow"]
    return [*arguments, *asked.paths]


def pytest(arguments: Sequence[str]) -> Results:
    """Run pytest in its own process group, so that a Ctrl-C reaches it only once, from here."""
    with tempfile.TemporaryDirectory() as plan:
        command = [PYTHON, "-m", "pytest", f"--plan={plan}", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, process_group=0)
        try:
            code = process.wait(TESTS_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()
        folder = Path(plan)
        stored = read(folder / "outcomes.json")
        tiers = {test: tier for file in folder.glob("tiers-*.json") for test, tier in read(file).items()}
        costs = {test: Cost(*cost) for file in folder.glob("costs-*.json") for test, cost in read(file).items()}
        outcomes, logs, skips = (stored.get(name, {}) for name in ("outcomes", "logs", "skips"))
        heavy = {test for file in folder.glob("heavy-*.json") for test in read(file)}
        given = folder / "given.txt"
        assigned = set(given.read_text().splitlines()) if given.exists() else set()
        return Results(code, outcomes, logs, tiers, costs, read(folder / "left_out.json"), skips, heavy, assigned)


def read(file: Path) -> Any:
    """Contents of a JSON file; an empty mapping if pytest did not get to write it."""
    return json.loads(file.read_text()) if file.exists() else {}


def repeatable(results: Results) -> set[str]:
    """The failed tests to repeat: those with real processes, and those for which the machine was at fault."""
    return {
        test for test in results.failed if test in results.heavy or INFRASTRUCTURE.search(results.logs.get(test, ""))
    }


def judged(
    results: Results,
    repeats: Collection[str],
    changed: Collection[str],
    owed: Collection[str],
    everything: bool,
    examples: Sequence[str] = (),
) -> Verdict:
    """Repeat the tests ``repeats`` once, alone, and decide which failures count.

    Args:
        results: results of all tests.
        repeats: failed tests to repeat.
        changed: test folders whose sources have changed.
        owed: pending tests: tests of the rest that failed earlier and have not passed since.
        everything: whether the whole rest was requested, so that its failures count like others.
        examples: pytest's options that make property tests try the same examples again.
    """
    verdict = Verdict(owed=[test for test in owed if results.outcomes.get(test) not in ("passed", "failed")])
    passed: set[str] = set()
    if len(repeats) > MOST_REPEATS:
        print(f"\n{len(repeats)} tests have failed, too many to be chance: none is repeated", flush=True)
    elif repeats:
        print(f"\n{len(repeats)} tests that failed are repeated, with nothing else running", flush=True)
        outcomes = pytest(["-p", "no:xdist", *examples, *sorted(repeats)]).outcomes
        passed = {test for test in repeats if outcomes.get(test) == "passed"}
    for test in results.failed:
        if test in passed:
            verdict.flaky.append(test)
        elif not everything and results.tiers.get(test) == "rest" and (test in owed or folder_of(test) not in changed):
            verdict.owed.append(test)
        else:
            verdict.failed.append(test)
    return verdict


# -- the commit -------------------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    """Output of git; empty if it fails or this is not a repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60.0)
    return done.stdout.strip() if done.returncode == 0 else ""


def commits_up_to(revisions: str) -> int:
    return int(git("rev-list", "--count", revisions) or 0)


def trees() -> str:
    """Hashes of the folders that tests depend on."""
    return " ".join(
        f"{folder} {git('rev-parse', '--short=12', f'HEAD:{folder}')}" for folder in ("src", "tests", "tools")
    )


def last_full_run() -> dict[str, str]:
    """The fields of the committed summary of ``--all``; empty if there is none."""
    if not SUMMARY.exists():
        return {}
    lines = SUMMARY.read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines) if value}


def tests_owed() -> list[str]:
    """Pending tests: tests of the rest that have failed and not passed since, according to the committed summary."""
    owed: list[str] = json.loads(last_full_run().get("owed", "[]"))
    return owed


def changed_since_summary() -> set[str]:
    """Test folders whose sources have changed since the last full run whose summary was committed; all folders if its
    commit is unknown."""
    commit = last_full_run().get("commit", "").split(" ")[0]
    if not commit or not git("cat-file", "-t", commit):  # a shallow clone does not have it
        return all_folders()
    new = git("ls-files", "--others", "--exclude-standard").splitlines()
    return changed_folders([*git("diff", "--name-only", commit).splitlines(), *new])


UNCOMMITTED = " with uncommitted changes"


def uncommitted() -> str:
    """Suffix of a commit's hash if the folders that tests depend on have uncommitted changes."""
    return UNCOMMITTED if git("status", "--porcelain", "src", "tests", "tools") else ""


def commit_and_trees() -> list[str]:
    """Two lines of the summary that identify the tested sources."""
    return [f"commit: {git('rev-parse', 'HEAD')}{uncommitted()}", f"trees: {trees()}"]


# -- printing and writing results -------------------------------------------------------------------------------------


def report(results: Results, verdict: Verdict, clock: Clock, sampled: bool) -> None:
    """Print the costs of the tests, the durations of the phases, which tests were left out, and which are pending."""
    print(*table(results.costs), sep="\n")
    print("\nCPU-seconds  idle seconds  tests  tier")
    for tier in TIERS:
        costs = [cost for test, cost in results.costs.items() if results.tiers.get(test) == tier]
        total = sum(costs, Cost(0.0))
        print(f"{total.cpu_s:11.1f} {total.idle_s:13.1f} {len(costs):6}  {tier}")
    committed = CostTable.read()
    if factor := slowness(results.costs, results.tiers, committed):
        print(f"This machine needs {factor:.2f} of the table's CPU-seconds.")
    for line in dearer(results.costs, results.tiers, committed):
        print(f"DEARER: {line}: make it cheaper, or run ./tools/test --all --costs and commit tests/costs.json")
    print("\n  minutes  of the checks")
    for name, seconds in clock.phases.items():
        print(f"{seconds / 60:9.1f}  {name}")
    print("\n    tests  skipped because")
    for reason, number in Counter(results.skips.values()).most_common():
        print(f"{number:9}  {reason}")
    if sampled:
        taken = [test for test in results.outcomes if results.tiers.get(test) == "rest"]
        dear = sum(1 for seconds in results.left_out.values() if seconds > SAMPLE_S)
        print("\nthe sample, which depends on the commit and on the remaining time:")
        print(*(f"    {function}" for function in dict.fromkeys(map(function_of, taken))), sep="\n")
        print(f"sample: {len(taken)} tests of the rest; {len(results.left_out)} test functions were left out")
        print(f"{dear} of these take too long for a sample: only ./tools/test --all runs them")
    print(since_full_run())
    for name, tests in (("FLAKY", verdict.flaky), ("OWED", verdict.owed), ("FAILED", verdict.failed)):
        for test in tests:
            print(f"{name}: {test}")
    for test in verdict.flaky:
        print(f"\n-- the first log of {test}\n{results.logs.get(test, '')}")
    for test in verdict.failed[:MOST_REPEATS]:  # once more at the end, because services that show logs cut the middle
        lines = results.logs.get(test, "").splitlines()
        errors = [line for line in lines if line.startswith("E  ")]
        print(f"\n-- the error of {test}", *(errors or lines)[-ERROR_LINES:], sep="\n")


def since_full_run() -> str:
    """A line on the age of the committed summary of ``--all``."""
    full = last_full_run()
    if not full:
        return "no ./tools/test --all has been committed"
    age = git("rev-list", "--count", f"{full.get('commit', '').split(' ')[0]}..HEAD") or "an unknown number of"
    changed = full.get("commit", "").endswith(UNCOMMITTED) or uncommitted()
    same = "the same sources" if full.get("trees") == trees() and not changed else "other sources"
    return f"last ./tools/test --all: {age} commits ago, {same}; failed: {full.get('failed', 'none')}"


def write_costs(results: Results, everything: bool) -> None:
    """Write the costs of the tests that passed to the table, scaled to the machine on which the table was measured.

    Args:
        results: results of all tests of the modules that were run.
        everything: whether all modules were run, so that tests that were not collected no longer exist.
    """
    before = CostTable.read()
    failed = {function_of(test) for test in results.failed}
    passed = {
        test: cost
        for test, cost in results.costs.items()
        if results.outcomes.get(test) == "passed" and function_of(test) not in failed
    }
    factor = slowness(passed, results.tiers, before)
    scaled = {test: Cost(cost.cpu_s / (factor or 1.0), cost.idle_s) for test, cost in passed.items()}
    before.updated(scaled, results.tiers, everything).write()
    how = f"divided by {factor:.2f}" if factor else "not scaled: the table has too few of these tests"
    print(f"tests/costs.json: {len(passed)} tests, {how}")


def write_owed(owed: Sequence[str]) -> None:
    """Record the pending tests in the summary, if there is one."""
    if set(owed) != set(tests_owed()) and SUMMARY.exists():
        lines = [line for line in SUMMARY.read_text().splitlines() if not line.startswith("owed:")]
        SUMMARY.write_text("\n".join([*lines, f"owed: {json.dumps(sorted(owed))}"]) + "\n")
        print(f"the list of owed tests has changed: commit {SUMMARY.relative_to(ROOT)}")


def write_summary(results: Results, verdict: Verdict, clock: Clock, sources: Sequence[str]) -> None:
    counted = Counter(results.outcomes.values())
    cpu_s = sum(cost.cpu_s for cost in results.costs.values())
    lines = [
        "What `./tools/test --all` found, and on which sources.",
        "",
        *sources,
        f"date: {time.strftime('%Y-%m-%d')}",
        f"minutes: {clock.minutes:.0f} on {os.cpu_count()} cores; {cpu_s / 60:.0f} CPU-minutes",
        f"tests: {counted['passed']} passed, {len(verdict.failed)} failed, {len(verdict.flaky)} flaky, "
        f"{counted['skipped']} skipped",
        f"failed: {' '.join(verdict.failed) or 'none'}",
        f"flaky: {' '.join(verdict.flaky) or 'none'}",
        f"owed: {json.dumps([test for test in verdict.failed if results.tiers.get(test) == 'rest'])}",
    ]
    SUMMARY.write_text("\n".join(lines) + "\n")


def closed(clock: Clock, broken: str, verdict: Verdict | None = None, results: Results | None = None) -> int:
    """Print the last lines; returns the exit code.

    Args:
        clock: clock of the checks.
        broken: failures other than of tests; empty if there are none.
        verdict: which test failures count; None if no test was run.
        results: results of the tests; None if no test was run.
    """
    verdict, counted = verdict or Verdict(), Counter(results.outcomes.values() if results else ())
    passed = counted["passed"] + len(verdict.flaky)
    print(f"\n{passed} passed, {len(verdict.failed)} failed, {counted['skipped']} skipped")
    word, why = "failed" if verdict.failed or broken else "passed", f" ({broken})" if broken else ""
    numbers = f"{len(verdict.flaky)} flaky, {len(verdict.owed)} owed"
    print(f"checks {word}{why} in {clock.minutes:.1f} minutes; {numbers}", flush=True)
    return 1 if verdict.failed or broken else 0


def sweep() -> None:
    """Kill the processes that tests have left behind, identified by this run's mark."""
    mark, own = os.environ[MARK], os.getpid()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != own and process.environ().get(MARK) == mark:
                print(f"killing a process of the tests: {process.pid} {' '.join(process.cmdline())[:200]}", flush=True)
                process.kill()


if __name__ == "__main__":
    sys.exit(main())
