"""Selection and order of tests: tiers, units of work, and the sample of tests that short runs leave out.

- *quick*: neither ``heavy`` nor ``slow``. ``./tools/test`` and ``--quick`` run them.
- *core*: heavy or slow, and marked ``core``: a real proof of a mechanism. ``./tools/test`` and ``--core`` run them.
- *rest*: all others. ``./tools/test --all`` runs them, and every ``./tools/test`` a sample: as many as fit into
  :data:`SAMPLE_S`, tests of changed packages first, then the next ones of a fixed permutation.

A unit is a set of tests that one process runs in sequence, so that they share fixtures of their module: the quick tests
of a module, its core tests, or one function of its rest. ``tests/scheduling.py`` assigns units by committed costs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Tier = Literal["quick", "core", "rest"]
TIERS: tuple[Tier, ...] = ("quick", "core", "rest")

COSTS = Path(__file__).with_name("costs.json")
BUDGETS: dict[Tier, float] = {"quick": 700.0, "core": 1300.0}
"""Maximum sum of the committed costs of a tier, in CPU-seconds."""
LARGEST: dict[Tier, float] = {"quick": 30.0, "core": 150.0}
"""Maximum committed cost of all cases of a test function, in CPU-seconds."""
UNKNOWN_S: dict[Tier, float] = {"quick": 2.0, "core": 40.0, "rest": 60.0}
"""Assumed CPU-seconds of a test function that is not in the table yet."""

SAMPLE_S = 180.0
"""Seconds that the sample may take after everything else."""
TOTAL_S = 1380.0
"""No unit of the sample begins that would end later than this, in seconds since the checks began."""
SLICE_CPU_S = 250.0
"""How far each commit advances the start of the sample, in CPU-seconds of committed costs: about one sample."""

SOURCES: dict[str, tuple[str, ...]] = {
    "recipe": ("", "recipes"),
    "pipeline": ("", "recipes"),
    "offline": ("", "recipes"),
    "watch": ("runtime",),
    "tools": ("", "tools"),
    "rollout": ("episode", "tasks", "buffer", "model", "runtime"),
    "generator": ("model", "weights", "runtime"),
    "trainer": ("algorithms", "model", "checkpoint", "weights"),
    "weights": ("runtime",),
    "buffer": ("runtime", "episode"),
}
"""Sources that the tests of a folder use besides the package of the same name; ``""`` is all of ``src``."""


EVERYTHING = ("locks/", "pyproject.toml")
"""Sources of all tests, besides the modules directly in ``tests``."""


def all_folders() -> set[str]:
    """The folders of all tests."""
    return {f"tests/{folder.name}" for folder in COSTS.parent.iterdir() if folder.is_dir()}


def tier_of(markers: Collection[str]) -> Tier:
    """The tier of a test with these markers."""
    if not {"heavy", "slow"} & set(markers):
        return "quick"
    return "core" if "core" in markers else "rest"


def module_of(test: str) -> str:
    """The file of a test, by its pytest id."""
    return test.partition("::")[0]


def function_of(test: str) -> str:
    """The id of a test without its parameters."""
    return test.partition("[")[0]


def folder_of(test: str) -> str:
    """``tests/trainer`` of ``tests/trainer/test_moe.py::test_it``."""
    return "/".join(module_of(test).split("/")[:2])


# -- costs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Cost of one or more tests: CPU-seconds of all their processes, and seconds in which these were idle."""

    cpu_s: float
    idle_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu_s + other.cpu_s, self.idle_s + other.idle_s)

    @property
    def wall_s(self) -> float:
        """Seconds on a dedicated core."""
        return self.cpu_s + self.idle_s


class CostTable:
    """``tests/costs.json``: the committed cost of each test function, by tier; below one second only by module."""

    def __init__(self, functions: Mapping[str, Cost], others: Mapping[tuple[str, Tier], tuple[Cost, int]]) -> None:
        """
        Args:
            functions: cost of functions of at least a second, by id without parameters and tier:
                ``tests/x/test_y.py::test_z@core``.
            others: by module and tier, the total cost of all other tests, and their number.
        """
        self.functions, self.others = dict(functions), dict(others)

    @staticmethod
    def read(path: Path = COSTS) -> CostTable:
        """Read the table; an empty one if the file does not exist."""
        if not path.exists():
            return CostTable({}, {})
        stored: dict[str, Any] = json.loads(path.read_text())
        functions, others = {}, {}
        for module, tiers in stored.items():
            for tier, entry in tiers.items():
                *cost, count = entry["others"]
                others[module, tier] = Cost(*cost), count
                for name, large in entry.get("tests", {}).items():
                    functions[f"{module}::{name}@{tier}"] = Cost(*large)
        return CostTable(functions, others)

    def write(self, path: Path = COSTS) -> None:
        stored: dict[str, Any] = {}
        for (module, tier), (cost, count) in sorted(self.others.items()):
            entry: dict[str, Any] = {"others": [*_rounded(cost), count]}
            large = {
                name.partition("::")[2].removesuffix(f"@{tier}"): _rounded(cost)
                for name, cost in sorted(self.functions.items())
                if module_of(name) == module and name.endswith(f"@{tier}")
            }
            stored.setdefault(module, {})[tier] = entry | ({"tests": large} if large else {})
        path.write_text(json.dumps(stored, indent=1) + "\n")

    @staticmethod
    def measured(costs: Mapping[str, Cost], tiers: Mapping[str, Tier]) -> CostTable:
        """The table of measured costs, which are given by test id with parameters."""
        functions: dict[str, Cost] = {}
        others: dict[tuple[str, Tier], tuple[Cost, int]] = {}
        counts: dict[str, int] = {}
        for test, cost in costs.items():
            name = f"{function_of(test)}@{tiers[test]}"
            functions[name] = functions.get(name, Cost(0.0)) + cost
            counts[name] = counts.get(name, 0) + 1
        for name, cost in list(functions.items()):
            key = module_of(name), tier_in(name)
            total, count = others.get(key, (Cost(0.0), 0))
            others[key] = total, count
            if cost.wall_s < 1.0:
                others[key] = total + functions.pop(name), count + counts[name]
        return CostTable(functions, others)

    def cost(self, test: str, tier: Tier, cases: int = 1) -> Cost:
        """The cost of one of ``cases`` selected cases of a test function."""
        total = self.functions.get(f"{function_of(test)}@{tier}")
        if total is not None:
            return Cost(total.cpu_s / cases, total.idle_s / cases)
        others, count = self.others.get((module_of(test), tier), (Cost(0.0), 0))
        return Cost(others.cpu_s / count, others.idle_s / count) if count else Cost(UNKNOWN_S[tier] / cases)

    def updated(self, measured: Mapping[str, Cost], tiers: Mapping[str, Tier], everything: bool) -> CostTable:
        """The table with measured costs, and without tests that no longer exist.

        Args:
            measured: costs by test, in CPU-seconds of this table.
            tiers: every collected test: at least all tests of measured modules.
            everything: all tests were collected, so that missing modules no longer exist.
        """
        newer = CostTable.measured(measured, tiers)
        modules = {module_of(test) for test in tiers}
        collected = {f"{function_of(test)}@{tier}" for test, tier in tiers.items()}
        ran = {f"{function_of(test)}@{tiers[test]}" for test in measured}
        places = {(module_of(test), tier) for test, tier in tiers.items()}

        def stays(module: str, is_collected: bool) -> bool:
            return is_collected or not (everything or module in modules)

        functions = {
            name: cost
            for name, cost in self.functions.items()
            if name not in ran and stays(module_of(name), name in collected)
        }
        others = {key: entry for key, entry in self.others.items() if stays(key[0], key in places)}
        return CostTable(functions | newer.functions, others | newer.others)

    def sum(self, tier: Tier) -> Cost:
        """The total cost of all tests of a tier."""
        total = Cost(0.0)
        for name, cost in self.functions.items():
            total += cost if name.endswith(f"@{tier}") else Cost(0.0)
        for (_, other), (cost, _) in self.others.items():
            total += cost if other == tier else Cost(0.0)
        return total


def tier_in(name: str) -> Tier:
    """The tier in a name of :attr:`CostTable.functions`."""
    tier = name.rpartition("@")[2]
    assert tier in TIERS, name
    return tier


def _rounded(cost: Cost) -> list[float]:
    return [round(cost.cpu_s, 1), round(cost.idle_s, 1)]


COMPARED_S = 60.0
"""Minimum CPU-seconds of common tests to measure the speed of a machine."""


def slowness(measured: Mapping[str, Cost], tiers: Mapping[str, Tier], table: CostTable) -> float | None:
    """CPU-seconds of this machine per CPU-second of the table: the ratio of the sums over common tests. None if these
    have less than :data:`COMPARED_S`."""
    expected = here = 0.0
    for name, cost in CostTable.measured(measured, tiers).functions.items():
        if name in table.functions:
            expected, here = expected + table.functions[name].cpu_s, here + cost.cpu_s
    return here / expected if expected > COMPARED_S else None


DEARER = 2.0
DEARER_S = 40.0
"""A test function costs too much if it takes this many times its committed cost and this many CPU-seconds more, after
normalising: shared fixtures (a fork server: 25 CPU-seconds) count for the first test that uses them."""


def dearer(measured: Mapping[str, Cost], tiers: Mapping[str, Tier], table: CostTable) -> list[str]:
    """A message for each test function that costs far more than in the table, or than the assumed cost of new ones."""
    factor, found = slowness(measured, tiers, table) or 1.0, []
    for name, cost in CostTable.measured(measured, tiers).functions.items():
        committed = table.functions.get(name, Cost(UNKNOWN_S[tier_in(name)])).cpu_s
        now_s = cost.cpu_s / factor
        if now_s > DEARER * committed and now_s > committed + DEARER_S:
            found.append(f"{name.rpartition('@')[0]}: {now_s:.0f} CPU-seconds, {committed:.0f} in the table")
    return found


def over_budget(table: CostTable, tiers: Mapping[str, Tier]) -> list[str]:
    """A message for each budget that the committed costs exceed; independent of the clock of this machine.

    Args:
        table: the committed costs.
        tiers: tiers of all tests, by id.
    """
    found = []
    for tier, budget in BUDGETS.items():
        total = table.sum(tier).cpu_s
        unknown = [test for test, other in tiers.items() if other == tier and not _in_table(table, test, tier)]
        total += UNKNOWN_S[tier] * len(unknown)
        if total > budget:
            why = f", {UNKNOWN_S[tier]:g} for each of {len(unknown)} that are not in the table" if unknown else ""
            found.append(f"the {tier} tests cost {total:.0f} CPU-seconds, of a budget of {budget:g}{why}")
        for name, cost in table.functions.items():
            if name.endswith(f"@{tier}") and cost.cpu_s > LARGEST[tier]:
                found.append(
                    f"{name.rpartition('@')[0]} costs {cost.cpu_s:.0f} CPU-seconds; a {tier} test may cost "
                    f"{LARGEST[tier]:g}"
                )
    return found


def _in_table(table: CostTable, test: str, tier: Tier) -> bool:
    return f"{function_of(test)}@{tier}" in table.functions or table.others.get((module_of(test), tier), (0, 0))[1] > 0


SHOWN = 10
"""Number of listed tests."""


def table(by_test: Mapping[str, Cost]) -> list[str]:
    """Lines printed after tests: the most expensive tests, and the sums per folder."""
    if not by_test:
        return []
    largest = sorted(by_test.items(), key=lambda entry: -entry[1].cpu_s)[:SHOWN]
    folders: dict[str, Cost] = {}
    for name, cost in by_test.items():
        for folder in (folder_of(name), "all"):
            folders[folder] = folders.get(folder, Cost(0.0)) + cost
    lines = ["", "CPU-seconds  idle seconds  the most expensive tests, with fixtures that they use first"]
    lines += [f"{cost.cpu_s:11.1f} {cost.idle_s:13.1f}  {name}" for name, cost in largest]
    lines += ["", "CPU-seconds  idle seconds  folder"]
    return lines + [f"{cost.cpu_s:11.1f} {cost.idle_s:13.1f}  {name}" for name, cost in sorted(folders.items())]


# -- units -----------------------------------------------------------------------------------------------------------


@dataclass
class Unit:
    """Tests that one process runs in order."""

    name: str
    tier: Tier
    tests: list[str]
    cost: Cost

    @property
    def folder(self) -> str:
        return folder_of(self.name)


def units_of(tests: Iterable[str], tiers: Mapping[str, Tier], table: CostTable, whole: bool = False) -> list[Unit]:
    """The units of these tests.

    Args:
        tests: ids, in collection order.
        tiers: tiers by id.
        table: committed costs.
        whole: the rest of a module is one unit, because all of it runs, and shares its fixtures.
    """
    by_name: dict[str, Unit] = {}
    listed = list(tests)
    cases: dict[tuple[str, Tier], int] = {}
    for test in listed:
        key = function_of(test), tiers[test]
        cases[key] = cases.get(key, 0) + 1
    for test in listed:
        tier = tiers[test]
        name = function_of(test) if tier == "rest" and not whole else f"{module_of(test)}@{tier}"
        unit = by_name.setdefault(name, Unit(name, tier, [], Cost(0.0)))
        unit.tests.append(test)
        unit.cost += table.cost(test, tier, cases[function_of(test), tier])
    return list(by_name.values())


def sample_order(
    units: Iterable[Unit], changed: Collection[str], number: int, owed: Collection[str] = ()
) -> Iterator[Unit]:
    """All units of the rest in the order of the sample, which is deterministic for a commit.

    Units with owed tests come first, then units of changed packages. Each part is a fixed permutation that starts at a
    position given by commit ``number``, so that later commits run the next units.

    Args:
        units: units of the rest.
        changed: folders of tests whose sources have changed (:func:`changed_folders`).
        number: number of commits before this one.
        owed: ids of tests that have failed.
    """
    parts: tuple[list[Unit], ...] = ([], [], [])
    for unit in sorted(units, key=lambda unit: hashlib.sha256(unit.name.encode()).digest()):
        parts[0 if set(owed) & set(unit.tests) else 1 if unit.folder in changed else 2].append(unit)
    for part in parts:
        total = sum(unit.cost.cpu_s for unit in part)
        begins = (number * SLICE_CPU_S) % total if total else 0.0
        first, passed = 0, 0.0
        while first < len(part) and passed + part[first].cost.cpu_s <= begins:
            passed += part[first].cost.cpu_s
            first += 1
        yield from part[first:] + part[:first]


def changed_folders(files: Iterable[str]) -> set[str]:
    """The folders of tests that use these files, given by path in the repository."""
    changed = set(files) - {"tests/costs.json"}  # only its own test depends on it
    if any(path.startswith(EVERYTHING) or (path.startswith("tests/") and path.count("/") == 1) for path in changed):
        return all_folders()
    packages = {path.split("/")[2].removesuffix(".py") for path in changed if path.startswith("src/monarch_rl/")}
    others = {path.split("/")[0] for path in changed if not path.startswith(("src/", "tests/"))}
    if any(path.startswith("src/") for path in changed):
        others.add("")
    found = {folder_of(path) for path in changed if path.startswith("tests/") and path.count("/") > 1}
    found |= {f"tests/{package}" for package in packages}
    found |= {f"tests/{folder}" for folder, sources in SOURCES.items() if {*packages, *others} & set(sources)}
    return found
