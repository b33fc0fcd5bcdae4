"""The model built from a DeepSeek-V3's ``config.json``, and the configs that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_rl.trainer import platform

platform.prepare()

from monarch_rl.model.config import parse_config  # noqa: E402
from monarch_rl.trainer.model_config import model_config  # noqa: E402

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "rope_parameters": YARN,
}


def config_of(change: dict[str, Any]) -> Any:
    return model_config(parse_config(CONFIG | change), logprob_chunk=16, longest=512, half_on_gpu=False)


def test_the_first_layers_are_dense_and_rotary_scaling_is_taken_over() -> None:
    layers = config_of({}).layers
    assert [layer.moe is None for layer in layers] == [True, False, False]
    rope = layers[0].attention.rope
    assert (rope.scaling, rope.theta, rope.rope_factor, rope.original_seq_len) == ("yarn", 50000.0, 40, 4096)
    old = {"rope_parameters": None, "rope_theta": 50000.0, "rope_scaling": {**YARN, "type": "yarn"}}
    assert config_of(old).layers[0].attention.rope == rope


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
        ({"scoring_func": "softmax"}, "softmax"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"rope_parameters": YARN | {"mscale": 0.7}}, "'yarn' .*mscale_all_dim"),
        ({"rope_parameters": YARN | {"mscale": None}}, "'yarn' .*mscale_all_dim"),
        ({"rope_parameters": YARN | {"mscale": None, "mscale_all_dim": None}}, "'yarn' .*mscale_all_dim"),
        ({"rope_parameters": YARN | {"mscale": 0.0, "mscale_all_dim": 0.0}}, "'yarn' .*mscale_all_dim"),
        ({"rope_parameters": YARN | {"attention_factor": 1.2}}, "attention_factor"),
        ({"rope_parameters": YARN | {"rope_type": "linear"}}, "'yarn' .*mscale_all_dim"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_of(change)
