"""Part ``train``: the main job, by the recipe: a tiny model, trained for a few steps by one rank and one replica.

Two GPUs, or a CPU, give them a device each. On GPUs they share one as well: with one GPU there is no other run of it.
Then once more with LoRA, on a device that they share.
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
"""Seconds for a program, beside the first start of an engine."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "": (),
    "colocated_": ("--colocate", "--trainer.activation-checkpoint", "full"),
    "lora_": ("--colocate", "--trainer.lora.rank", "8"),
}
"""By what the names of its figures begin with: flags of a run."""


def layouts(bench: Bench) -> list[str]:
    """Those of :data:`LAYOUTS` that this machine has devices for."""
    if not bench.on_gpu:
        return ["", "lora_"]
    return list(LAYOUTS) if torch.cuda.device_count() > 1 else ["colocated_", "lora_"]


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    model = bench.scratch / "tiny"
    # On a GPU heads of a size for which kernels are made; the tiny model's are smaller.
    shape = ["--output", model, "--head-size", 64 if bench.on_gpu else 32]
    small = ["--steps", 5, "--examples-per-step", 32, "--ranks", 1]
    _python("tools/make_tiny_model.py", *shape, *small, limit_s=RUN_S)
    limit_s = RUN_S + GeneratorSettings().start_limit_s(bench.on_gpu)
    for layout in layouts(bench):
        _train(bench, found, model, layout, limit_s)
        limit_s = RUN_S  # the first engine has compiled what the next one needs


def _train(bench: Bench, found: Findings, model: Path, layout: str, limit_s: float) -> None:
    """One run of the recipe."""
    runs = bench.scratch / f"{layout}runs"
    flags = ["--model", model, "--output", runs, "--steps", STEPS, "--held-out", 16, "--groups-per-step", 4]
    # Without a bound a cache that fills a GPU has tens of millions of the tiny model's tokens.
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
    found.require(next(runs.glob("*/model/config.json"), None) is not None, f"there is no model in {runs.name}")


def _python(*command: object, limit_s: float) -> None:
    """Run a program of the project. Raises CalledProcessError and TimeoutExpired."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, stdout=sys.stderr, check=True, timeout=limit_s
    )
