"""Write or check the locks: the exact versions of the environments for CPUs and for GPUs.

    python tools/lock.py             # resolve again, keeping locked versions where they still fit
    python tools/lock.py --upgrade   # resolve again, with the newest versions
    python tools/lock.py --check     # offline: check that the locks satisfy pyproject.toml

locks/gpu.txt has the requirements of pyproject.toml with the extras ``gpu`` and ``dev``. locks/cpu.txt has the same
without packages that need CUDA: locks/cpu.toml replaces and excludes packages, with the reason for each. Both are for
Linux on x86_64 with glibc 2.34 or newer (sglang's wheel), and are resolved for Python 3.11, the oldest supported
version. A lock does not name a package index: tools/set_up sets where torch comes from.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
EXTRAS = ("gpu", "dev")
UV = "uv==0.13.9"  # installed temporarily if uv is not on PATH


def changes(name: str) -> tuple[list[str], list[str]]:
    """The overrides and the excluded packages of a lock."""
    path = LOCKS / f"{name}.toml"
    found: dict[str, Any] = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    return list(found.get("overrides", {})), [each for group in found.get("excluded", []) for each in group["packages"]]


def write(name: str, uv: str, *options: str) -> None:
    """Resolve one lock. Raises CalledProcessError, after uv has printed the reason."""
    overrides, excluded = changes(name)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "overrides").write_text("\n".join(overrides))
        Path(folder, "excludes").write_text("\n".join(excluded))
        command = [uv, "pip", "compile", "pyproject.toml", "--quiet", "--no-annotate", "--output-file"]
        command += [f"locks/{name}.txt", "--custom-compile-command", "python tools/lock.py", *options]
        command += ["--overrides", f"{folder}/overrides", "--excludes", f"{folder}/excludes"]
        command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_34"]
        subprocess.run([*command, *(f"--extra={extra}" for extra in EXTRAS)], cwd=ROOT, check=True)


def faults(requirements: list[str], lock: str, overrides: list[str], excluded: list[str]) -> Iterator[str]:
    """Problems of a lock's text: lines that do not pin a version, unsatisfied requirements, and excluded packages that
    it contains."""
    lines = [line for line in lock.splitlines() if line and not line.startswith("#")]
    yield from (f"`{line}` is not `name==version`" for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line))
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    replaced = {canonicalize_name(Requirement(each).name) for each in overrides}
    for requirement in map(Requirement, [*overrides, *requirements]):
        name = canonicalize_name(requirement.name)
        if name in excluded or (name in replaced and str(requirement) not in overrides):
            continue
        if name not in pinned or not requirement.specifier.contains(pinned[name], prereleases=True):
            yield f"{requirement} is required, but the lock has {pinned.get(name, 'none')}"
    yield from (f"{name} is excluded, but in the lock" for name in excluded if name in pinned)


def check(name: str) -> list[str]:
    """The problems of a committed lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = project["dependencies"] + [e for extra in EXTRAS for e in project["optional-dependencies"][extra]]
    return [f"locks/{name}.txt: {each}" for each in faults(requirements, _text(name), *changes(name))]


def _text(name: str) -> str:
    return (LOCKS / f"{name}.txt").read_text("utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="use the newest versions instead of the locked ones")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a lock is out of date")
    arguments = parser.parse_args()
    if arguments.check:
        found = [*check("cpu"), *check("gpu")]
        print(*found, f"locks: {len(found)} faults", sep="\n")
        return bool(found)
    with tempfile.TemporaryDirectory() as folder:
        uv = shutil.which("uv") or f"{folder}/bin/uv"
        if not Path(uv).exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", UV], check=True)
        for name in ("cpu", "gpu"):
            write(name, uv, *(["--upgrade"] if arguments.upgrade else []))
    return 0


if __name__ == "__main__":
    sys.exit(main())
