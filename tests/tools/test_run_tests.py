"""The groups in which all tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.run_tests import GROUPS, QUICK_GROUPS, ROOT, commands


@pytest.mark.parametrize("groups", [GROUPS, QUICK_GROUPS])
def test_each_file_is_in_one_group(groups: list[list[str]], tmp_path: Path) -> None:
    found = commands(groups, [], tmp_path)
    files = [file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 90
    for file in files:
        above = {str(file), *map(str, file.parents)}
        runs = [set(command) & above for command in found if not {f"--ignore={path}" for path in above} & set(command)]
        assert len([paths for paths in runs if paths]) == 1, file
