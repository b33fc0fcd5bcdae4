"""DeepSeek-V3's layers in torchtitan's classes: multi-head latent attention, shared and routed experts."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.deepseek_v3 import build_mla_moe_layers

from monarch_rl.model.features import NORM_EPS
from monarch_rl.model.folder import num_experts, rope_parameters
from monarch_rl.trainer.attention import inner_attention
from monarch_rl.trainer.modules import LOADED, PairRotaryEmbedding
from monarch_rl.trainer.moe import LOADED_EXPERTS, exact, replaying


def deepseek_layers(hf: dict[str, Any], *, longest: int, half_on_gpu: bool) -> list[TransformerBlock.Config]:
    """The blocks of a DeepSeek-V3, for its ``config.json``.

    The router is Hugging Face's: sigmoid in fp32; the k largest of score + bias within the best groups; their scores,
    divided by their sum with ``norm_topk_prob``, times ``routed_scaling_factor``. The bias stays as loaded: torchtitan
    changes it, to balance the load, only by a hook of the optimiser that is not registered here.

    Args:
        longest: tokens of the longest episode.
        half_on_gpu: they compute on a GPU in half precision.
    """
    rope = _rope(hf, longest)
    layers = build_mla_moe_layers(
        n_layers=hf["num_hidden_layers"],
        n_dense_layers=hf["first_k_dense_replace"],
        dim=hf["hidden_size"],
        n_heads=hf["num_attention_heads"],
        q_lora_rank=hf.get("q_lora_rank") or 0,
        kv_lora_rank=hf["kv_lora_rank"],
        qk_nope_head_dim=hf["qk_nope_head_dim"],
        qk_rope_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        mscale=rope_parameters(hf).get("mscale_all_dim") or 0.0,
        dense_hidden_dim=hf["intermediate_size"],
        moe_hidden_dim=hf["moe_intermediate_size"],
        num_experts=num_experts(hf),
        num_shared_experts=hf["n_shared_experts"],
        router_top_k=hf["num_experts_per_tok"],
        router_score_func="sigmoid",
        router_num_expert_groups=hf["n_group"],
        router_num_limited_groups=hf["topk_group"],
        router_route_scale=hf["routed_scaling_factor"],
        router_route_norm=hf["norm_topk_prob"],
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
    """Put this package's modules in the place of torchtitan's, and Hugging Face's eps in all norms."""
    attention: Any = layer.attention
    for norm in (layer.attention_norm, layer.ffn_norm, attention.q_norm, attention.kv_norm):
        norm.eps = NORM_EPS
    attention.inner_attention = inner_attention(half_on_gpu)
    if layer.moe is not None:
        layer.moe.router = replaying(layer.moe.router)
        layer.moe.routed_experts.inner_experts = exact(layer.moe.routed_experts.inner_experts)


def _rope(hf: dict[str, Any], longest: int) -> PairRotaryEmbedding.Config:
    rope = rope_parameters(hf)
    kind, theta = rope["rope_type"], rope["rope_theta"]
    length = min(longest, hf["max_position_embeddings"])
    config = PairRotaryEmbedding.Config(dim=hf["qk_rope_head_dim"], max_seq_len=length, theta=theta)
    if kind == "default":
        return config
    config.scaling = "yarn"
    config.rope_factor = rope["factor"]
    config.beta_fast = rope.get("beta_fast", 32)
    config.beta_slow = rope.get("beta_slow", 1)
    config.original_seq_len = rope["original_max_position_embeddings"]
    return config
