"""The locks satisfy pyproject.toml, `lock.py --check` reports violations, and pyproject.toml declares all imports of
src/."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import LOCKS, changes, check, faults

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_committed_locks_have_no_fault(name: str) -> None:
    assert check(name) == []


def test_the_lock_for_cpus_holds_no_cuda_package() -> None:
    lines = (LOCKS / "cpu.txt").read_text().splitlines()
    assert not [line for line in lines if line.startswith(("nvidia-", "cuda-"))]
    assert changes("gpu") == ([], [])


@pytest.mark.parametrize(
    ("lock", "expected"),
    [
        ("alpha==1.5\nbeta-gamma==2", []),
        ("# a comment\nalpha==1.5\nBeta_Gamma==2\nother==1", []),
        ("alpha==2.5\nbeta-gamma==2", ["alpha<2 "]),
        ("alpha==1.5", ["beta-gamma==2 "]),
        ("alpha==1.5\nbeta-gamma==1", ["beta-gamma==2 "]),
        ("alpha==1.5\nbeta-gamma==2\ncuda==1", ["cuda "]),
        ("alpha==1.5\nbeta-gamma==2\nother>=1", ["`other>=1` "]),
        ("alpha==1.5\nbeta-gamma==2\nother @ https://example.org/other.whl", ["`other @ "]),
    ],
)
def test_each_fault_is_named(lock: str, expected: list[str]) -> None:
    found_faults = list(faults(["alpha<2", "Beta.Gamma>=3", "cuda"], lock, ["beta-gamma==2"], ["cuda"]))
    assert len(found_faults) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found_faults, expected, strict=True))


def test_whatever_the_package_imports_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    names = {canonicalize_name(Requirement(each).name) for each in declared}
    distributions = importlib.metadata.packages_distributions()
    missing = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in (ROOT / "src").rglob("*.py")
        for module in _imported(path)
        if module not in sys.stdlib_module_names and module != "monarch_rl"
        if not names & {canonicalize_name(each) for each in distributions.get(module, [module])}
    }
    assert not missing


def _imported(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}
