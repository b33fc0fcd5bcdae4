"""A pytest plugin: measures the cost of each test, marks heavy tests, and fails unmarked tests that are heavy.

A test is ``heavy`` if it starts an engine, a mesh or ranks of torchrun, itself or by a fixture. The marker is set
by the names in the code of the test and its fixtures (:func:`uses`); a test that starts one in a script has an explicit
marker. Until a process has run its first heavy test, a test that starts such a process fails.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from monarch_rl.runtime.scratch import folder_of_process
from tests.process_tree import ProcessTree
from tests.tiers import Cost, Tier, table, tier_of

STARTERS = (
    {"launch_cluster"},
    {"this_host"},
    {"HostProcess"},
    {"Engine", "start"},
    {"launching"},
    {"run_program"},
)
"""A function that contains all names of one set starts an engine, a mesh or ranks."""


TIER_OF: pytest.StashKey[dict[str, Tier]] = pytest.StashKey()
"""In ``config.stash``: by id, the tier of every collected test, including tests that are not selected."""
HEAVY: pytest.StashKey[list[str]] = pytest.StashKey()
"""The ids of the heavy tests among them."""
pytest_plugins = ["tests.scheduling"]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config))
    # Engines that tests start in their own process, and torchrun, leave files; tmp_path should not move.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    temporary = ExitStack()
    temporary.enter_context(folder_of_process().as_temporary_directory())
    config.add_cleanup(temporary.close)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the marker before tests are selected by it."""
    seen: dict[int, bool] = {}
    tiers: dict[str, Tier] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
            if any(uses(code, seen) for code in (item.function, *fixtures)):
                item.add_marker("heavy")
        tiers[item.nodeid] = tier_of({marker.name for marker in item.iter_markers()})
    config.stash[TIER_OF] = tiers
    config.stash[HEAVY] = [item.nodeid for item in items if item.get_closest_marker("heavy")]


class Costs:
    """Measures tests, and guards tests that are not heavy. Under xdist the worker processes do both."""

    def __init__(self, config: pytest.Config) -> None:
        self.tree = ProcessTree()
        self.by_test: dict[str, Cost] = {}
        self.guarded = True
        """No heavy test has run yet, so that this process has no shared fork servers or clusters."""
        self._config, self._path = config, list(sys.path)
        self._plan: Path | None = config.getoption("--plan")
        self._worker: str = getattr(config, "workerinput", {}).get("workerid", "alone")
        self._measures = self._worker != "alone" or not config.getoption("numprocesses", None)

    def pytest_sessionstart(self) -> None:
        if self._measures:
            self.tree.start()

    @pytest.hookimpl(tryfirst=True)  # before xdist notifies the scheduler, which reads these files
    def pytest_collection_finish(self) -> None:
        if self._plan is not None and self._measures:
            collected = {"tiers": self._config.stash[TIER_OF], "heavy": self._config.stash[HEAVY]}
            for name, content in collected.items():
                (self._plan / f"{name}-{self._worker}.json").write_text(json.dumps(content))

    def pytest_sessionfinish(self) -> None:
        if not self._measures:
            return
        self.tree.stop()
        if self._plan is not None:
            by_test = {name: [cost.cpu_s, cost.idle_s] for name, cost in self.by_test.items()}
            (self._plan / f"costs-{self._worker}.json").write_text(json.dumps(by_test))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if item.get_closest_marker("heavy"):
            self.guarded = False
        before = Cost(self.tree.cpu_s(), self.tree.idle_s())
        try:
            return (yield)
        finally:
            self.by_test[item.nodeid] = Cost(self.tree.cpu_s() - before.cpu_s, self.tree.idle_s() - before.idle_s)
            if nextitem is None or nextitem.path != item.path:
                sys.path[:] = self._path  # programs that a module runs in this process may add folders to it

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.tree.take_started()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        result = yield
        if (started := self.tree.take_started()) and self.guarded:
            pytest.fail(
                f"this test, or a fixture of it, has started {' and '.join(sorted(set(started)))}, but is not marked "
                "as heavy, so ./tools/test --quick runs it: write @pytest.mark.heavy above it, or add the function "
                "that starts the process to STARTERS in tests/plugin.py",
                pytrace=False,
            )
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._measures and self._plan is None:  # else tools/run_tests.py prints it
            for line in table(self.by_test):
                terminalreporter.write_line(line)


# -- which tests are heavy -------------------------------------------------------------------------------------------


def uses(code: Any, seen: dict[int, bool]) -> bool:
    """Whether a function or class of these tests contains the names of one of :data:`STARTERS`, or uses one that does.

    Args:
        code: any value in the namespace of a test module.
        seen: results so far, by id.
    """
    code = inspect.unwrap(code) if callable(code) and not isinstance(code, type) else code
    if id(code) not in seen:
        seen[id(code)] = False  # for circles
        seen[id(code)] = any(_starts(function, seen) for function in _functions(code))
    return seen[id(code)]


def _functions(code: Any) -> list[FunctionType]:
    """A function of these tests, or the methods of one of their classes or of the class of an object."""
    if not str(getattr(code, "__module__", "")).startswith("tests."):
        return []
    members = (
        [code] if isinstance(code, FunctionType) else vars(code if isinstance(code, type) else type(code)).values()
    )
    functions = [getattr(member, "__func__", member) for member in members]
    return [function for function in functions if isinstance(function, FunctionType)]


def _starts(function: FunctionType, seen: dict[int, bool]) -> bool:
    names = set(_names(function.__code__))
    if any(starter <= names for starter in STARTERS):
        return True
    return any(uses(function.__globals__[name], seen) for name in names if name in function.__globals__)


def _names(code: CodeType) -> Iterator[str]:
    """All names in a function and the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
