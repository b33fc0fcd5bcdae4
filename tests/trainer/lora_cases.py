"""The LoRA runs that both sides of the trainer's tests make, the same in every process."""

from __future__ import annotations

from monarch_rl.adapter import LoraSettings

CASES: dict[str, tuple[str, LoraSettings]] = {
    # Rank 3 on 2 ranks: shards of A are of 2 rows and 1 row.
    "lora_all": ("qwen3", LoraSettings(rank=3, alpha=6.0)),
    # 9 heads: shards of B end within heads. Rank 1: a rank of the trainer owns no row of A.
    "lora_tied": ("llama_tied", LoraSettings(rank=1, alpha=4.0)),
    # peft's default targets: one of the two projections that torchtitan builds from one config.
    "lora_some": ("qwen3", LoraSettings(rank=4, alpha=8.0, targets=("q_proj", "v_proj"), seed=7)),
    # Experts stay as they are, each whole on one rank.
    "lora_moe": ("qwen3_moe", LoraSettings(rank=3, alpha=6.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))),
}
"""Name of the run: model of reference.py, and settings."""
