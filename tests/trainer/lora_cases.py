"""The LoRA runs of both sides of the trainer's tests, the same in every process."""

from __future__ import annotations

from monarch_rl.model.lora import LoraSettings

CASES: dict[str, tuple[str, LoraSettings]] = {
    # Rank 3 on 2 ranks: shards of A are of 2 rows and 1 row.
    "lora_all": ("qwen3", LoraSettings(rank=3, alpha=6.0)),
    # 9 heads: shards of B end within heads. Rank 1: a rank of the trainer owns no row of A.
    "lora_tied": ("llama_tied", LoraSettings(rank=1, alpha=4.0)),
    # peft's default targets: one of the two projections that torchtitan builds from one config.
    "lora_some": ("qwen3", LoraSettings(rank=4, alpha=8.0, targets=("q_proj", "v_proj"), seed=7)),
    # Their biases are not trained; k has no adapter, but a bias.
    "lora_biased": ("qwen2", LoraSettings(rank=2, alpha=4.0, targets=("q_proj", "v_proj", "o_proj"))),
    # Experts are not trained, each is whole on one rank.
    "lora_moe": ("qwen3_moe", LoraSettings(rank=3, alpha=6.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))),
}
"""Name of the run: model of reference.py, and settings."""
VARIANTS: dict[str, str] = {"lora_divided": "lora_moe", "lora_still": "lora_all", "lora_recomputed": "lora_all"}
"""Further runs on the ranks, and the case of each: experts divided among them, learning rate 0, activation
checkpointing."""
EXPERT_CASES: dict[str, tuple[str, LoraSettings]] = {
    "experts_all": ("moe", LoraSettings(rank=3, alpha=6.0)),
    # Some layers dense: their MLP has one adapter.
    "experts_mixed": ("moe_mixed", LoraSettings(rank=4, alpha=8.0, targets=("gate_proj", "down_proj"), seed=7)),
    # Experts that never get a token: if two ranks divide them, all experts of the second one.
    "experts_starved": ("moe_starved", LoraSettings(rank=1, alpha=4.0, targets=("q_proj", "up_proj"))),
}
"""Adapters on experts: model of moe_reference.py, and settings."""
EXPERT_LAYOUTS = {2: (1, 2), 4: (2,)}
"""Ranks, and the degrees of expert parallelism tested on them."""
