"""Part ``parity``: engine and trainer agree on log-probs, for a dense model and for a mixture of experts with the
engine's routes replayed; on a GPU also measured without the engine's LM head in float32."""

from __future__ import annotations

from typing import Any

import torch

from monarch_rl.algorithms.mismatch import figures
from monarch_rl.episode.sampling import Sampling
from monarch_rl.generator.settings import resolve_dtype
from monarch_rl.offline.parity import PromptSet, Reading, compare
from monarch_rl.trainer.settings import TrainerSettings
from tools.gpu_parts.common import Bench, Findings, expert_shape, make_model, model_shape
from tools.gpu_parts.engines import engine_settings, prompts
from tools.parity import DEFAULTS

DEADLINE_S = 480.0
"""Seconds for each side, even on shared cores."""


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    limits = DEFAULTS[resolve_dtype("auto", bench.on_gpu)]
    dense, sparse = model_shape(bench), expert_shape(bench)
    folders = {"dense": make_model(bench, dense, "dense"), "experts": make_model(bench, sparse, "experts")}

    def read(name: str, config: dict[str, Any], arguments: dict[str, object]) -> Reading:
        count, new_tokens = (64, 256) if bench.on_gpu else (8, 32)
        asked = [PromptSet("sampled", prompts(config["vocab_size"], count, 64), Sampling(max_new_tokens=new_tokens))]
        return compare(
            folders[name],
            folders[name],
            engine_settings(bench),
            TrainerSettings(ranks=1),
            asked,
            experts=name == "experts",
            deadline_s=DEADLINE_S,
            engine_arguments=arguments,
        )["sampled"]

    def note(prefix: str, reading: Reading, logprobs: torch.Tensor, judged: bool = True) -> None:
        row = figures(logprobs, reading.engine, 0.5, 2.0)
        found.note(**{prefix + name: row[name] for name in ("tokens", "mean", "p50", "p99", "max", "k3", "outside")})
        for name in ("p99", "k3", "outside") if judged else ():
            problem = f"{prefix}{name} is {row[name]:.3g}, above the limit of {limits[name]:g}"
            found.require(row[name] <= limits[name], problem)

    reading = read("dense", dense, {})
    note("", reading, reading.own)
    if bench.on_gpu:
        reading = read("dense", dense, {"enable_fp32_lm_head": False})
        note("bf16_head_", reading, reading.own, judged=False)
    reading = read("experts", sparse, {})
    assert reading.replayed is not None and reading.differing is not None
    note("experts_", reading, reading.replayed)
    differ = float(reading.differing.float().mean()) / sparse["num_experts_per_tok"]
    found.note(routes_differ=differ)
    found.require(differ <= limits["routes_differ"], f"{differ:.2%} of the engine's experts differ")
