"""Write or check the locks: the exact versions of the environments for CPUs and for GPUs.

    python tools/lock.py             # resolve again; versions already in a lock are kept where they still fit
    python tools/lock.py --upgrade   # resolve again, newest versions
    python tools/lock.py --check     # offline: do the locks satisfy pyproject.toml?

locks/gpu.txt is what pyproject.toml asks for, with the extras ``gpu`` and ``dev``. locks/cpu.txt is the same without
what needs CUDA: locks/cpu.toml replaces and excludes packages, each with its reason. Both are for Linux on x86_64 with
glibc 2.34 or newer (sglang's wheel), and are resolved for Python 3.11, the oldest version supported. A lock names no
index: tools/set_up says where torch comes from.
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
UV = "uv==0.13.9"  # installed for the moment where no uv is on PATH


def changes(name: str) -> tuple[list[str], list[str]]:
    """The overrides and the excluded packages of a lock."""
    path = LOCKS / f"{name}.toml"
    found: dict[str, Any] = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    return list(found.get("overrides", {})), [each for group in found.get("excluded", []) for each in group["packages"]]


def write(name: str, uv: str, *options: str) -> None:
    """Resolve one lock. Raises CalledProcessError; uv has said why."""
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
    """What is wrong with the text of a lock: a line that pins nothing, a requirement that it does not satisfy, and a
    package that is in it although it is excluded."""
    lines = [line for line in lock.splitlines() if line and not line.startswith("#")]
    yield from (f"`{line}` is not `name==version`" for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line))
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    replaced = {canonicalize_name(Requirement(each).name) for each in overrides}
    for requirement in map(Requirement, [*overrides, *requirements]):
        name = canonicalize_name(requirement.name)
        if name in excluded or (name in replaced and str(requirement) not in overrides):
            continue
        if name not in pinned or not requirement.specifier.contains(pinned[name], prereleases=True):
            yield f"{requirement} is asked for, and the lock has {pinned.get(name, 'none')}"
    yield from (f"{name} is excluded, and in the lock" for name in excluded if name in pinned)


def check(name: str) -> list[str]:
    """The faults of a committed lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = project["dependencies"] + [e for extra in EXTRAS for e in project["optional-dependencies"][extra]]
    return [f"locks/{name}.txt: {each}" for each in faults(requirements, _text(name), *changes(name))]


def _text(name: str) -> str:
    return (LOCKS / f"{name}.txt").read_text("utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions, not those already locked")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a lock must be written again")
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
