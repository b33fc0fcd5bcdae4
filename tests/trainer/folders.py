"""Folders of small models with random weights, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from monarch_rl.model.config import parse_config
from monarch_rl.model.tensors import expected_tensors

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 104,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""104 ids, more than the synthetic batches have, because two ranks cannot share 101 equally."""
LLAMA = QWEN3 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
"""The first layer is dense."""


def make_folder(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Write ``config.json`` and random weights in float32; norms are near 1, not 1."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.05 + (len(shape) == 1)
        for name, shape in expected_tensors(parse_config(config)).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
