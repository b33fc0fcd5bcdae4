"""Names of tests that are wrong are found, and the project has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.claims import main

PAGE = """# Claims

| claim | tests |
|---|---|
| right | `buffer/test_core.py::test_it`, `buffer/test_core.py::test_async` |
| honest | none: a benchmark |
"""


def project(root: Path, more: str = "", readme: str = "") -> Path:
    (root / "docs").mkdir()
    (root / "tests" / "buffer").mkdir(parents=True)
    (root / "docs" / "claims.md").write_text(PAGE + more)
    (root / "README.md").write_text(readme)
    (root / "CONTRIBUTING.md").touch()
    (root / "tests" / "buffer" / "test_core.py").write_text(
        "def test_it(): ...\nasync def test_async(): ...\ndef helper(): ...\n"
    )
    return root


@pytest.mark.parametrize(
    ("more", "readme", "said"),
    [
        (
            "| old | `buffer/test_core.py::test_gone` |\n",
            "",
            ":7: there is no test_gone in tests/buffer/test_core.py",
        ),
        (
            "| old | `buffer/test_gone.py::test_it` |\n",
            "",
            ":7: there is no test_it in tests/buffer/test_gone.py",
        ),
        ("| bare | |\n", "", ":7: neither a test nor none: bare"),
        ("| a file | `buffer/test_core.py` |\n", "", ":7: neither a test nor none: a file"),
        ("", "see `tests/buffer/test_gone.py`", "README.md: there is no tests/buffer/test_gone.py"),
    ],
)
def test_a_wrong_name_is_found(
    tmp_path: Path, more: str, readme: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(project(tmp_path, more, readme)) == 1
    assert said in capsys.readouterr().out


def test_what_is_right_passes_and_claims_without_a_test_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(project(tmp_path, readme="see tests/buffer/test_core.py")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "docs/claims.md:6: no test: honest",
        "2 claims, 1 of them without a test; 0 wrong names",
    ]


def test_the_project_names_tests_that_exist() -> None:
    assert main() == 0
