"""Modules and flags that have moved: the error for an old one names the new one."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from monarch_rl.moved import MOVED, MOVED_FLAGS

ROOT = Path(__file__).parents[2]


def test_importing_a_moved_module_names_the_new_one() -> None:
    for old, new in MOVED.items():
        with pytest.raises(ImportError, match=rf" {re.escape(new)}$"):
            importlib.import_module(old)
        assert (ROOT / "src" / f"{new.replace('.', '/')}.py").is_file(), new
    with pytest.raises(ImportError, match=r"monarch_rl\.algorithms\.losses$"):
        exec("from monarch_rl.algorithms import kl")
    with pytest.raises(ModuleNotFoundError, match=r"'monarch_rl\.algorithms\.no_such_module'"):
        importlib.import_module("monarch_rl.algorithms.no_such_module")


def test_the_changelog_has_the_same_tables() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert dict(re.findall(r"\| `(monarch_rl\.[a-z_.]+)` \| `(monarch_rl\.[a-z_.]+)` \|", text)) == MOVED
    table = text.partition("| old flag | new |")[2].partition("\n- ")[0]
    old = [row.split("|")[1] for row in table.splitlines() if row.startswith("  | `")]
    flags = [flag for cell in old for pattern in re.findall(r"--([\w.{},-]+)", cell) for flag in spelled_out(pattern)]
    assert sorted(flags) == sorted(MOVED_FLAGS)


def spelled_out(pattern: str) -> list[str]:
    """`a.{b,c}` as `a.b` and `a.c`."""
    before, _, rest = pattern.partition("{")
    inside, closing, after = rest.partition("}")
    return [f"{before}{choice}{after}" for choice in inside.split(",")] if closing else [pattern]
