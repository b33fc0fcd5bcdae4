"""The layers of Qwens, Llamas and Mistrals in torchtitan's classes: grouped-query attention, and an MLP or experts."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common import RMSNorm
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import TransformerBlock

from monarch_rl.model.architecture import architecture_of
from monarch_rl.model.folder import rope_parameters, sparse_layers
from monarch_rl.trainer.attention import inner_attention
from monarch_rl.trainer.modules import LOADED, HalfRotaryEmbedding
from monarch_rl.trainer.moe import moe_config


def gqa_layers(
    hf: dict[str, Any], *, longest: int, half_on_gpu: bool, block: type[TransformerBlock]
) -> list[TransformerBlock.Config]:
    """The blocks of a model with grouped-query attention, for its ``config.json``.

    Args:
        longest: tokens of the longest episode.
        half_on_gpu: they compute on a GPU in half precision.
        block: torchtitan's class of them.
    """
    dim = hf["hidden_size"]
    return [
        block.Config(
            attention_norm=norm_config(hf, dim),
            ffn_norm=norm_config(hf, dim),
            attention=_attention(hf, longest, half_on_gpu),
            **_feed_forward(hf, layer),
        )
        for layer in range(hf["num_hidden_layers"])
    ]


def _attention(hf: dict[str, Any], longest: int, half_on_gpu: bool) -> GQAttention.Config:
    architecture, dim, heads = architecture_of(hf), hf["hidden_size"], hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or dim // heads
    attention = make_gqa_config(
        dim=dim,
        n_heads=heads,
        n_kv_heads=hf["num_key_value_heads"],
        head_dim=head_dim,
        wqkv_param_init=LOADED | {"bias": LOADED["weight"]} if architecture.biased_heads else LOADED,
        wo_param_init=LOADED,
        inner_attention=inner_attention(half_on_gpu),
        rope=_rope(hf, head_dim, longest),
        # Unfused, every Hugging Face tensor is a parameter of its own, sharded by rows.
        fuse_qkv=False,
        qk_norm=norm_config(hf, head_dim) if architecture.normed_heads else None,
    )
    if architecture.biased_heads:
        projections = attention.qkv_linear
        assert isinstance(projections, QKVLinear.Config)
        projections.wq.bias = projections.wkv.bias = True
    return attention


def norm_config(hf: dict[str, Any], size: int) -> RMSNorm.Config:
    """A norm over ``size`` elements."""
    return RMSNorm.Config(normalized_shape=size, eps=hf["rms_norm_eps"], param_init=LOADED)


def _feed_forward(hf: dict[str, Any], layer: int) -> dict[str, Any]:
    if layer in sparse_layers(hf):
        return {"moe": moe_config(hf)}
    dim, width = hf["hidden_size"], hf["intermediate_size"]
    dense = make_ffn_config(dim=dim, hidden_dim=width, w1_param_init=LOADED, w2w3_param_init=LOADED)
    return {"feed_forward": dense}


def _rope(hf: dict[str, Any], head_dim: int, longest: int) -> HalfRotaryEmbedding.Config:
    rope = rope_parameters(hf)
    kind, theta = rope["rope_type"], rope["rope_theta"]
    length = min(longest, hf["max_position_embeddings"])
    config = HalfRotaryEmbedding.Config(dim=head_dim, max_seq_len=length, theta=theta)
    if kind == "llama3":
        config.scaling = "llama"
        config.scaling_factor = rope["factor"]
        config.low_freq_factor = rope["low_freq_factor"]
        config.high_freq_factor = rope["high_freq_factor"]
        config.original_max_position_embeddings = rope["original_max_position_embeddings"]
    return config
