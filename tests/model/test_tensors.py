"""The tensors that a folder must have are those that transformers saves, for every supported family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from monarch_rl.model.architecture import ARCHITECTURES
from monarch_rl.model.config import check_features, read_config
from monarch_rl.model.tensors import check_weights, expected_tensors, read_header, saved_dtype

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"head_dim": 12}),
    ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    ("qwen3_moe", {**EXPERTS, "head_dim": 8, "mlp_only_layers": [1]}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("llama", {}),
    ("llama", {"head_dim": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("mistral", {"head_dim": 12, "sliding_window": None}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 20}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None, "num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("kind", "change"), MODELS)
def test_expected_tensors_equal_those_that_transformers_saves(
    kind: str, change: dict[str, Any], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | change)).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    check_features(config)
    saved = {name: shape for path in tmp_path.glob("*.safetensors") for name, shape in read_header(path).items()}
    assert saved == expected_tensors(config)
    check_weights(config)


def test_every_supported_family_is_tested() -> None:
    made = {"".join(word.capitalize() for word in kind.split("_")) + "ForCausalLM" for kind, _ in MODELS}
    assert made == set(ARCHITECTURES)


def test_only_a_deepseek_may_have_an_extra_layer(tmp_path: Path) -> None:
    """A layer for multi-token prediction, which transformers ignores, too."""
    for kind, change in (("deepseek_v3", {**LATENT, "q_lora_rank": 20}), ("llama", {})):
        folder = tmp_path / kind
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | change)).save_pretrained(folder)
        save_file({"model.layers.3.enorm.weight": torch.zeros(32)}, folder / "more.safetensors")
    check_weights(read_config(tmp_path / "deepseek_v3"))
    with pytest.raises(ValueError, match=r"more\.safetensors .*model\.layers\.3\.enorm\.weight"):
        check_weights(read_config(tmp_path / "llama"))


@pytest.mark.parametrize("stated", ["bfloat16", "float32", None])
def test_a_dtype_that_the_config_does_not_state_is_that_of_the_weights(tmp_path: Path, stated: str | None) -> None:
    """As transformers loads such a folder."""
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES), dtype=dtype).save_pretrained(folder)
        values = json.loads((folder / "config.json").read_text()) | {"dtype": stated}
        (folder / "config.json").write_text(json.dumps(values))
        assert saved_dtype(read_config(folder)) == (stated or str(dtype).removeprefix("torch."))
        if stated is None:
            assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype
