"""Part ``parity``: engine and trainer agree on log-probs; on a GPU also without the engine's LM head in float32."""

from __future__ import annotations

from monarch_rl.algorithms.mismatch import figures
from monarch_rl.episode.sampling import Sampling
from monarch_rl.generator.settings import resolve_dtype
from monarch_rl.pipeline.parity import PromptSet, compare
from monarch_rl.trainer.settings import TrainerSettings
from tools.gpu_parts.common import Bench, Findings, make_model, model_shape
from tools.gpu_parts.engines import engine_settings, prompts
from tools.parity import DEFAULTS

DEADLINE_S = 120.0


def run(bench: Bench, found: Findings) -> None:
    """See the top of this file."""
    config = model_shape(bench)
    folder = make_model(bench, config)
    count, new_tokens = (64, 256) if bench.on_gpu else (8, 32)
    asked = [PromptSet("sampled", prompts(config["vocab_size"], count, 64), Sampling(max_new_tokens=new_tokens))]
    limits = DEFAULTS[resolve_dtype("auto", bench.on_gpu)]
    cases: dict[str, dict[str, object]] = {"": {}}
    if bench.on_gpu:
        cases["bf16_head_"] = {"enable_fp32_lm_head": False}
    for prefix, arguments in cases.items():
        readings = compare(
            folder,
            folder,
            engine_settings(bench),
            TrainerSettings(ranks=1),
            asked,
            experts=False,
            deadline_s=DEADLINE_S,
            engine_arguments=arguments,
        )
        row = figures(readings["sampled"].own, readings["sampled"].engine, 0.5, 2.0)
        found.note(**{prefix + name: row[name] for name in ("tokens", "mean", "p50", "p99", "max", "k3", "outside")})
        if not prefix:
            for name in ("p99", "k3", "outside"):
                found.require(row[name] <= limits[name], f"{name} is {row[name]:.3g}, more than {limits[name]:g}")
