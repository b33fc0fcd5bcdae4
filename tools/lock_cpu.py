"""Make and check `tools/cpu.lock`: the exact versions of the CPU environment, installed without dependency resolution.

    python tools/lock_cpu.py             # resolve again; versions already in the lock are kept where they still fit
    python tools/lock_cpu.py --upgrade   # resolve again, newest versions
    python tools/lock_cpu.py --check     # offline: does the lock satisfy pyproject.toml, and this environment the lock?

The requirements are those of pyproject.toml (its dependencies and the extras `gpu` and `dev`), with two changes listed
below: `OVERRIDES` replaces a version, `EXCLUDED` leaves a package out, each with its reason.

The lock is for Linux on x86_64 with glibc 2.34 or newer (sglang's wheel) and is resolved for Python 3.11, the oldest
version supported; torchmonarch 0.7.0 and torch 2.13.0 have wheels for 3.11, 3.12 and 3.13. Resolving needs PyPI, and
uses `uv` in a temporary environment; `--check` needs `packaging`, which the lock holds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "tools" / "cpu.lock"
PYPROJECT = ROOT / "pyproject.toml"
EXTRAS = ("gpu", "dev")
PYTHON_VERSION = "3.11"
UV = "uv==0.13.9"
RESOLVE_SECONDS = 900

TORCH = "2.13.0"
OVERRIDES = {"torch": f"torch=={TORCH}"}  # sglang asks for 2.14.1 because of its CUDA kernels
LOCAL_VERSIONS = {"torch": f"{TORCH}+cpu"}  # PyPI's torch is the CUDA build; what is installed is the CPU build

CUDA_ONLY = "needs CUDA or holds CUDA code"
OTHER_PATH = "sglang imports it only inside features that are not used here (vision, audio, gRPC, other model hubs)"
EXCLUDED = {
    "cuda-bindings": CUDA_ONLY,
    "cuda-python": CUDA_ONLY,
    "cuda-toolkit": CUDA_ONLY,
    "flash-attn-4": CUDA_ONLY,
    "flashinfer-python": CUDA_ONLY,
    "humming-kernels": CUDA_ONLY,
    "kernels": CUDA_ONLY,
    "nvidia-cudnn-cu13": CUDA_ONLY,
    "nvidia-cusparselt-cu13": CUDA_ONLY,
    "nvidia-cutlass-dsl": CUDA_ONLY,
    "nvidia-mathdx": CUDA_ONLY,
    "nvidia-ml-py": CUDA_ONLY,
    "nvidia-nccl-cu13": CUDA_ONLY,
    "nvidia-nvshmem-cu13": CUDA_ONLY,
    "nvshmem4py-cu13": CUDA_ONLY,
    "quack-kernels": CUDA_ONLY,
    "sgl-deep-ep": CUDA_ONLY,
    "sgl-deep-gemm": CUDA_ONLY,
    "sgl-flash-mla": CUDA_ONLY,
    "sglang-kernel": CUDA_ONLY,
    "tilelang": CUDA_ONLY,
    "torch-memory-saver": CUDA_ONLY,
    "torchaudio": "PyPI's build is the CUDA one; sound is not used",
    "torchcodec": "PyPI's build is the CUDA one; video is not used",
    "torchvision": "PyPI's build is the CUDA one and breaks `import transformers` beside a CPU torch",
    "anthropic": OTHER_PATH,
    "blobfile": OTHER_PATH,
    "build": OTHER_PATH,
    "deepseek-recipe": OTHER_PATH,
    "easydict": OTHER_PATH,
    "mistral-common": OTHER_PATH,
    "modelscope": OTHER_PATH,
    "ninja": OTHER_PATH,
    "outlines": OTHER_PATH,
    "scipy": OTHER_PATH,
    "smg-grpc-servicer": OTHER_PATH,
    "timm": OTHER_PATH,
    "tml-renderers": OTHER_PATH,
    "wandb": "torchtitan imports it only when asked to log to it",
}

HEADER = """\
# The CPU environment: exact versions, for Linux on x86_64. Made by `python tools/lock_cpu.py`; do not edit.
# Installed by tools/setup.sh with `pip install --no-deps -r tools/cpu.lock`.
"""


def canonical(name: str) -> str:
    """Return a distribution name as PyPI compares it: lower case, runs of `-_.` as one `-`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(pyproject: Path = PYPROJECT) -> list[str]:
    """Return the requirement strings of the project and of the extras that the lock covers."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    return requirements


def read_lock(lock: Path = LOCK) -> dict[str, str]:
    """Return canonical name -> version of every line.

    Raises ValueError for a line that is not `name==version`, or a name that comes twice.
    """
    versions: dict[str, str] = {}
    for number, line in enumerate(lock.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, equals, version = text.partition("==")
        if not equals or canonical(name) in versions:
            raise ValueError(f"{lock}:{number}: expected one `name==version` for each package, found {line!r}")
        versions[canonical(name)] = version
    return versions


def resolve(upgrade: bool, lock: Path = LOCK) -> None:
    """Resolve the declared requirements with uv from PyPI and write the lock. Raises RuntimeError with uv's message."""
    with tempfile.TemporaryDirectory(prefix="lock-cpu-") as temporary:
        folder = Path(temporary)
        print(f"installing {UV} into a temporary environment", flush=True)
        _run([sys.executable, "-m", "venv", str(folder / "uv")])
        _run([str(folder / "uv" / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", UV])
        (folder / "requirements.in").write_text("\n".join(declared()) + "\n", encoding="utf-8")
        (folder / "overrides.txt").write_text("\n".join(OVERRIDES.values()) + "\n", encoding="utf-8")
        (folder / "excludes.txt").write_text("\n".join(EXCLUDED) + "\n", encoding="utf-8")
        output = folder / "cpu.lock"
        if lock.exists() and not upgrade:  # uv keeps what it finds in its output file where it still fits
            kept = (f"{name}=={version.partition('+')[0]}" for name, version in read_lock(lock).items())
            output.write_text("\n".join(kept) + "\n", encoding="utf-8")
        print("resolving from PyPI", flush=True)
        command = [str(folder / "uv" / "bin" / "uv"), "pip", "compile", str(folder / "requirements.in")]
        command += ["--overrides", str(folder / "overrides.txt"), "--excludes", str(folder / "excludes.txt")]
        command += ["--python-version", PYTHON_VERSION, "--python-platform", "x86_64-manylinux_2_34"]
        command += ["--no-header", "--no-annotate", "--quiet", "--output-file", str(output)]
        _run(command + (["--upgrade"] if upgrade else []))
        versions = read_lock(output)
    versions.update(LOCAL_VERSIONS)
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items())]
    lock.write_text(HEADER + "".join(lines), encoding="utf-8")
    print(f"{lock.relative_to(ROOT)}: {len(lines)} packages")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout}{done.stderr}")


def installed_requirements(name: str) -> list[str]:
    """Return what the installed distribution `name` requires. Raises PackageNotFoundError when it is not installed."""
    return list(importlib.metadata.requires(name) or [])


def check(
    requirements: list[str],
    locked: Mapping[str, str],
    requires: Callable[[str], list[str]] | None = installed_requirements,
    version_of: Callable[[str], str] | None = importlib.metadata.version,
) -> Iterator[str]:
    """Walk from `requirements` through everything they need and yield one sentence for each fault.

    Faults: a requirement that the lock does not hold or holds in a version that does not fit; a locked package that
    nothing needs, or that this environment lacks or has in another version. With `requires` and `version_of` None only
    the requirements themselves are checked (no environment is needed).
    """
    from packaging.requirements import Requirement

    waiting = [("pyproject.toml", frozenset[str](), text) for text in requirements]
    seen: set[tuple[str, str, frozenset[str]]] = set()
    reached: set[str] = set()
    while waiting:
        parent, parent_extras, text = waiting.pop()
        requirement = Requirement(text)
        name = canonical(requirement.name)
        extras = parent_extras or {""}
        marker = requirement.marker
        if name in EXCLUDED or (marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras)):
            continue
        if name not in locked:
            yield f"{parent} requires {text}, which the lock does not hold"
            continue
        if name not in OVERRIDES and not requirement.specifier.contains(locked[name], prereleases=True):
            yield f"{parent} requires {text}, but the lock holds {name}=={locked[name]}"
        reached.add(name)
        key = (parent, name, frozenset(requirement.extras))
        if requires is None or version_of is None or key in seen:
            continue
        if not any(name == other and requirement.extras <= held for _, other, held in seen):
            try:
                if version_of(name) != locked[name]:
                    yield f"this environment has {name}=={version_of(name)}, the lock {name}=={locked[name]}"
                waiting += [(name, frozenset(requirement.extras), text) for text in requires(name)]
            except importlib.metadata.PackageNotFoundError:
                yield f"this environment lacks {name}=={locked[name]}"
        seen.add(key)
    if requires is not None:
        for name in sorted(locked.keys() - reached):
            yield f"the lock holds {name}=={locked[name]}, which nothing needs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions, not those already locked")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and say why if the lock is stale")
    arguments = parser.parse_args()
    if not arguments.check:
        resolve(arguments.upgrade)
        return 0
    locked = read_lock()
    faults = list(check(declared(), locked))
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{LOCK.relative_to(ROOT)}: {len(locked)} packages, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
