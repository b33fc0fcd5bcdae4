"""Check that `pip install -e ".[gpu]"` resolves, without installing it: pip's own resolver, dry run.

    python tools/check_gpu_resolution.py

Prints the version of each main package that a GPU machine with this Python would get; exits 1 with pip's message when
the set does not resolve. Needs PyPI, reads metadata only; about a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESOLVE_SECONDS = 900
RELEASED = {"sglang": "0.5.23", "torchmonarch": "0.7.0", "torchtitan": "0.3.0"}  # what pyproject.toml pins
SHOWN = ("torch", *RELEASED, "sglang-kernel", "transformers", "datasets", "triton", "numpy")


def resolve(report: Path) -> dict[str, str]:
    """Return name -> version of the whole set. Raises RuntimeError when pip cannot resolve it, or not in time."""
    # no build isolation: setuptools is here, so only metadata is fetched
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--no-build-isolation", "--report", str(report), f"{ROOT}[gpu]"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=RESOLVE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pip did not resolve the set within {RESOLVE_SECONDS} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {entry["metadata"]["name"].lower().replace("_", "-"): entry["metadata"]["version"] for entry in found}


def main() -> int:
    print('resolving ".[gpu]" with pip, installing nothing', flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-resolution-") as folder:
        try:
            versions = resolve(Path(folder) / "report.json")
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    for name in SHOWN:
        print(f"  {name} {versions.get(name, 'not in the set')}")
    wrong = {name: version for name, version in RELEASED.items() if versions.get(name) != version}
    if wrong:
        print(f"these should have been in the set: {wrong}", file=sys.stderr)
        return 1
    print(f"the GPU set resolves: {len(versions)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
