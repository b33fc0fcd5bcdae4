"""The tree of errors has every exception class of the package, and is documented completely."""

from __future__ import annotations

import ast
import builtins
import pickle
import re
from pathlib import Path

import pytest

from monarch_rl import errors

SOURCES = Path(__file__).parents[2] / "src/monarch_rl"
NOT_ERRORS = {"DropGroup", "LoopBlocked", "NoForkServer"}
"""A decision of a stage, what ends code that blocks an event loop, and an answer of a program that imports only the
standard library."""


def parents() -> dict[str, set[str]]:
    """The base class names of each class of the package, by class name."""
    classes = [
        node
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    return {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for node in classes
        if not node.name.startswith("_")
    }


def ancestors(name: str, bases: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = {name}
    while left:
        found |= (above := bases.get(left.pop(), set()) - found)
        left |= above
    return found


def raisable(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def test_all_exceptions_are_in_the_tree() -> None:
    bases = parents()
    exceptions = {name for name in bases if any(map(raisable, ancestors(name, bases)))}
    assert {"Stalled", "ReplicaLost", "MonarchRLError"} <= exceptions
    outside = {name for name in exceptions if "MonarchRLError" not in ancestors(name, bases)}
    assert outside - {"MonarchRLError"} == NOT_ERRORS
    assert errors.__doc__ is not None
    tree = set(re.findall(r"\b[A-Z]\w+", errors.__doc__.split("\n\n")[1]))
    assert exceptions - NOT_ERRORS <= tree


@pytest.mark.parametrize(
    "name",
    sorted(name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)),
)
def test_each_exception_is_documented_and_can_be_pickled(name: str) -> None:
    kind = getattr(errors, name)
    assert kind.__doc__
    again = pickle.loads(pickle.dumps(kind("why")))
    assert type(again) is kind and str(again) == str(kind("why"))
