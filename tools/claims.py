"""Check that docs/claims.md names tests that exist, and that no page names a file of tests that does not.

    python tools/claims.py

Prints how many claims there are, and those without a test. The exit code is 1 if a name is wrong.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLAIMS = Path("docs", "claims.md")
TEST = re.compile(r"`([\w/]+/test_\w+\.py)::(\w+)`")
FILE = re.compile(r"tests/[\w/]+\.py")


def main(root: Path = ROOT) -> int:
    rows = list(claims(root / CLAIMS))
    wrong = [*wrong_tests(root, rows), *wrong_files(root)]
    for problem in wrong:
        print(problem)
    untested = [(line, claim) for line, claim, tests in rows if tests.startswith("none")]
    for line, claim in untested:
        print(f"{CLAIMS}:{line}: no test: {claim}")
    print(f"{len(rows)} claims, {len(untested)} of them without a test; {len(wrong)} wrong names")
    return 1 if wrong else 0


def claims(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, claim and tests of each row of the page's tables."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 2 and cells[0] != "claim":
            yield number, cells[0], cells[1]


def wrong_tests(root: Path, rows: list[tuple[int, str, str]]) -> Iterator[str]:
    for line, claim, tests in rows:
        named = TEST.findall(tests)
        if not named and not tests.startswith("none"):
            yield f"{CLAIMS}:{line}: neither a test nor none: {claim}"
        for file, test in named:
            if test not in tests_of(root / "tests" / file):
                yield f"{CLAIMS}:{line}: there is no {test} in tests/{file}"


def tests_of(file: Path) -> set[str]:
    """The names of all functions in a file; none if there is no such file."""
    if not file.exists():
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def wrong_files(root: Path) -> Iterator[str]:
    for page in [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]:
        for file in FILE.findall(page.read_text(encoding="utf-8")):
            if not (root / file).exists():
                yield f"{page.relative_to(root)}: there is no {file}"


if __name__ == "__main__":
    sys.exit(main())
