"""Assigns tests to the processes of pytest-xdist: by tier and committed costs, with a sample to fill the time.

Quick tests come first, so that a typo is found early. A process stays in its folder while it has work left, since tests
of a folder share fork servers and clusters, and then takes the folder with the most work. The sample begins no unit
that would end too late, and lists the units that it left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.tiers import SAMPLE_S, TOTAL_S, CostTable, Tier, Unit, sample_order, units_of


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--plan", type=Path, help="a folder for messages between processes: tiers, costs, outcomes")
    group.addoption("--rest", choices=["none", "sample", "all"], default="none", help="which tests of the rest to run")
    group.addoption("--began", type=float, default=0.0, help="time.time() when the checks began: the sample's budget")
    group.addoption("--commit-number", type=int, default=0, help="where the sample begins")
    group.addoption("--changed", default="", help="folders of tests whose sources have changed, with commas between")
    group.addoption("--owed", action="append", default=[], help="a test that the sample begins with")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--plan") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return TierScheduling(config, log) if config.getoption("--plan") else None


class TierScheduling(LoadScopeScheduling):
    """xdist's scheduler of units, with another order."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._units: dict[str, Unit] = {}
        self._unit_of: dict[str, str] = {}
        self._sample: Iterator[Unit] = iter(())
        self._folders: dict[WorkerController, str] = {}
        self._fixed_ended: float | None = None
        self._began = time.monotonic()
        self._given_s = 0.0
        """Committed seconds of all assigned units."""
        self._left_out: dict[str, float] = {}
        """Units of the sample that were not run, with their committed seconds."""

    def schedule(self) -> None:
        """Read the tiers that the processes wrote during collection, before the first unit is assigned."""
        if self.collection is None:
            plan, table = self.config.getoption("--plan"), CostTable.read()
            written = sorted(plan.glob("tiers-*.json"))
            tiers: dict[str, Tier] = json.loads(written[0].read_text()) if written else {}
            tests = [test for test in next(iter(self.registered_collections.values())) if test in tiers]
            rest = self.config.getoption("--rest")
            units = units_of(tests, tiers, table, whole=rest == "all")
            self._units = {unit.name: unit for unit in units}
            self._unit_of = {test: unit.name for unit in units for test in unit.tests}
            self._began = time.monotonic()
            sampled = [unit for unit in units if unit.tier == "rest"] if rest == "sample" else []
            number, owed = self.config.getoption("--commit-number"), self.config.getoption("--owed")
            changed = set(self.config.getoption("--changed").split(","))
            self._sample = sample_order(sampled, changed, number, owed)
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._unit_of.get(nodeid, nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Assign the next unit, or none if only the sample is left and the time is over."""
        name = self._next(node)
        if name is None:
            self._left_out |= {name: self._units[name].cost.wall_s for name in self.workqueue}
            self.workqueue.clear()
            (self.config.getoption("--plan") / "left_out.json").write_text(json.dumps(self._left_out))
            node.shutdown()
            return
        unit = self._units[name]
        with (self.config.getoption("--plan") / "given.txt").open("a") as given:
            given.writelines(f"{test}\n" for test in unit.tests)
        self._folders[node], self._given_s = unit.folder, self._given_s + unit.cost.wall_s
        self.workqueue.move_to_end(name, last=False)
        super()._assign_work_unit(node)

    def _next(self, node: WorkerController) -> str | None:
        for tier in ("quick", "core", *(["rest"] if self.config.getoption("--rest") == "all" else [])):
            waiting = [self._units[name] for name in self.workqueue if self._units[name].tier == tier]
            if waiting:
                return self._of_folder(node, waiting).name
        if self._fixed_ended is None:
            self._fixed_ended = time.monotonic()
        return self._sampled(node)

    def _of_folder(self, node: WorkerController, waiting: list[Unit]) -> Unit:
        """The most expensive unit of the folder of this process; if it has none left, of the folder with the most work,
        preferring folders without another process."""
        left: dict[str, float] = {}
        for unit in waiting:
            left[unit.folder] = left.get(unit.folder, 0.0) + unit.cost.wall_s
        taken = {folder for other, folder in self._folders.items() if other is not node}
        own = self._folders.get(node)
        folder = own if own in left else max(left, key=lambda folder: (folder not in taken, left[folder]))
        return max((unit for unit in waiting if unit.folder == folder), key=lambda unit: unit.cost.wall_s)

    def _sampled(self, node: WorkerController) -> str | None:
        """The next unit of the sample that ends in time: committed seconds, scaled by the speed of this run so far."""
        if self.config.getoption("--rest") != "sample" or self._fixed_ended is None:
            return None
        now = time.monotonic()
        by_committed = (now - self._began) * len(self.nodes) / max(self._given_s, 1.0)
        pending_s = sum(
            self._units[name].cost.wall_s
            for name, unit in self.assigned_work[node].items()
            if not all(unit.values()) and name in self._units
        )
        wall = self.config.getoption("--began")
        total_s = time.time() - wall if wall else 0.0
        left_s = min(SAMPLE_S - (now - self._fixed_ended), TOTAL_S - total_s)
        for unit in self._sample:
            # clock: how many tests of the sample run depends on the machine; none of their outcomes does
            if unit.name in self.workqueue and (pending_s + unit.cost.wall_s) * by_committed <= left_s:
                return unit.name
        return None

    def remove_node(self, node: WorkerController) -> str | None:
        """Return unfinished tests of a worker to the queue, and return the test in which it crashed, if any.

        The method of xdist would also reassign finished tests, which are never reported again, and the crashed test.
        """
        workload = self.assigned_work.pop(node)
        self._folders.pop(node, None)
        pending = [test for unit in workload.values() for test, has_run in unit.items() if not has_run]
        if not pending:
            return None
        crashed = pending[0]
        workload[self._unit_of[crashed]][crashed] = True
        self.workqueue.update({name: unit for name, unit in workload.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed


class Outcomes:
    """Writes the outcome of each test, for ``tools/run_tests.py``."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder: Path = config.getoption("--plan")
        self._outcomes: dict[str, str] = {}
        self._logs: dict[str, list[str]] = {}
        """By test, the errors of its call and its teardown."""
        self._skips: dict[str, str] = {}
        """By test, the reason."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported fails under its own name; so does a worker that finds other tests."""
        if report.failed:
            self._note_failure(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note_failure(report)
        elif report.when == "call" or report.skipped:
            self._outcomes.setdefault(report.nodeid, report.outcome)
            if isinstance(report.longrepr, tuple):  # file, line and the reason
                self._skips[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    def _note_failure(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        self._outcomes[report.nodeid] = "failed"
        self._logs.setdefault(report.nodeid, []).extend([report.longreprtext, *(text for _, text in report.sections)])
        # At once, because the logs are printed when all tests have ended.
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(f"FAILED {report.nodeid}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        logs = {test: "\n".join(texts) for test, texts in self._logs.items()}
        written = {"outcomes": self._outcomes, "logs": logs, "skips": self._skips}
        (self._folder / "outcomes.json").write_text(json.dumps(written))
