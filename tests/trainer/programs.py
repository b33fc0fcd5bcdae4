"""Running the programs of these tests, each in processes of its own, and reading what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from monarch_rl.model.lora import LoraSettings
from tests.trainer.moe_cases import layout

ROOT = Path(__file__).parents[2]
Weights = dict[str, torch.Tensor]
PROGRAM_S = 240.0
"""Seconds for a program on shared cores: some 10 when nothing else runs."""


def run_program(name: str, *arguments: str | Path, ranks: int = 0) -> None:
    """Run ``tests/trainer/<name>``: by Python, or as ``ranks`` ranks of torchrun. Its errors fail the test."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *torchrun, f"tests/trainer/{name}", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=PROGRAM_S)
    assert done.returncode == 0, done.stderr.decode()[-4000:]


def saved(folder: Path) -> Weights:
    """All tensors of a folder of safetensors."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def parameters(layouts: Mapping[int, tuple[int, ...]]) -> list[Any]:
    """Layouts by name, given the numbers of ranks and the degrees of expert parallelism on them."""
    return [
        pytest.param(layout(ranks, degree), marks=[pytest.mark.slow] if ranks > 2 else [])
        for ranks, degrees in layouts.items()
        for degree in degrees
    ]


def check_merged(before: Weights, merged: Weights, adapters: Weights, lora: LoraSettings) -> None:
    """``merged`` is ``before`` and on the settings' targets ``alpha / rank * B A``, and nothing else has changed."""
    assert before.keys() == merged.keys()
    left = dict(adapters)
    for tensor, weight in before.items():
        module = f"base_model.model.{tensor.removesuffix('.weight')}"
        if tensor.split(".")[-2] in lora.targets:
            a, b = left.pop(f"{module}.lora_A.weight"), left.pop(f"{module}.lora_B.weight")
            weight = weight + lora.alpha / lora.rank * torch.einsum("or,ri->oi", b, a)
            assert torch.allclose(merged[tensor], weight, rtol=0, atol=1e-7), tensor
        else:
            assert torch.equal(merged[tensor], weight), tensor
    assert not left
