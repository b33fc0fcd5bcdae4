"""Prints how many lines a user writes for the same task, here and with other libraries.

    python benchmarks/lines.py

Lines of statements in the programs of ``benchmarks/line_counts/``, without imports, docstrings, comments and blank
lines, all formatted by ruff at 120 characters. For verifiers only the environment counts: its trainer is a separate
package, verifiers-rl, which no registry had.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "benchmarks" / "line_counts"
TASKS = {
    "rows and a reward of one's own": [
        ("monarch_rl", PROGRAMS / "own_data_monarch_rl.py"),
        ("TRL", PROGRAMS / "own_data_trl.py"),
        ("verifiers", PROGRAMS / "own_data_verifiers.py"),
    ],
    "a calculator over several turns": [
        ("monarch_rl", PROGRAMS / "calculator_monarch_rl.py"),
        ("TRL", PROGRAMS / "calculator_trl.py"),
        ("verifiers", PROGRAMS / "calculator_verifiers.py"),
    ],
}


def statement_lines(program: Path) -> list[str]:
    """Return the lines of all statements of a program, without imports and docstrings."""
    text = program.read_text()
    numbers = {number for node in ast.walk(ast.parse(text)) for number in _lines_of(node)}
    return [line for number, line in enumerate(text.splitlines(), 1) if number in numbers and line.strip()]


def _lines_of(node: ast.AST) -> Iterator[int]:
    """Return the lines of a statement; for a function or a loop, those before its body."""
    if not isinstance(node, ast.stmt) or isinstance(node, ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    body = getattr(node, "body", None)
    end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    yield from range(node.lineno, max(end, node.lineno) + 1)


def main() -> None:
    """Print a line for each task."""
    for task, programs in TASKS.items():
        counts = ", ".join(f"{library} {len(statement_lines(program))}" for library, program in programs)
        print(f"{task}: {counts}")


if __name__ == "__main__":
    main()
