"""How torchtitan builds each model family: its layers, and an entry for each architecture of
``model/architecture.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torchtitan.models.common import RMSNorm
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, build_mla_moe_layers, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from monarch_rl.model.architecture import DEEPSEEK_V3, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, Architecture
from monarch_rl.model.config import NORM_EPS, ModelConfig
from monarch_rl.trainer.attention import inner_attention
from monarch_rl.trainer.modules import LOADED, HalfRotaryEmbedding, PairRotaryEmbedding
from monarch_rl.trainer.moe import LOADED_EXPERTS, exact, moe_config, replaying

# -- Qwen, Llama and Mistral layers: grouped-query attention, and an MLP or experts -----------------------------------


def gqa_layers(
    hf: ModelConfig, *, longest: int, half_on_gpu: bool, block: type[TransformerBlock]
) -> list[TransformerBlock.Config]:
    """The blocks of a model with grouped-query attention, for its config.

    Args:
        longest: most tokens of an episode.
        half_on_gpu: the model computes in half precision on a GPU.
        block: torchtitan's class of the blocks.
    """
    dim = hf.hidden_size
    return [
        block.Config(
            attention_norm=norm_config(hf, dim),
            ffn_norm=norm_config(hf, dim),
            attention=_attention(hf, longest, half_on_gpu),
            **_feed_forward(hf, layer),
        )
        for layer in range(hf.num_hidden_layers)
    ]


def _attention(hf: ModelConfig, longest: int, half_on_gpu: bool) -> GQAttention.Config:
    architecture, dim, heads = hf.architecture, hf.hidden_size, hf.num_attention_heads
    head_dim = hf.head_dim
    attention = make_gqa_config(
        dim=dim,
        n_heads=heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        wqkv_param_init=LOADED | {"bias": LOADED["weight"]} if architecture.biased_heads else LOADED,
        wo_param_init=LOADED,
        inner_attention=inner_attention(half_on_gpu),
        rope=_half_rotary(hf, head_dim, longest),
        # Unfused, so that every Hugging Face tensor is one parameter, sharded by rows.
        fuse_qkv=False,
        qk_norm=norm_config(hf, head_dim) if architecture.normed_heads else None,
    )
    if architecture.biased_heads:
        projections = attention.qkv_linear
        assert isinstance(projections, QKVLinear.Config)
        projections.wq.bias = projections.wkv.bias = True
    return attention


def norm_config(hf: ModelConfig, size: int) -> RMSNorm.Config:
    """Config of an RMSNorm over ``size`` elements."""
    return RMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=LOADED)


def _feed_forward(hf: ModelConfig, layer: int) -> dict[str, Any]:
    if layer in hf.sparse_layers:
        return {"moe": moe_config(hf)}
    dim, width = hf.hidden_size, hf.intermediate_size
    dense = make_ffn_config(dim=dim, hidden_dim=width, w1_param_init=LOADED, w2w3_param_init=LOADED)
    return {"feed_forward": dense}


def _half_rotary(hf: ModelConfig, head_dim: int, longest: int) -> HalfRotaryEmbedding.Config:
    rope = hf.rope_parameters
    kind, theta = rope["rope_type"], rope["rope_theta"]
    length = min(longest, hf.max_position_embeddings)
    config = HalfRotaryEmbedding.Config(dim=head_dim, max_seq_len=length, theta=theta)
    if kind == "llama3":
        config.scaling = "llama"
        config.scaling_factor = rope["factor"]
        config.low_freq_factor = rope["low_freq_factor"]
        config.high_freq_factor = rope["high_freq_factor"]
        config.original_max_position_embeddings = rope["original_max_position_embeddings"]
    return config


# -- DeepSeek-V3's layers: multi-head latent attention, shared and routed experts -------------------------------------


def deepseek_layers(hf: ModelConfig, *, longest: int, half_on_gpu: bool) -> list[TransformerBlock.Config]:
    """The blocks of a DeepSeek-V3, for its config.

    The router computes as Hugging Face's: sigmoid in fp32; the k largest of score + bias within the best groups; their
    scores, divided by their sum with ``norm_topk_prob``, times ``routed_scaling_factor``. The bias stays as loaded:
    torchtitan changes it for load balancing only by an optimiser hook, which is not registered here.

    Args:
        longest: most tokens of an episode.
        half_on_gpu: the model computes in half precision on a GPU.
    """
    rope = _pair_rotary(hf, longest)
    layers = build_mla_moe_layers(
        n_layers=hf.num_hidden_layers,
        n_dense_layers=hf.num_hidden_layers - len(hf.sparse_layers),
        dim=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        q_lora_rank=hf.q_lora_rank,
        kv_lora_rank=hf.kv_lora_rank,
        qk_nope_head_dim=hf.qk_nope_head_dim,
        qk_rope_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        mscale=hf.rope_parameters.get("mscale_all_dim") or 0.0,
        dense_hidden_dim=hf.intermediate_size,
        moe_hidden_dim=hf.moe_intermediate_size,
        num_experts=hf.num_experts,
        num_shared_experts=hf.n_shared_experts,
        router_top_k=hf.num_experts_per_tok,
        router_score_func="sigmoid",
        router_num_expert_groups=hf.n_group,
        router_num_limited_groups=hf.topk_group,
        router_route_scale=hf.routed_scaling_factor,
        router_route_norm=hf.norm_topk_prob,
        attn_backend="varlen",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        linear_init=LOADED,
        norm_init=LOADED,
        depth_init=lambda _layer: LOADED,
        depth_experts_init=lambda _layer: LOADED_EXPERTS,
        rope=rope,
    )
    for layer in layers:
        _adjust(layer, half_on_gpu=half_on_gpu)
    return layers


def _adjust(layer: TransformerBlock.Config, *, half_on_gpu: bool) -> None:
    """Replace torchtitan's modules by this package's, and set Hugging Face's eps in all norms."""
    attention: Any = layer.attention
    for norm in (layer.attention_norm, layer.ffn_norm, attention.q_norm, attention.kv_norm):
        norm.eps = NORM_EPS
    attention.inner_attention = inner_attention(half_on_gpu)
    if layer.moe is not None:
        layer.moe.router = replaying(layer.moe.router)
        layer.moe.routed_experts.inner_experts = exact(layer.moe.routed_experts.inner_experts)


def _pair_rotary(hf: ModelConfig, longest: int) -> PairRotaryEmbedding.Config:
    rope = hf.rope_parameters
    kind, theta = rope["rope_type"], rope["rope_theta"]
    length = min(longest, hf.max_position_embeddings)
    config = PairRotaryEmbedding.Config(dim=hf.qk_rope_head_dim, max_seq_len=length, theta=theta)
    if kind == "default":
        return config
    config.scaling = "yarn"
    config.rope_factor = rope["factor"]
    config.beta_fast = rope.get("beta_fast", 32)
    config.beta_slow = rope.get("beta_slow", 1)
    config.original_seq_len = rope["original_max_position_embeddings"]
    return config


# -- the families -----------------------------------------------------------------------------------------------------


class LlamaStateDictAdapter(Llama3StateDictAdapter):
    """torchtitan's Llama names without its permutation of rows: see :class:`HalfRotaryEmbedding`."""

    def _permute(self, w: torch.Tensor, *_shape: int) -> torch.Tensor:
        return w

    def _reverse_permute(self, w: torch.Tensor, *_shape: int) -> torch.Tensor:
        return w

    def _validate_hf_rope_config(self, expected_rope_cls: type) -> None:
        super()._validate_hf_rope_config(HalfRotaryEmbedding.Config)


class Qwen2StateDictAdapter(LlamaStateDictAdapter):
    """Llama's names, and the names of the biases of queries, keys and values."""

    def __init__(self, model_config: Llama3Model.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        for letter in "qkv":
            name = f"model.layers.{{}}.self_attn.{letter}_proj.bias"
            self.from_hf_map[name] = f"layers.{{}}.attention.qkv_linear.w{letter}.bias"


@dataclass(frozen=True)
class TitanFamily:
    """torchtitan's classes and functions for a model family."""

    model: type[Decoder]
    layers: Callable[..., list[TransformerBlock.Config]]
    """``(config, longest=..., half_on_gpu=...) -> blocks``; the config has passed ``check_features``."""
    parallelize: Callable[..., Decoder]
    """Function that shards the model over the ranks."""
    state_dict_adapter: type[StateDictAdapter]
    """Maps between torchtitan's and Hugging Face's tensor names."""


_QWEN3 = TitanFamily(
    Qwen3Model,
    partial(gqa_layers, block=Qwen3TransformerBlock),
    parallelize_qwen3,
    Qwen3StateDictAdapter,
)
_LLAMA = TitanFamily(
    Llama3Model,
    partial(gqa_layers, block=Llama3TransformerBlock),
    parallelize_llama,
    LlamaStateDictAdapter,
)
FAMILIES: dict[Architecture, TitanFamily] = {
    QWEN3: _QWEN3,
    QWEN3_MOE: _QWEN3,
    QWEN2: replace(_LLAMA, state_dict_adapter=Qwen2StateDictAdapter),
    LLAMA: _LLAMA,
    MISTRAL: _LLAMA,
    DEEPSEEK_V3: TitanFamily(
        DeepSeekV3Model,
        deepseek_layers,
        parallelize_deepseekv3,
        DeepSeekV3StateDictAdapter,
    ),
}
