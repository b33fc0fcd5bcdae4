"""Part ``train``: the main job, by the recipe: a tiny model, trained for a few steps by one rank and one replica."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from monarch_rl.generator.settings import GeneratorSettings
from tools.gpu_parts.common import Bench, Findings, Skipped

ROOT = Path(__file__).parents[2]
STEPS = 4
RUN_S = 240.0
"""Seconds for a program, beside the start of its engine."""


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    if bench.on_gpu and torch.cuda.device_count() < 2:
        raise Skipped("one GPU: a trainer rank and a replica need one each")
    model, runs = bench.scratch / "tiny", bench.scratch / "runs"
    # On a GPU heads of a size for which kernels are made; the tiny model's are smaller.
    shape = ["--output", model, "--head-size", 64 if bench.on_gpu else 32]
    small = ["--steps", 5, "--examples-per-step", 32, "--ranks", 1]
    _python("tools/make_tiny_model.py", *shape, *small, limit_s=RUN_S)
    flags = ["--model", model, "--output", runs, "--steps", STEPS, "--held-out", 16, "--groups-per-step", 4]
    limit_s = RUN_S + GeneratorSettings().start_limit_s(bench.on_gpu)
    _python("recipes/grpo.py", *flags, "--trainer.ranks", 1, "--generator.replicas", 1, limit_s=limit_s)
    (metrics,) = runs.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "trainer/loss" in row]
    found.require(len(steps) == STEPS, f"{len(steps)} of {STEPS} steps were logged")
    for name in ("time/step_s", "weights/transfer_ms", "weights/swap_ms", "trainer/loss"):
        values = [row[name] for row in steps if name in row]
        if values:
            found.note(**{name: float(values[-1])})
    found.require(next(runs.glob("*/model/config.json"), None) is not None, "the run saved no model")


def _python(*command: object, limit_s: float) -> None:
    """Run a program of the project. Raises CalledProcessError and TimeoutExpired."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, stdout=sys.stderr, check=True, timeout=limit_s
    )
