"""Tiers, costs and the order of the sample: pure functions, with invariants for any set of tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugin import TIER_OF
from tests.tiers import (
    BUDGETS,
    COMPARED_S,
    DEARER_S,
    SLICE_CPU_S,
    TIERS,
    Cost,
    CostTable,
    Tier,
    Unit,
    changed_folders,
    dearer,
    function_of,
    module_of,
    over_budget,
    sample_order,
    slowness,
    tier_of,
    units_of,
)

ROOT = Path(__file__).parents[2]
TESTS = st.builds(
    lambda folder, module, test, case: f"tests/{folder}/test_{module}.py::test_{test}{case}",
    *(st.sampled_from("abc") for _ in range(3)),
    st.sampled_from(["", "[0]", "[1-x::y]"]),
)
TIERED: st.SearchStrategy[dict[str, Tier]] = st.dictionaries(TESTS, st.sampled_from(TIERS), min_size=1)
COSTS = st.builds(Cost, st.floats(0.0, 100.0), st.floats(0.0, 100.0))


@pytest.mark.parametrize(
    ("markers", "tier"),
    [((), "quick"), (("heavy",), "rest"), (("slow",), "rest"), (("heavy", "core"), "core"), (("slow", "core"), "core")],
)
def test_markers_decide_the_tier(markers: tuple[str, ...], tier: Tier) -> None:
    assert tier_of(markers) == tier


@given(TIERED, st.booleans())
def test_every_test_is_in_one_unit_with_others_of_its_module_and_tier(tiers: dict[str, Tier], whole: bool) -> None:
    units = units_of(tiers, tiers, CostTable({}, {}), whole)
    assert sorted(test for unit in units for test in unit.tests) == sorted(tiers)
    for unit in units:
        assert {tiers[test] for test in unit.tests} == {unit.tier}
        assert len({test.partition("::")[0] for test in unit.tests}) == 1


@given(st.dictionaries(TESTS, st.tuples(COSTS, st.sampled_from(["quick", "core", "rest"])), min_size=1))
def test_a_table_that_was_written_and_read_gives_back_the_sums(tests: dict[str, tuple[Cost, Tier]]) -> None:
    """Entries are rounded to a tenth of a second; the cases of a function may have different tiers."""
    costs, tiers = {test: cost for test, (cost, _) in tests.items()}, {test: tier for test, (_, tier) in tests.items()}
    table = CostTable.measured(costs, tiers)
    for tier in ("quick", "core", "rest"):
        expected = sum(cost.cpu_s for test, cost in costs.items() if tiers[test] == tier)
        assert table.sum(tier).cpu_s == pytest.approx(expected)
        by_unit = sum(unit.cost.cpu_s for unit in units_of(tests, tiers, table) if unit.tier == tier)
        assert by_unit == pytest.approx(expected)


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    costs = {"tests/a/test_b.py::test_c[0]": Cost(3.0, 1.0), "tests/a/test_b.py::test_d": Cost(0.2)}
    CostTable.measured(costs, dict.fromkeys(costs, "core")).write(tmp_path / "costs.json")
    table = CostTable.read(tmp_path / "costs.json")
    assert table.functions == {"tests/a/test_b.py::test_c@core": Cost(3.0, 1.0)}
    assert table.others == {("tests/a/test_b.py", "core"): (Cost(0.2), 1)}


def unit(name: str, cpu_s: float) -> Unit:
    return Unit(name, "rest", [name], Cost(cpu_s))


UNITS = [unit(f"tests/{folder}/test_x.py::test_{number}", 40.0) for folder in ("a", "b") for number in range(20)]


@given(
    st.sets(st.sampled_from(["tests/a", "tests/b", "tests/c"])),
    st.integers(0, 10_000),
    st.sets(st.sampled_from([unit.name for unit in UNITS]), max_size=3),
)
def test_a_sample_has_every_unit_once_owed_units_first_then_changed_packages(
    changed: set[str], number: int, owed: set[str]
) -> None:
    order = list(sample_order(UNITS, changed, number, owed))
    assert sorted(unit.name for unit in order) == sorted(unit.name for unit in UNITS)
    assert order == list(sample_order(reversed(UNITS), changed, number, owed)), "the same commit takes the same"
    assert {unit.name for unit in order[: len(owed)]} == owed
    in_changed = [unit.folder in changed for unit in order[len(owed) :]]
    assert in_changed == sorted(in_changed, reverse=True)


def test_later_commits_take_all_others_in_turn() -> None:
    """If each commit runs one slice, every unit has run after as many commits as there are slices."""
    ran: set[str] = set()
    slices = int(sum(unit.cost.cpu_s for unit in UNITS) / SLICE_CPU_S) + 1
    for number in range(slices):
        passed_s = 0.0
        for each in sample_order(UNITS, (), 7 + number):
            if passed_s >= SLICE_CPU_S:
                break
            ran.add(each.name)
            passed_s += each.cost.cpu_s
    assert ran == {unit.name for unit in UNITS}


@given(TIERED, st.data())
def test_a_table_takes_new_measurements_and_forgets_removed_tests(before: dict[str, Tier], data: st.DataObject) -> None:
    table = CostTable.measured({test: data.draw(COSTS) for test in before}, before)
    now: dict[str, Tier] = data.draw(TIERED)
    measured = {test: data.draw(COSTS) for test in now if data.draw(st.booleans())}
    everything = data.draw(st.booleans())
    found, newer = table.updated(measured, now, everything), CostTable.measured(measured, now)
    assert found.functions == found.functions | newer.functions
    assert found.others == found.others | newer.others
    modules = {module_of(test) for test in now}
    collected = {f"{function_of(test)}@{tier}" for test, tier in now.items()}
    for name in found.functions:
        assert name in collected or (not everything and module_of(name) not in modules)
    for name in table.functions.keys() - found.functions.keys():
        ran = name in {f"{function_of(test)}@{now[test]}" for test in measured}
        assert ran or (name not in collected and (everything or module_of(name) in modules))


def test_a_few_seconds_do_not_measure_the_machines_speed() -> None:
    tiers: dict[str, Tier] = {"tests/a/test_b.py::test_c": "core"}
    costs = {test: Cost(COMPARED_S / 2) for test in tiers}
    assert slowness(costs, tiers, CostTable.measured(costs, tiers)) is None


@given(st.floats(0.2, 20.0), st.data())
def test_a_slower_machine_does_not_raise_the_costs(factor: float, data: st.DataObject) -> None:
    names = [f"tests/a/test_b.py::test_{number}" for number in range(4)]
    costs = {name: Cost(data.draw(st.floats(20.0, 200.0))) for name in names}
    tier: Tier = data.draw(st.sampled_from(["quick", "core"]))
    tiers = dict.fromkeys(names, tier)
    table = CostTable.measured(costs, tiers)
    measured = {name: Cost(cost.cpu_s * factor) for name, cost in costs.items()}
    assert slowness(measured, tiers, table) == pytest.approx(factor)
    assert dearer(measured, tiers, table) == []
    grown = measured | {names[0]: Cost(measured[names[0]].cpu_s + factor * (5000.0 + DEARER_S))}
    others = sum(cost.cpu_s for cost in costs.values())
    slower = slowness(grown, tiers, table)
    assert slower is not None
    if slower * 2 * costs[names[0]].cpu_s < grown[names[0]].cpu_s and others > 300:
        assert [line.partition(":")[0] for line in dearer(grown, tiers, table)] == ["tests/a/test_b.py"]


def test_a_tier_that_costs_too_much_or_has_unknown_tests_is_named() -> None:
    name = "tests/a/test_b.py::test_c"
    known: dict[str, Tier] = {name: "core"}
    table = CostTable.measured({name: Cost(BUDGETS["core"] - 1.0)}, known)
    assert [line for line in over_budget(table, known) if line.startswith("the core tests")] == []
    more: dict[str, Tier] = {f"tests/a/test_new.py::test_{number}": "core" for number in range(2)}
    (found,) = [line for line in over_budget(table, known | more) if line.startswith("the core tests")]
    assert str(len(more)) in found
    assert any("test_c" in line for line in over_budget(table, known)), "a single test is too expensive as well"


def test_the_projects_committed_costs_are_within_their_budgets(request: pytest.FixtureRequest) -> None:
    tiers = request.config.stash[TIER_OF]
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}
    if files - {test.partition("::")[0] for test in tiers}:
        pytest.skip("not all tests were collected: ./tools/test --quick does")
    found = over_budget(CostTable.read(), tiers)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "changed", "unchanged"),
    [
        ("src/monarch_rl/buffer/core.py", {"tests/buffer", "tests/rollout", "tests/recipe"}, {"tests/weights"}),
        ("tests/weights/test_rdma.py", {"tests/weights"}, {"tests/recipe", "tests/pipeline"}),
        ("recipes/grpo.py", {"tests/recipe"}, {"tests/buffer", "tests/tools"}),
        ("tools/parity.py", {"tests/tools"}, {"tests/recipe"}),
        ("locks/cpu.txt", {"tests/buffer", "tests/recipe", "tests/weights"}, {"tests"}),
        ("tests/patience.py", {"tests/buffer", "tests/recipe", "tests/weights"}, {"tests"}),
        ("docs/buffer.md", set(), {"tests/buffer", "tests/recipe"}),
        ("tests/costs.json", set(), {"tests/buffer", "tests/recipe"}),
    ],
)
def test_a_changed_file_changes_the_tests_that_run_it(file: str, changed: set[str], unchanged: set[str]) -> None:
    found = changed_folders([file])
    assert changed <= found and not unchanged & found
