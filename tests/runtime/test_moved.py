"""Modules that have moved: an import of an old one names the new one."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from monarch_rl.moved import MOVED

ROOT = Path(__file__).parents[2]


def test_an_import_of_a_module_that_has_moved_names_the_new_one() -> None:
    for old, new in MOVED.items():
        with pytest.raises(ImportError, match=rf" {re.escape(new)}$"):
            importlib.import_module(old)
        assert (ROOT / "src" / f"{new.replace('.', '/')}.py").is_file(), new
    with pytest.raises(ImportError, match=r"monarch_rl\.algorithms\.losses$"):
        exec("from monarch_rl.algorithms import kl")
    with pytest.raises(ModuleNotFoundError, match=r"'monarch_rl\.algorithms\.no_such_module'"):
        importlib.import_module("monarch_rl.algorithms.no_such_module")


def test_the_changelog_has_the_same_table() -> None:
    rows = re.findall(
        r"\| `(monarch_rl\.[a-z_.]+)` \| `(monarch_rl\.[a-z_.]+)` \|", (ROOT / "CHANGELOG.md").read_text()
    )
    assert dict(rows) == MOVED
