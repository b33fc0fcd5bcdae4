"""Shared code of the linters in this folder: findings, comments that make exceptions, reading files, and the report."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "recipes")
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
BLOCKS = DEFINITIONS | ast.For | ast.AsyncFor | ast.While | ast.If | ast.With | ast.AsyncWith


@dataclass(frozen=True, order=True)
class Finding:
    """A problem in one place."""

    path: str
    line: int
    """Line number; 0 for the file as a whole."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}" if self.line else f"{self.path}: {self.message}"


class Excuses:
    """The statements of a file that are excused by a comment that matches ``reason``, next to or above the
    statement."""

    def __init__(self, text: str, reason: re.Pattern[str]) -> None:
        self._text_lines = text.splitlines()
        tokens = tokenize.generate_tokens(StringIO(text).readline) if reason.search(text) else ()
        self._lines = {
            token.start[0] for token in tokens if token.type == tokenize.COMMENT and reason.match(token.string)
        }

    def covers(self, node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
        """Whether the statement that contains ``node`` is excused; for a block statement, only its header counts."""
        statement = node
        while not isinstance(statement, ast.stmt):
            statement = parents[statement]
        last, first = statement.end_lineno or statement.lineno, statement.lineno
        if isinstance(statement, DEFINITIONS):
            first = min([first, *(decorator.lineno for decorator in statement.decorator_list)])
        if isinstance(statement, BLOCKS):
            last = max(statement.lineno, statement.body[0].lineno - 1)
        above = first - 1
        is_comment = above > 0 and self._text_lines[above - 1].lstrip().startswith("#")
        return not self._lines.isdisjoint(range(above if is_comment else first, last + 1))


def parents_of(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    """The parent of each node below ``tree``."""
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def read(arguments: Iterable[str]) -> dict[str, str]:
    """All Python files at or below the given paths, by their path relative to the repository's root; without paths,
    those in ``FOLDERS``."""
    places = [Path(argument).resolve() for argument in arguments] or [ROOT / folder for folder in FOLDERS]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    return {str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file): file.read_text() for file in files}


def report(findings: Iterable[Finding], summary: str) -> int:
    """Print the findings, and the summary preceded by their number; returns the exit code."""
    findings = list(findings)
    print(*findings, f"{len(findings)} {summary}", sep="\n")
    return 1 if findings else 0
