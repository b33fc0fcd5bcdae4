"""Print how much GPU memory a run needs, and what fits: the arithmetic of docs/memory.md.

    python tools/memory.py                                         table of models x GPUs
    python tools/memory.py --model Qwen3-8B --gpu 80               one model, by purpose
    python tools/memory.py --model ./my-model --trainer.ranks 8    a folder or a model of the table, with settings
    python tools/memory.py --model Qwen3-1.7B --colocate           a trainer rank and a replica on one GPU

Only computes; needs no GPU.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

from monarch_rl.generator.settings import GeneratorSettings, check_context, check_served
from monarch_rl.model.config import ModelConfig, parse_config, read_config
from monarch_rl.model.sizes import sizes_of, trained_model
from monarch_rl.offline.program import run_program
from monarch_rl.pipeline.memory import BOTH, REPLICA, TRAINER, MemoryPlan, Sides, checkpoint_bytes, plan_memory
from monarch_rl.pipeline.settings import check_transport
from monarch_rl.runtime.devices import Devices
from monarch_rl.trainer.loss_settings import NO_CRITIC, CriticSettings
from monarch_rl.trainer.settings import TrainerSettings, check_trained
from monarch_rl.weights.transport import TransferSettings

GIB = 2**30
GPUS = {24: 23.6, 40: 39.4, 80: 79.1, 141: 139.8}
"""Nominal GB of a GPU (RTX 4090, A100, H100, H200), and the GiB that torch reports."""
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
TP = (1, 2, 4, 8)


def _shape(width: int, hidden: int, layers: int, heads: int, kv_heads: int, **other: Any) -> ModelConfig:
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return parse_config(values | other)


def _moe(width: int, layers: int, heads: int, expert: int, **other: Any) -> ModelConfig:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return _shape(width, 3 * width, layers, heads, 4, architectures=["Qwen3MoeForCausalLM"], **experts, **other)


MODELS = {
    "Qwen3-0.6B": _shape(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-1.7B": _shape(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-4B": _shape(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "Qwen3-8B": _shape(4096, 12_288, 36, 32, 8),
    "Llama-3.1-8B": _shape(
        4096, 14_336, 32, 32, 8, architectures=["LlamaForCausalLM"], vocab_size=128_256, max_position_embeddings=131_072
    ),
    "Qwen3-14B": _shape(5120, 17_408, 40, 40, 8),
    "Qwen3-32B": _shape(5120, 25_600, 64, 64, 8),
    "Qwen3-30B-A3B": _moe(2048, 48, 32, 768),
    "Qwen3-235B-A22B": _moe(4096, 94, 64, 1536),
}
"""Published shapes, from the models' ``config.json``."""


@dataclass(frozen=True)
class Trainer(TrainerSettings, flags="trainer"):
    """The trainer mesh, its micro-batches and its critic, as in recipes/ppo.py."""

    critic: CriticSettings = NO_CRITIC
    """The critic, which the advantage `gae` needs."""


@dataclass(frozen=True)
class Options:
    """Settings of the run (see the top of this file)."""

    model: str = ""
    """A model of the table, or a Hugging Face folder; empty prints the table."""
    gpu: int = 80
    """Memory of a GPU: 24, 40, 80 or 141 GB, or any other number of GiB."""
    trainer: Trainer = field(
        default_factory=lambda: Trainer(ranks=1, activation_checkpoint="full", tokens_per_microbatch=8192)
    )
    generator: GeneratorSettings = field(default_factory=GeneratorSettings)
    weights: TransferSettings = field(default_factory=TransferSettings)
    colocate: bool = False
    """A trainer rank and a replica share a GPU."""

    @property
    def sides(self) -> Sides:
        weights = self.weights
        if self.colocate and weights.transport is None:
            weights = replace(weights, transport="shared_memory")
        return Sides(self.trainer, self.generator, weights, self.colocate)


def device_bytes(gigabytes: int) -> int:
    """Bytes that torch reports for a GPU with this nominal memory."""
    return int(GPUS.get(gigabytes, gigabytes) * GIB)


def fewest(config: ModelConfig, sides: Sides, memory: int) -> tuple[str, str]:
    """The fewest trainer ranks that fit, with GiB per rank; and the fewest engine ranks that fit, with the KV cache's
    tokens and ``memory_fraction``."""
    trainer = replica = "-"
    for ranks in RANKS:
        with suppress(ValueError):  # a run would refuse this number
            changed = replace(sides.trainer, ranks=ranks)
            check_trained(config, changed)
            plan = plan_memory(config, sides._replace(trainer=changed), memory)
            if plan.fits(TRAINER):
                trainer = f"{ranks} x {sum(plan.trainer.values()) / GIB:.0f}"
                break
    for tp in TP:
        with suppress(ValueError):
            served = replace(sides.generator, tp=tp)
            check_served(config, served, on_gpu=True)
            plan = plan_memory(config, sides._replace(generator=served), memory)
            if plan.fits(REPLICA):
                replica = f"{tp}: {plan.cache_tokens // 1000}k, {plan.memory_fraction:.2f}"
                break
    return trainer, replica


def check(config: ModelConfig, sides: Sides) -> None:
    """Raise ValueError for settings that a run would refuse with any amount of memory."""
    check_trained(config, sides.trainer)
    check_served(config, sides.generator, on_gpu=True)
    check_context(config, sides.generator)
    if sides.colocate:
        ranks = sides.trainer.ranks
        check_transport(sides.weights, Devices("cuda", num_hosts=1, per_host=ranks), ranks, colocate=True)


def named(model: str) -> ModelConfig:
    """The config of a model of the table, or of a folder."""
    if model in MODELS:
        return MODELS[model]
    if not Path(model).is_dir():
        raise ValueError(f"model {model} is neither a folder nor a model of the table: {', '.join(MODELS)}")
    return read_config(Path(model))


def table(sides: Sides) -> str:
    """The table of models x GPUs."""
    lines = ["| model | parameters | " + " | ".join(f"{gpu} GB" for gpu in GPUS) + " |", "|---" * (2 + len(GPUS)) + "|"]
    for name, config in MODELS.items():
        cells = ["; ".join(fewest(config, sides, device_bytes(gpu))) for gpu in GPUS]
        lines.append(f"| {name} | {sizes_of(config).elements / 1e9:.2f} B | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def purposes(plan: MemoryPlan) -> str:
    """Memory of a trainer rank and of a replica, by purpose."""
    lines = ["| GiB | trainer rank | replica |", "|---|---|---|"]
    for purpose in dict.fromkeys([*plan.trainer, *plan.replica]):
        trainer, replica = (
            f"{side[purpose] / GIB:.2f}" if purpose in side else "" for side in (plan.trainer, plan.replica)
        )
        lines.append(f"| {purpose} | {trainer} | {replica} |")
    sums = [f"{sum(side.values()) / GIB:.2f}" for side in (plan.trainer, plan.replica)]
    return "\n".join([*lines, f"| together | {sums[0]} | {sums[1]} |"])


def main(options: Options) -> int:
    """Returns the exit code, 1 if the run does not fit. Raises ValueError for settings that a run would refuse."""
    t = options.trainer
    if not options.model:
        if options.colocate:
            raise ValueError("the table does not cover --colocate: use it with --model")
        print(
            "Each GPU: fewest trainer ranks x GiB on each; fewest engine ranks: tokens in the KV cache, memory_fraction"
            f"\n(activation_checkpoint {t.activation_checkpoint}, {t.tokens_per_microbatch} tokens a micro-batch, "
            f"transport {options.weights.resolved_transport})\n"
        )
        print(table(options.sides))
        return 0
    config = named(options.model)
    check(config, options.sides)
    plan = plan_memory(config, options.sides, device_bytes(options.gpu))
    print(purposes(plan))
    print(f"\na GPU has {plan.room / GIB:.1f} GiB to plan with")
    copied = checkpoint_bytes(trained_model(config, t.lora), t)
    print(f"in the host's memory, for each trainer rank on it: {copied / GIB:.2f} GiB from the first checkpoint on")
    print(f"memory_fraction {plan.memory_fraction:g}; the KV cache then has {plan.cache_tokens:,} tokens")
    if not all(plan.fits(who) for who in ((BOTH,) if options.colocate else (TRAINER, REPLICA))):
        print("it does not fit", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_program(lambda: main(tyro.cli(Options, description=__doc__)))
