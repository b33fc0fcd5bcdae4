"""The layers of a dense Qwen, Llama or Mistral in plain PyTorch, on a machine without an accelerator.

A layer of SGLang 0.5.23 makes some sixty Python calls to choose kernels, quantisation, communication and layouts, none
of which apply to float32 on one CPU rank. With a small model they take most of a step. Here a layer is just its two
dozen operations. Every other case, such as LoRA, experts, several ranks or bfloat16, uses SGLang's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

from monarch_rl.generator.cpu.attention import BatchedAttention, Call, attend


def forward_model(
    model: Any,
    original: Callable[..., Any],
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    input_embeds: torch.Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    """Replaces ``forward`` of SGLang's dense models. Returns float32[tokens, hidden], after the last norm."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    eligible = model.__dict__.get("_monarch_rl_lean")
    if eligible is None:
        eligible = model._monarch_rl_lean = is_plain(model)
    if not eligible or input_embeds is not None or type(backend) is not BatchedAttention or not len(input_ids):
        return original(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    # Equal sequences, such as a group's prompt, are computed once. All of them need keys and values in their own cache
    # entries, from which they continue to decode.
    distinct = None if forward_batch.forward_mode.is_decode() else backend.distinct(input_ids)
    if distinct is None:
        calls, source = backend.calls, None
    else:
        calls, source = distinct.calls, distinct.source
        input_ids, positions = input_ids[distinct.rows], positions[distinct.rows]
    hidden = model.embed_tokens(input_ids)
    rotary = model.layers[0].self_attn.rotary_emb
    cos, sin = rotary.cos_sin_cache.index_select(0, positions)[:, None].chunk(2, -1)
    rotation = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    for layer in model.layers:
        x = rms_norm(hidden, hidden.shape[-1:], layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
        hidden = hidden + _attention(
            layer.self_attn, x, rotation, forward_batch.out_cache_loc, backend.token_to_kv_pool, calls, source
        )
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        x = rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)
        gate, up = linear(x, mlp.gate_up_proj.weight).chunk(2, -1)
        hidden = hidden + linear(silu(gate).mul_(up), mlp.down_proj.weight)
    hidden = rms_norm(hidden, hidden.shape[-1:], model.norm.weight, model.norm.variance_epsilon)
    return hidden if source is None else hidden[source]


def _attention(
    module: Any,
    x: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    entries: torch.Tensor,
    pool: Any,
    calls: list[Call],
    source: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one layer, float32[tokens, hidden].

    Args:
        module: the layer's attention.
        x: float32[tokens, hidden], normalised.
        rotation: cosines and signed sines, each float32[tokens, 1, width].
        entries: int64[rows]: cache entries of the batch's tokens.
        pool: the cache.
        calls: calls of the ``tokens``.
        source: int64[rows]: the token that each row equals; None if the tokens are the rows.
    """
    heads, kv_heads, width = module.num_heads, module.num_kv_heads, module.head_dim
    qkv = linear(x, module.qkv_proj.weight, module.qkv_proj.bias).view(len(x), -1, width)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    if hasattr(module, "q_norm"):
        q = rms_norm(q, (width,), module.q_norm.weight, module.q_norm.variance_epsilon)
        k = rms_norm(k, (width,), module.k_norm.weight, module.k_norm.variance_epsilon)
    # Rotate queries and keys at once: (a, b) becomes (a cos - b sin, b cos + a sin).
    qk = torch.cat((q, k), 1)
    cos, signed_sin = rotation
    q, k = torch.addcmul(qk * cos, qk.roll(width // 2, -1), signed_sin).split((heads, kv_heads), 1)
    layer = module.attn.layer_id
    k_cache, v_cache = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
    k_cache.index_copy_(0, entries, k if source is None else k[source])
    v_cache.index_copy_(0, entries, v if source is None else v[source])
    out = torch.empty_like(q)
    attend(calls, q, out, k_cache, v_cache, module.attn.scaling)
    return linear(out.view(len(x), -1), module.o_proj.weight, module.o_proj.bias)


def is_plain(model: Any) -> bool:
    """Whether :func:`forward_model` can compute a model's layers: dense, float32, on one rank, without LoRA."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.runtime_context import get_exec, get_parallel

    parallel, pool = get_parallel(), get_attn_backend().token_to_kv_pool
    whole = parallel.tp_size == parallel.pp_size == 1 and not model.layers_to_capture
    if not whole or type(pool) is not MHATokenToKVPool or pool.dtype != torch.float32 or pool.is_quantized_kv_cache:
        return False

    def plain_linear(module: Any, kind: Any) -> bool:
        if type(module) is not kind or type(module.quant_method) is not UnquantizedLinearMethod:
            return False
        return bool(module.weight.dtype == torch.float32)

    def plain_norm(module: Any) -> bool:
        return type(module) is RMSNorm and module.variance_size_override is None and not module.fp32_residual

    def plain_layer(layer: Any) -> bool:
        attention, mlp = layer.self_attn, layer.mlp
        rotary, core = attention.rotary_emb, attention.attn
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        return (
            plain_linear(attention.qkv_proj, QKVParallelLinear)
            and plain_linear(attention.o_proj, RowParallelLinear)
            and plain_linear(mlp.gate_up_proj, MergedColumnParallelLinear)
            and plain_linear(mlp.down_proj, RowParallelLinear)
            and mlp.gate_up_proj.bias is mlp.down_proj.bias is None
            and type(mlp.act_fn) is SiluAndMul
            and all(map(plain_norm, norms))
            and rotary is model.layers[0].self_attn.rotary_emb
            and type(rotary).forward_native is RotaryEmbedding.forward_native
            and rotary.is_neox_style
            and rotary.rotary_dim == attention.head_dim == core.v_head_dim
            and not hasattr(rotary, "sin_cos_cache")
            and core.attn_type == AttentionType.DECODER
            and not core.logit_cap
            and core.sliding_window_size == -1
        )

    deterministic = get_exec().deterministic.rl_on_policy_target is not None
    return not deterministic and plain_norm(model.norm) and all(map(plain_layer, model.layers))
