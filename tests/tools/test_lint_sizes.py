"""Files, classes and functions that are too long are named, unless they say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.lint_sizes import CLASS, FILE, FUNCTION, RECIPE, lint, main


def function(lines: int, indent: str = "", above: str = "") -> str:
    return f"{above}{indent}def f():\n" + f"{indent}    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (function(FUNCTION), None),
        (function(FUNCTION + 1), f"a.py:1: f has {FUNCTION + 1} lines, more than {FUNCTION}"),
        (function(FUNCTION + 1, above="# size: a table\n"), None),
        (function(FUNCTION + 1, above="# size:\n"), f"a.py:2: f has {FUNCTION + 1} lines, more than {FUNCTION}"),
        ("# size: a table\n@cache\n" + function(FUNCTION + 1), None),
        ("class C:\n" + function(FUNCTION + 1, "    "), f"a.py:2: f has {FUNCTION + 1} lines, more than {FUNCTION}"),
        ("class C:\n" + "    x = 1\n" * CLASS, f"a.py:1: C has {CLASS + 1} lines, more than {CLASS}"),
        ("x = 1\n" * FILE, None),
        ("x = 1\n" * (FILE + 1), f"a.py: {FILE + 1} lines, more than {FILE}"),
        ("# size: constants\n" + "x = 1\n" * FILE, None),
    ],
)
def test_what_is_too_long_is_named(text: str, finding: str | None) -> None:
    assert [str(found) for found in lint("a.py", text)] == ([] if finding is None else [finding])


def test_a_recipe_is_shorter() -> None:
    assert not list(lint("recipes/a.py", "x = 1\n" * RECIPE))
    (found,) = lint("recipes/a.py", "x = 1\n" * (RECIPE + 1))
    assert str(found) == f"recipes/a.py: {RECIPE + 1} lines, more than the {RECIPE} of a recipe"


def test_the_project_is_within_its_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out
    (tmp_path / "long.py").write_text("x = 1\n" * (FILE + 1))
    assert main([str(tmp_path)]) == 1
    assert "long.py" in capsys.readouterr().out
