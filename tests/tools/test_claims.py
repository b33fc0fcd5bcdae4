"""tests/claims.md names tests that exist and says which claims only `./tools/test --all` proves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.plugin import TIER_OF
from tests.tiers import Tier, function_of

ROOT = Path(__file__).parents[2]
CLAIMS = Path("tests", "claims.md")
TEST = re.compile(r"`([\w/]+/test_\w+\.py)::(\w+)`")
FILE = re.compile(r"tests/[\w/]+\.py")
ONLY_ALL = "`--all`: "
"""How the tests of a claim begin that no quick and no core test proves."""


def claims(page: str) -> Iterator[tuple[int, str, str]]:
    """Line, claim and tests of each row of the page's tables."""
    for number, line in enumerate(page.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 2 and cells[0] != "claim":
            yield number, cells[0], cells[1]


def wrong_claims(page: str, tiers: Mapping[str, set[Tier]]) -> Iterator[str]:
    """What is wrong with the page.

    Args:
        page: the text of tests/claims.md.
        tiers: by name without parameters and ``tests/``, the tiers of a test's cases.
    """
    for line, claim, tests in claims(page):
        named = [f"{file}::{test}" for file, test in TEST.findall(tests)]
        if not named and not tests.startswith("none"):
            yield f"{line}: neither a test nor none: {claim}"
        yield from (f"{line}: there is no {test}" for test in named if test not in tiers)
        found = set().union(*(tiers.get(test, set()) for test in named))
        if named and (found == {"rest"}) != tests.startswith(ONLY_ALL):
            right = "the tests begin with" if found == {"rest"} else "there is a quick or core test, so without"
            yield f"{line}: {right} {ONLY_ALL!r}: {claim}"


PAGE = """# Claims

| claim | tests |
|---|---|
| right | `buffer/test_core.py::test_it`, `buffer/test_core.py::test_long` |
| long | `--all`: `buffer/test_core.py::test_long` |
| honest | none: a benchmark |
"""
TIERS: dict[str, set[Tier]] = {"buffer/test_core.py::test_it": {"quick"}, "buffer/test_core.py::test_long": {"rest"}}


@pytest.mark.parametrize(
    ("more", "culprits"),
    [
        ("", []),
        ("| old | `buffer/test_core.py::test_gone` |\n", ["test_gone"]),
        ("| old | `buffer/test_gone.py::test_it` |\n", ["test_gone"]),
        ("| bare | |\n", ["bare"]),
        ("| a file | `buffer/test_core.py` |\n", ["a file"]),
        ("| silent | `buffer/test_core.py::test_long` |\n", ["silent"]),
        ("| modest | `--all`: `buffer/test_core.py::test_it` |\n", ["modest"]),
    ],
)
def test_a_wrong_row_is_found(more: str, culprits: list[str]) -> None:
    found = list(wrong_claims(PAGE + more, TIERS))
    assert len(found) == len(culprits)
    assert all(line.startswith("8: ") and culprit in line for line, culprit in zip(found, culprits, strict=True))


def test_the_projects_claims_name_their_tests(request: pytest.FixtureRequest) -> None:
    tiers: dict[str, set[Tier]] = {}
    for test, tier in request.config.stash[TIER_OF].items():
        tiers.setdefault(function_of(test).removeprefix("tests/"), set()).add(tier)
    files = {str(file.relative_to(ROOT / "tests")) for file in (ROOT / "tests").rglob("test_*.py")}
    if files - {test.partition("::")[0] for test in tiers}:
        pytest.skip("not all tests were collected: ./tools/test --quick does")
    wrong = list(wrong_claims((ROOT / CLAIMS).read_text(encoding="utf-8"), tiers))
    assert not wrong, "\n".join(wrong)


def test_no_page_names_a_file_of_tests_that_does_not_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    named = {(page.name, file) for page in pages for file in FILE.findall(page.read_text(encoding="utf-8"))}
    assert not [(page, file) for page, file in named if not (ROOT / file).exists()]
