"""Finds files, classes and functions that are too long to be read at once, in src/ and recipes/: run by ./tools/test.

    python tools/lint_sizes.py [FILE OR FOLDER ...]

A file may have 400 lines, a class 220, a function 55. A longer one says why in a comment: a file at its top, a class or
a function in the line above it: ``# size: one state machine; half of it would make no sense``. A recipe may have 110.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from linting import Finding, read, report

FILE, RECIPE, CLASS, FUNCTION = 400, 110, 220, 55
REASON = re.compile(r"\s*# size: \S")


def lint(path: str, text: str) -> Iterator[Finding]:
    """A finding for everything in a file that is too long."""
    lines = text.splitlines()
    if Path(path).parent.name == "recipes" and len(lines) > RECIPE:
        yield Finding(path, 0, f"{len(lines)} lines, more than the {RECIPE} of a recipe")
    if len(lines) > FILE and not any(REASON.match(line) for line in lines[:40]):
        yield Finding(path, 0, f"{len(lines)} lines, more than {FILE}")
    for node in ast.walk(ast.parse(text, path)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        limit = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > limit and not (first > 1 and REASON.match(lines[first - 2])):
            yield Finding(path, node.lineno, f"{node.name} has {length} lines, more than {limit}")


def main(arguments: list[str]) -> int:
    sources = read(arguments)
    return report(
        (found for path, text in sources.items() for found in lint(path, text)), f"too long in {len(sources)} files"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
