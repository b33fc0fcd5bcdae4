"""Part ``train``: the default recipe trains a tiny model for a few steps, with one rank and one replica.

With two GPUs, or on a CPU, each has its own device. On GPUs there is also a run in which they share one; with one GPU
it replaces the first. The last run is with LoRA, on a shared device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from monarch_rl.generator.settings import CPU_KV_TOKENS, GeneratorSettings
from tools.gpu_parts.common import Bench, Findings, attention_backend

ROOT = Path(__file__).parents[2]
STEPS = 4
RUN_S = 240.0
"""Seconds for a program, not including the first start of an engine."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "": (),
    "colocated_": ("--colocate", "--trainer.activation-checkpoint", "full"),
    "lora_": ("--colocate", "--trainer.lora.rank", "8"),
}
"""Flags of a run, by the prefix of its measurements' names."""


def layouts(bench: Bench) -> list[str]:
    """The :data:`LAYOUTS` for which this machine has devices."""
    if not bench.on_gpu:
        return ["", "lora_"]
    return list(LAYOUTS) if torch.cuda.device_count() > 1 else ["colocated_", "lora_"]


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    model = bench.scratch / "tiny"
    # On a GPU, attention heads of a size that kernels support; by default the tiny model's are smaller.
    shape = ["--output", model, "--head-size", 64 if bench.on_gpu else 32]
    small = ["--steps", 5, "--examples-per-step", 32, "--ranks", 1]
    _python("tools/make_tiny_model.py", *shape, *small, limit_s=RUN_S)
    limit_s = RUN_S + GeneratorSettings().start_limit_s(bench.on_gpu)
    for layout in layouts(bench):
        _train(bench, found, model, layout, limit_s)
        limit_s = RUN_S  # the next engines reuse the kernels that the first one compiled


def _train(bench: Bench, found: Findings, model: Path, layout: str, limit_s: float) -> None:
    """Run the recipe once and record its measurements."""
    runs = bench.scratch / f"{layout}runs"
    flags = ["--model", model, "--output", runs, "--steps", STEPS, "--held-out", 16, "--groups-per-step", 4]
    # Bounded, because a KV cache that fills a GPU would have tens of millions of the tiny model's tokens.
    flags += ["--trainer.ranks", 1, "--generator.replicas", 1, "--generator.max-total-tokens", CPU_KV_TOKENS]
    if bench.on_gpu:
        flags += ["--generator.attention-backend", attention_backend()]
    _python("recipes/grpo.py", *flags, *LAYOUTS[layout], limit_s=limit_s)
    (metrics,) = runs.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "trainer/loss" in row]
    found.require(len(steps) == STEPS, f"{len(steps)} of {STEPS} steps were logged in {runs.name}")
    for name in ("time/step_s", "weights/transfer_ms", "weights/swap_ms", "trainer/loss"):
        values = [row[name] for row in steps if name in row]
        if values:
            found.note(**{layout + name: float(values[-1])})
    found.require(next(runs.glob("*/model/config.json"), None) is not None, f"no model was saved in {runs.name}")


def _python(*command: object, limit_s: float) -> None:
    """Run a program of the project. Raises CalledProcessError and TimeoutExpired."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, stdout=sys.stderr, check=True, timeout=limit_s
    )
