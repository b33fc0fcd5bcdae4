"""A separate environment for TRL, under ``.cache/``, so that the project's environment does not change."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "locks" / "cpu.txt"
TRL = "1.16.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Package index for torch only, if pip's configured sources do not have the CPU build."""
OF_THE_TASK = ("reasoning-gym", "setproctitle", "tyro")
"""Packages that both sides' task imports (``monarch_rl.tasks.reasoning_gym``)."""
PIP_SECONDS = 3600.0
VERSIONS = """
import json, accelerate, torch, transformers, trl
print(json.dumps({each.__name__: each.__version__ for each in (accelerate, torch, transformers, trl)}))
"""


def lines_of_lock() -> list[str]:
    return [line for line in LOCK.read_text().splitlines() if "==" in line and not line.startswith("#")]


def requirements(gpu: bool) -> list[str]:
    """Return the requirements. On a CPU all versions except TRL's are those of the project's lock; on GPUs, vLLM (with
    which TRL generates) determines the version of torch."""
    ours = [line for line in lines_of_lock() if line.partition("==")[0] in OF_THE_TASK]
    return [f"trl[vllm]=={TRL}" if gpu else f"trl=={TRL}", *ours]


def ensure(gpu: bool) -> Path:
    """Make the environment unless it exists; returns its Python. Raises RuntimeError with the end of pip's output."""
    folder = ROOT / ".cache" / f"trl-{TRL}-{'gpu' if gpu else 'cpu'}"
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps([requirements(gpu), [] if gpu else lines_of_lock(), sys.version])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"making {folder} for TRL {TRL}: a minute or more, and 2 GB", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=PIP_SECONDS)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints: list[str] = []
    if not gpu:
        torch = next(line for line in lines_of_lock() if line.startswith("torch==")) + "+cpu"
        if _run([*pip, "--no-deps", torch]):
            _install([*pip, "--no-deps", "--index-url", TORCH_CPU_INDEX, torch])
        pinned = folder / "constraints.txt"
        pinned.write_text("\n".join(lines_of_lock()))
        constraints = ["--constraint", str(pinned)]
    _install([*pip, *constraints, *requirements(gpu)])
    stamp.write_text(wanted)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the versions of the relevant packages in the environment."""
    # -P: not this folder's trl.py
    done = subprocess.run([python, "-P", "-c", VERSIONS], capture_output=True, text=True, check=True, timeout=300)
    return dict(json.loads(done.stdout))


def _run(command: list[str]) -> str:
    """Return the end of the output if the command failed, or an empty string."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False)
    return "\n".join((done.stdout + done.stderr).splitlines()[-20:]) if done.returncode else ""


def _install(command: list[str]) -> None:
    if failure := _run(command):
        raise RuntimeError(f"{' '.join(command)} failed:\n{failure}")
