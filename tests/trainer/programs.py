"""Running the programs of these tests, each in processes of its own, and reading what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PROGRAM_S = 240.0
"""Seconds for a program on shared cores: some 10 when nothing else runs."""


def run_program(name: str, *arguments: str | Path, ranks: int = 0) -> None:
    """Run ``tests/trainer/<name>``: by Python, or as ``ranks`` ranks of torchrun. Its errors fail the test."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *torchrun, f"tests/trainer/{name}", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=PROGRAM_S)
    assert done.returncode == 0, done.stderr.decode()[-4000:]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder of safetensors."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
