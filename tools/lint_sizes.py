"""Finds files, classes and functions in src/ that are too long to be read at once: run by ./tools/test.

    python tools/lint_sizes.py [FILE OR FOLDER ...]

A file may have 400 lines, a class 220, a function 55. A longer one says why in a comment: a file at its top, a class or
a function in the line above it: ``# size: one state machine; half of it would make no sense``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE, CLASS, FUNCTION = 400, 220, 55
REASON = re.compile(r"\s*# size: \S")


def lint(path: str, text: str) -> Iterator[str]:
    """A line for everything in a file that is too long."""
    lines = text.splitlines()
    if len(lines) > FILE and not any(REASON.match(line) for line in lines[:40]):
        yield f"{path}: {len(lines)} lines, more than {FILE}"
    for node in ast.walk(ast.parse(text, path)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        limit = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > limit and not (first > 1 and REASON.match(lines[first - 2])):
            yield f"{path}:{node.lineno}: {node.name} has {length} lines, more than {limit}"


def main(arguments: list[str]) -> int:
    places = [Path(argument).resolve() for argument in arguments] or [ROOT / "src"]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    findings: list[str] = []
    for file in files:
        name = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
        findings += lint(name, file.read_text())
    print(*findings, f"{len(findings)} too long in {len(files)} files", sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
