"""Which tests run when, and in which order: tiers, units of work, and the sample of what every run leaves out.

- *quick*: neither ``heavy`` nor ``slow``. ``./tools/test`` and ``--quick`` run them.
- *core*: heavy or slow, and marked ``core``: a real proof of a mechanism. ``./tools/test`` and ``--core`` run them.
- *rest*: all others. ``./tools/test --all`` has them, and every ``./tools/test`` a sample: as many as fit into
  :data:`SAMPLE_S`, those of changed packages first, otherwise the next ones of a fixed permutation.

A unit is what one process runs without a break, so that its tests share what their module has started: the quick tests
of a module, its core tests, or one function of its rest. ``tests/scheduling.py`` hands units out by committed costs.
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
"""CPU-seconds that the committed costs of a tier may add up to. More needs something removed."""
LARGEST: dict[Tier, float] = {"quick": 30.0, "core": 150.0}
"""CPU-seconds that all cases of a test function of a tier may cost, by the committed costs."""
UNKNOWN_S: dict[Tier, float] = {"quick": 2.0, "core": 40.0, "rest": 60.0}
"""CPU-seconds that a test function counts for that is not in the table yet."""

SAMPLE_S = 180.0
"""Seconds that the sample may take after everything else."""
TOTAL_S = 1380.0
"""No unit of the sample begins that would end later than this, in seconds since the checks began."""
SLICE_CPU_S = 250.0
"""How far one commit moves the beginning of the sample on, in CPU-seconds of committed costs: about what one takes."""

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
"""What the tests of a folder run besides the package of their own name; ``""`` is all of ``src``."""


EVERYTHING = ("locks/", "pyproject.toml")
"""What all tests run, besides the modules that stand in ``tests`` itself."""


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
    """What a test or several take: CPU-seconds of all their processes, and seconds in which those did nothing."""

    cpu_s: float
    idle_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.cpu_s + other.cpu_s, self.idle_s + other.idle_s)

    @property
    def wall_s(self) -> float:
        """Seconds on a core of one's own."""
        return self.cpu_s + self.idle_s


class CostTable:
    """``tests/costs.json``: the committed cost of each test function, by tier; below a second by module only."""

    def __init__(self, functions: Mapping[str, Cost], others: Mapping[tuple[str, Tier], tuple[Cost, int]]) -> None:
        """
        Args:
            functions: of a second or more; by id without parameters, and tier: ``tests/x/test_y.py::test_z@core``.
            others: by module and tier, what all others cost together, and how many tests they are.
        """
        self.functions, self.others = dict(functions), dict(others)

    @staticmethod
    def read(path: Path = COSTS) -> CostTable:
        """Read the table; an empty one where there is none."""
        if not path.exists():
            return CostTable({}, {})
        stored: dict[str, Any] = json.loads(path.read_text())
        functions, others = {}, {}
        for module, tiers in stored.items():
            for tier, entry in tiers.items():
                *cost, count = entry["others"]
                others[module, tier] = Cost(*cost), count
                for name, dear in entry.get("tests", {}).items():
                    functions[f"{module}::{name}@{tier}"] = Cost(*dear)
        return CostTable(functions, others)

    def write(self, path: Path = COSTS) -> None:
        stored: dict[str, Any] = {}
        for (module, tier), (cost, count) in sorted(self.others.items()):
            entry: dict[str, Any] = {"others": [*_rounded(cost), count]}
            dear = {
                name.partition("::")[2].removesuffix(f"@{tier}"): _rounded(cost)
                for name, cost in sorted(self.functions.items())
                if module_of(name) == module and name.endswith(f"@{tier}")
            }
            stored.setdefault(module, {})[tier] = entry | ({"tests": dear} if dear else {})
        path.write_text(json.dumps(stored, indent=1) + "\n")

    @staticmethod
    def measured(costs: Mapping[str, Cost], tiers: Mapping[str, Tier]) -> CostTable:
        """The table of what tests were measured to cost, by their ids with parameters."""
        functions: dict[str, Cost] = {}
        others: dict[tuple[str, Tier], tuple[Cost, int]] = {}
        counts: dict[str, int] = {}
        for test, cost in costs.items():
            name = f"{function_of(test)}@{tiers[test]}"
            functions[name] = functions.get(name, Cost(0.0)) + cost
            counts[name] = counts.get(name, 0) + 1
        for name, cost in list(functions.items()):
            key = module_of(name), tier_in(name)
            known, count = others.get(key, (Cost(0.0), 0))
            others[key] = known, count
            if cost.wall_s < 1.0:
                others[key] = known + functions.pop(name), count + counts[name]
        return CostTable(functions, others)

    def cost(self, test: str, tier: Tier, cases: int = 1) -> Cost:
        """What one of ``cases`` selected cases of a test function costs."""
        dear = self.functions.get(f"{function_of(test)}@{tier}")
        if dear is not None:
            return Cost(dear.cpu_s / cases, dear.idle_s / cases)
        others, count = self.others.get((module_of(test), tier), (Cost(0.0), 0))
        return Cost(others.cpu_s / count, others.idle_s / count) if count else Cost(UNKNOWN_S[tier] / cases)

    def updated(self, measured: Mapping[str, Cost], tiers: Mapping[str, Tier], everything: bool) -> CostTable:
        """With what was measured in place of what is here, and without tests that there are no more.

        Args:
            measured: costs by test, in this table's CPU-seconds.
            tiers: every test that was collected: at least all of the modules that have been measured.
            everything: all tests were collected, so that other modules are gone.
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
        """What all tests of a tier cost together."""
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
"""CPU-seconds of the table that tell how fast a machine is."""


def slowness(measured: Mapping[str, Cost], tiers: Mapping[str, Tier], table: CostTable) -> float | None:
    """How many CPU-seconds this machine needs for one of the table: the ratio of the sums of what is in both. None if
    both have less than :data:`COMPARED_S` in common."""
    expected = here = 0.0
    for name, cost in CostTable.measured(measured, tiers).functions.items():
        if name in table.functions:
            expected, here = expected + table.functions[name].cpu_s, here + cost.cpu_s
    return here / expected if expected > COMPARED_S else None


DEARER = 2.0
DEARER_S = 40.0
"""A test function costs too much if it takes this many times its committed cost and this many CPU-seconds more, after
normalising: what several tests share (a fork server: 25 CPU-seconds) counts for the one that runs first."""


def dearer(measured: Mapping[str, Cost], tiers: Mapping[str, Tier], table: CostTable) -> list[str]:
    """A sentence for each test function that costs far more than the table says; for unknown ones as well."""
    factor, found = slowness(measured, tiers, table) or 1.0, []
    for name, cost in CostTable.measured(measured, tiers).functions.items():
        committed = table.functions.get(name, Cost(UNKNOWN_S[tier_in(name)])).cpu_s
        now_s = cost.cpu_s / factor
        if now_s > DEARER * committed and now_s > committed + DEARER_S:
            found.append(f"{name.rpartition('@')[0]}: {now_s:.0f} CPU-seconds, {committed:.0f} in the table")
    return found


def over_budget(table: CostTable, tiers: Mapping[str, Tier]) -> list[str]:
    """A sentence for each way in which the committed costs break the budgets; no clock of this machine takes part.

    Args:
        table: the committed costs.
        tiers: by id, every test there is.
    """
    found = []
    for tier, budget in BUDGETS.items():
        total = table.sum(tier).cpu_s
        unknown = [test for test, other in tiers.items() if other == tier and not _known(table, test, tier)]
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


def _known(table: CostTable, test: str, tier: Tier) -> bool:
    return f"{function_of(test)}@{tier}" in table.functions or table.others.get((module_of(test), tier), (0, 0))[1] > 0


SHOWN = 10
"""Tests that are listed."""


def table(by_test: Mapping[str, Cost]) -> list[str]:
    """What is printed after tests: the dearest, and the sums of each folder."""
    if not by_test:
        return []
    dearest = sorted(by_test.items(), key=lambda entry: -entry[1].cpu_s)[:SHOWN]
    folders: dict[str, Cost] = {}
    for name, cost in by_test.items():
        for folder in (folder_of(name), "all"):
            folders[folder] = folders.get(folder, Cost(0.0)) + cost
    lines = ["", "CPU-seconds  idle seconds  the dearest tests, with the fixtures they are the first to use"]
    lines += [f"{cost.cpu_s:11.1f} {cost.idle_s:13.1f}  {name}" for name, cost in dearest]
    lines += ["", "CPU-seconds  idle seconds  folder"]
    return lines + [f"{cost.cpu_s:11.1f} {cost.idle_s:13.1f}  {name}" for name, cost in sorted(folders.items())]


# -- units -----------------------------------------------------------------------------------------------------------


@dataclass
class Unit:
    """Tests that one process runs in their order."""

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
        tests: ids, in the order of their collection.
        tiers: by id.
        table: committed costs.
        whole: a module's rest is one unit: everything is to run, and shares what the module starts.
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
    """All units of the rest in the order in which a run takes them: the same commit takes the same.

    Units with owed tests come first, then those of changed packages. Each part is a fixed permutation that begins where
    commit ``number`` is, so that runs of later commits take the next ones.

    Args:
        units: of the rest.
        changed: folders of tests whose sources have changed (:func:`changed_folders`).
        number: of the commit: how many there are before it.
        owed: tests that have failed, by their ids.
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
    """The folders of tests that run what is in these files, by their paths below the repository."""
    changed = set(files) - {"tests/costs.json"}  # no test's outcome depends on it but its own
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
