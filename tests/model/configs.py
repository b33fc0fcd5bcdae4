"""Complete configs of small models; tests change some of their keys."""

from __future__ import annotations

from typing import Any

from monarch_rl.model.config import ModelConfig, parse_config

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_DEEPSEEK: dict[str, Any] = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 4, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "norm_topk_prob": True},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "q_lora_rank": None, "kv_lora_rank": 32},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20},
}


def qwen3_values(**change: Any) -> dict[str, Any]:
    return _QWEN3 | change


def qwen3(**change: Any) -> ModelConfig:
    return parse_config(qwen3_values(**change))


def qwen3_moe(**change: Any) -> ModelConfig:
    return parse_config(_QWEN3 | _EXPERTS | change)


def deepseek_values(**change: Any) -> dict[str, Any]:
    """Without the keys that only SGLang needs."""
    return _QWEN3 | _DEEPSEEK | change


def deepseek(**change: Any) -> ModelConfig:
    return parse_config(deepseek_values(**change))
