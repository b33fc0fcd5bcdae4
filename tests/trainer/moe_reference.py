"""transformers' side of the mixture-of-experts tests: tiny models, their logits, and plainly trained models.

A program of its own, so that nothing has patched transformers in its process:  moe_reference.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from monarch_rl.episode.episode import Group
from tests.trainer.batches import LR, MAX_NEW_TOKENS, STEPS, VOCABULARY, WEIGHT_DECAY, batch, single
from tests.trainer.moe_cases import MODELS, TRAININGS
from tests.trainer.reference import MOE, QWEN3, dr_grpo, logprobs_of_sampled

DEEPSEEK: dict[str, Any] = {
    **QWEN3,
    "num_hidden_layers": 3,
    "num_key_value_heads": QWEN3["num_attention_heads"],
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
}
CONFIGS = {
    "moe": Qwen3MoeConfig(**MOE),
    "moe_mixed": Qwen3MoeConfig(
        **MOE
        | {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "moe_few": Qwen3MoeConfig(**MOE | {"num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": False}),
    "moe_starved": Qwen3MoeConfig(**MOE),
    "deepseek": DeepseekV3Config(**DEEPSEEK),
}


def load(folder: Path) -> Any:
    """The plain loop over experts, not a grouped kernel like the trainer's."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


def make(folder: Path, names: Sequence[str] = MODELS) -> None:
    """Write each model with its logits for some tokens."""
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms of exactly 1 would hide mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
            for block in model.model.layers[1:] if name == "deepseek" else []:
                block.mlp.gate.e_score_correction_bias.normal_(0, 0.1)
            if name == "moe_starved":  # the first element is large in every token, and selects experts 0 and 1
                model.model.embed_tokens.weight[:, 0] = 1.0
                for block in model.model.layers:
                    block.mlp.gate.weight[:2, 0] = 1.0
        model.save_pretrained(folder / name)
        model = load(folder / name).eval()
        tokens = torch.randint(0, VOCABULARY, (3, 50))
        with torch.no_grad():
            save_file({"tokens": tokens, "logits": model(tokens).logits}, folder / f"{name}.logits")


def supervised(model: Any, groups: list[Group]) -> torch.Tensor:
    """Cross-entropy of the trainable tokens, over episodes x the most tokens that each may sample."""
    episodes = [episode for group in groups for episode in group.episodes]
    total = torch.stack([logprob for episode in episodes for logprob, _ in logprobs_of_sampled(model, episode)]).sum()
    return -total / (len(episodes) * MAX_NEW_TOKENS)


def train(folder: Path, training: str) -> None:
    """Train plainly: one episode at a time, no packing, no sharding. Writes losses and gradient norms of each step."""
    model = load(folder / TRAININGS[training])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=WEIGHT_DECAY)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        single_episode = training == "moe_single"
        loss = supervised(model, single(step)) if single_episode else dr_grpo(model, batch(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append({"loss": loss.item(), "grad_norm": norm.item()})
    model.save_pretrained(folder / training)
    (folder / f"{training}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    make(target)
    for name in TRAININGS:
        train(target, name)
