"""Small models for measuring trainer ranks' memory, each with settings under which another purpose takes most."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from monarch_rl.algorithms.packing import KEYS_PER_TOKEN
from monarch_rl.model.config import ModelConfig, parse_config
from monarch_rl.model.lora import LoraSettings
from monarch_rl.model.tensors import expected_tensors
from monarch_rl.trainer.loss_settings import CriticSettings
from monarch_rl.trainer.settings import TrainerSettings

RANKS = 2


def folder_of(root: Path, name: str) -> Path:
    """The folder of a case's model; files next to it start with its name."""
    return root / name.replace(" ", "_")


@dataclass(frozen=True)
class Case:
    """A model, settings, and the tokens of each of two micro-batches."""

    shape: dict[str, Any]
    tokens: int
    settings: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    keys: int = 1
    """Keys that are gathered per token: more where episodes share prefixes."""

    @property
    def config(self) -> ModelConfig:
        named = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        if self.experts:
            named = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        return parse_config(_COMMON | named | self.shape)

    @property
    def trainer(self) -> TrainerSettings:
        return TrainerSettings(ranks=RANKS, tokens_per_microbatch=self.tokens, **{"logprob_chunk": 64} | self.settings)


_COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "attention_bias": False,
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "intermediate_size": 128,
}
_WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3}
CASES = {
    "activations": Case({}, 1024),
    "checkpoint": Case({"num_hidden_layers": 8}, 1024, {"activation_checkpoint": "full"}),
    "selective": Case({}, 1024, {"activation_checkpoint": "selective"}),
    "half": Case({}, 1024, {"compute_dtype": "bfloat16"}),
    "weights in half": Case(_WIDE, 64, {"compute_dtype": "bfloat16"}),
    "vocabulary in half": Case({"vocab_size": 20_000}, 512, {"logprob_chunk": 256, "compute_dtype": "bfloat16"}),
    "tied": Case({"vocab_size": 20_000, "tie_word_embeddings": True, "hidden_size": 256}, 256),
    "experts": Case(_EXPERTS, 1024, experts=True),
    "divided experts": Case(
        _EXPERTS | {"moe_intermediate_size": 512}, 256, {"expert_parallel": 2, "activation_checkpoint": "full"}, True
    ),
    "divided heads": Case({}, 1024, {"tp": 2}),
    "divided selective": Case({}, 1024, {"tp": 2, "activation_checkpoint": "selective"}),
    "divided vocabulary": Case({"vocab_size": 20_000}, 512, {"tp": 2, "logprob_chunk": 256}),
    "shared prefixes": Case({"num_key_value_heads": 8}, 2048, keys=KEYS_PER_TOKEN),
    "shared checkpoint": Case(
        {"num_key_value_heads": 8, "num_hidden_layers": 2, "head_dim": 64},
        2048,
        {"activation_checkpoint": "full"},
        keys=KEYS_PER_TOKEN,
    ),
    "critic": Case(_WIDE, 64, {"critic": CriticSettings(lr=1e-3)}),
    "lora": Case(_WIDE, 512, {"lora": LoraSettings(rank=8), "activation_checkpoint": "full"}),
}


def make_model(folder: Path, case: Case) -> None:
    """Write a Hugging Face folder with random weights, without a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case.config.raw))
    shapes = expected_tensors(case.config)
    save_file(
        {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
