"""tools/visits.py on a package of two files: the path of a reader."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools import visits

CALLER = """
import helpers

def whole(values):
    for value in values:
        helpers.outer(value)
    return local(helpers.inner(0))

def local(value):
    return value
"""
HELPERS = """
def outer(value):
    return inner(value)

def inner(value):
    return value
"""


def module(tree: Path, name: str, text: str, patch: pytest.MonkeyPatch) -> ModuleType:
    file = tree / visits.PACKAGE / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, loaded)
    spec.loader.exec_module(loaded)
    return loaded


def test_each_function_is_read_once_and_each_return_turns_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = module(tmp_path, "helpers", HELPERS, monkeypatch)
    caller = module(tmp_path, "caller", CALLER, monkeypatch)
    reader = visits.Reader(tmp_path, "caller.py", "whole")
    before = sys.getprofile()
    try:
        reader.follow()
        helpers.outer(0)  # before the call that is followed
        caller.whole([1, 2, 3])
        helpers.inner(0)  # after it
    finally:
        sys.setprofile(before)
    assert reader.turns == ["caller.py", "helpers.py", "caller.py"]
