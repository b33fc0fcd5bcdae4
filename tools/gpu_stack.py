"""Tests the packages of GPU machines on a CPU: installs locks/gpu.txt and runs parts of tools/gpu_check.py, CUDA
hidden.

    python tools/gpu_stack.py        # run by ./tools/test --gpu-stack; 6 GB in .cache/gpu-stack, takes minutes

CI only tests the packages of locks/cpu.txt. This tool checks that torch, torchtitan, Monarch and SGLang of the other
lock can be installed together and imported, that trainer and weights compute the same with them, and that an engine
starts. It does not run GPU kernels. Prints a summary, writes it to benchmarks/results/gpu_stack.txt, and exits with 1
if a part failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "gpu-stack"
SUMMARY = ROOT / "benchmarks" / "results" / "gpu_stack.txt"
PARTS = ("trainer", "weights", "members", "engine")
PART_DEADLINE_S = 1800
"""Generous, because the parts are designed for a GPU, and other programs may use the cores."""


def tree(*folders: str) -> str:
    """Git's tree hash of these folders in their current state, committed or not."""
    with tempfile.TemporaryDirectory() as scratch:
        index = {**os.environ, "GIT_INDEX_FILE": f"{scratch}/index"}
        subprocess.run(["git", "add", "--", *folders], cwd=ROOT, env=index, check=True)
        found = subprocess.run(
            ["git", "write-tree"], cwd=ROOT, env=index, check=True, stdout=subprocess.PIPE, text=True
        )
    return found.stdout.strip()


def run_parts() -> Iterator[dict[str, Any]]:
    """Yield the result of each part when it ends."""
    command = [str(FOLDER / "bin" / "python"), "tools/gpu_check.py", "--device", "cpu", "--parts", ",".join(PARTS)]
    command += ["--part-deadline-s", str(PART_DEADLINE_S)]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = one_thread | os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # output of a library
                print(line, end="")


def main() -> int:
    began, hashed = time.monotonic(), tree("src", "tests", "tools", "locks")
    subprocess.run([ROOT / "tools" / "set_up", "--lock", "gpu", "--venv", FOLDER], check=True)
    lines = [f"set-up: {_minutes(time.monotonic() - began)}"]
    passed = 0
    versions: dict[str, Any] = {}
    for found in run_parts():
        passed += found["verdict"] == "passed"
        versions |= found.get("versions", {})
        lines.append(f"{found['part']}: {found['verdict']}, {_minutes(found['seconds'])}")
        lines += [f"    {problem.strip().splitlines()[-1]}" for problem in found["problems"]]
        print(*lines[-1 - len(found["problems"]) :], sep="\n", flush=True)
    head = [
        "The packages of locks/gpu.txt on a CPU, CUDA hidden (tools/gpu_stack.py)",
        f"tree of src, tests, tools and locks: {hashed}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    total = f"{passed} of {len(PARTS)} parts passed, {_minutes(time.monotonic() - began)} in all"
    SUMMARY.write_text("\n".join([*head, *lines, total]) + "\n")
    print(SUMMARY.read_text(), end="")
    return int(passed < len(PARTS))


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes"


if __name__ == "__main__":
    sys.exit(main())
