"""Attention over packed episodes that share prefixes: flash attention on GPUs, padded SDPA calls on CPUs.

Shapes: B batch (always 1: episodes are packed in one row), L inputs of the row, N heads, H head size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module
from torchtitan.tools import utils

from monarch_rl.trainer.attention_layout import AttentionLayout, layout_of

logger = logging.getLogger("monarch_rl")


def _rows(x_LNH: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The rows at ``places``, [T, N, H]. The gradients of a row that is taken several times add up."""
    # As an embedding: its backward pass is the fastest on CPUs, and adds in a fixed order on GPUs.
    return F.embedding(places, x_LNH.flatten(1)).unflatten(1, x_LNH.shape[1:])


class PackedAttention(VarlenAttention):
    """SDPA calls on batches of padded segments, in the dtype of the input: for CPUs, which lack flash attention's
    varlen kernel, and for float32 on GPUs, which that kernel does not support.

    Segments are batched because the episodes of a small model are so short that a call for a single one would cost more
    than what it computes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        _check_causal(config)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: AttentionLayout,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_unused: Any,
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            result: torch.Tensor = torch.ops.monarch_rl.packed_attention(
                q_BLNH, k_BLNH, v_BLNH, attention_masks.number, scale, enable_gqa
            )
            return result
        return _padded_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale, enable_gqa)


def _repeats_heads(q: torch.Tensor) -> bool:
    """Whether keys and values must be repeated for each head of queries before SDPA."""
    # In float32 the fast kernel of a GPU is the memory-efficient one, which does not support grouped heads
    # (sdp_utils.cpp): with them torch would compute, and keep, the probabilities of all pairs.
    return q.device.type != "cpu"


def _padded_attention(
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    layout: AttentionLayout,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    padded, results = layout.padded_calls, []
    queries = _rows(q_BLNH[0], padded.queries).split([call.queries.size for call in padded.calls])
    keys, values = (_rows(x[0], padded.keys).split([call.keys.size for call in padded.calls]) for x in (k_BLNH, v_BLNH))
    for call, *of_call in zip(padded.calls, queries, keys, values, strict=True):
        q, k, v = (x.unflatten(0, (len(call.queries), -1)).transpose(1, 2) for x in of_call)
        if enable_gqa and _repeats_heads(q):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        result = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=call.mask,
            is_causal=call.mask is None,
            scale=scale,
            enable_gqa=enable_gqa and k.shape[1] != q.shape[1],
        )
        results.append(result.transpose(1, 2).flatten(0, 1))
    return _rows(torch.cat(results) if len(results) > 1 else results[0], padded.outputs).unsqueeze(0)


# The number and the sizes of the padded calls change with every micro-batch, so a compiler that traced them would
# recompile for each. It gets one opaque operator instead, which looks up the layout by its number, a tensor. The
# backward pass recomputes the calls, because what autograd saves inside an operator is lost.


@torch.library.custom_op("monarch_rl::packed_attention", mutates_args=())
def _packed_attention(
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    layout: torch.Tensor,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    return _padded_attention(q_BLNH, k_BLNH, v_BLNH, layout_of(layout), scale, enable_gqa).contiguous()


@_packed_attention.register_fake
def _(
    q_BLNH: torch.Tensor,
    _k: torch.Tensor,
    v_BLNH: torch.Tensor,
    _layout: torch.Tensor,
    _scale: float | None,
    _enable_gqa: bool,
) -> torch.Tensor:
    return q_BLNH.new_empty(*q_BLNH.shape[:-1], v_BLNH.shape[-1])


@torch.library.custom_op("monarch_rl::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad_BLNH: torch.Tensor,
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    layout: torch.Tensor,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = q, k, v = [x.detach().requires_grad_() for x in (q_BLNH, k_BLNH, v_BLNH)]
    # Autograd does not record inside an operator; here it has to.
    record = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with record, torch.enable_grad():
        output = _padded_attention(q, k, v, layout_of(layout), scale, enable_gqa)
    grad_q, grad_k, grad_v = (grad.contiguous() for grad in torch.autograd.grad(output, inputs, grad_BLNH))
    return grad_q, grad_k, grad_v


@_packed_attention_backward.register_fake
def _(
    _grad: torch.Tensor,
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    _layout: torch.Tensor,
    _scale: float | None,
    _enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in (q_BLNH, k_BLNH, v_BLNH))
    return q, k, v


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    q_BLNH, k_BLNH, v_BLNH, layout, ctx.scale, ctx.enable_gqa = inputs
    ctx.save_for_backward(q_BLNH, k_BLNH, v_BLNH, layout)


def _backward(ctx: Any, grad_BLNH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.monarch_rl.packed_attention_backward(
        grad_BLNH.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.enable_gqa
    )
    return (*grads, None, None, None)


_packed_attention.register_autograd(_backward, setup_context=_keep_for_backward)


class PrefixVarlenAttention(VarlenAttention):
    """For GPUs: one call of flash attention's varlen kernel, with the keys and values of shared prefixes gathered.

    torchtitan's class passes as many keys as queries. This one passes cumulative lengths of both, as
    ``torch.nn.attention.varlen`` documents: flash attention aligns the causal mask at the bottom right of each segment.

    On Hopper and Blackwell GPUs the constructor of torchtitan's class fails unless FlashAttention 3 or 4 is installed,
    which torch does not include. This one falls back to FlashAttention 2, which torch includes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        _check_causal(config)
        self.window_size = config.window_size
        _activate_kernels()
        self.fa2 = current_flash_attention_impl() in (None, "FA2")

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: AttentionLayout,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_unused: Any,
    ) -> torch.Tensor:
        layout = attention_masks
        # The kernel takes half precision only.
        q, k, v = (x[0].to(torch.bfloat16) for x in (q_BLNH, k_BLNH, v_BLNH))
        value_width = v.shape[-1]
        if self.fa2:  # needs values as wide as queries and keys; in multi-head latent attention they are narrower
            v = F.pad(v, (0, q.shape[-1] - value_width))
        if layout.keys is not None:
            k, v = _rows(k, layout.keys), _rows(v, layout.keys)
        result = varlen_attn(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            layout.query_ends,
            layout.key_ends,
            layout.max_queries,
            layout.max_keys,
            scale=scale,
            window_size=self.window_size,
            enable_gqa=enable_gqa,
            # Like torchtitan, do not let FA2 split keys among blocks (pytorch issue 179760).
            num_splits=1 if self.fa2 and torch.version.hip is None else None,
        )
        assert isinstance(result, torch.Tensor)
        return result[..., :value_width].to(q_BLNH.dtype).unsqueeze(0)


_lacking: set[str] = set()
"""Kernels that this process has tried to activate without success."""


def _activate_kernels() -> None:
    """Activate the flash attention kernels that torchtitan chooses for this GPU, if they are installed.

    Without them torch uses its own FlashAttention 2. FlashAttention 4 is for compute capability 10. torchtitan would
    also choose it on 12, where torch refuses it at the first call.
    """
    kernels = utils.get_cuda_flash_attention_impl()
    if kernels is None or kernels in _lacking or current_flash_attention_impl() == kernels:
        return
    if kernels == "FA4" and utils.has_cuda_capability(11, 0):
        return
    try:
        activate_flash_attention_impl(kernels)
    # Not installed (ImportError), without a backward pass (RuntimeError), unknown to this torch (ValueError), or
    # anything that FlashAttention 4's own compiler raises: training works without these kernels.
    except Exception as error:
        _lacking.add(kernels)
        if isinstance(error, ImportError):
            logger.info("attention uses torch's FlashAttention 2: %s is not installed: %s", kernels, error)
        else:
            cause = f"{type(error).__name__}: {error}"
            logger.warning("attention uses torch's FlashAttention 2: %s does not start: %s", kernels, cause)


def _check_causal(config: VarlenAttention.Config) -> None:
    if config.window_size != (-1, 0):
        raise ValueError(f"only causal attention over whole episodes is supported, not window {config.window_size}")


def inner_attention(half_on_gpu: bool) -> VarlenAttention.Config:
    """The config of the attention for this device and precision."""
    return PrefixVarlenAttention.Config() if half_on_gpu else PackedAttention.Config()
