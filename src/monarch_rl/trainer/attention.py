"""Attention over packed episodes that share prefixes: on GPUs by flash attention, on CPUs by padded SDPA calls.

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
    """The rows at some places, [T, N, H]. The gradients of a row that is taken several times add up. As an embedding:
    its backward pass adds fastest on CPUs, and in a fixed order on GPUs."""
    return F.embedding(places, x_LNH.flatten(1)).unflatten(1, x_LNH.shape[1:])


class PackedAttention(VarlenAttention):
    """SDPA calls of padded segments, in the dtype of the input: for CPUs, which lack flash attention's varlen kernel,
    and for float32 on GPUs, which that kernel does not take.

    The episodes of a small model are so short that each call for one alone would cost more than what it computes.
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
    """Whether SDPA must be given keys for each head of queries. In float32 a GPU's fast kernel is the memory-efficient
    one, which takes no groups of heads (``sdp_utils.cpp``); with groups torch would compute, and keep, the
    probabilities of all pairs."""
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


# The number and the sizes of the padded calls change with every micro-batch. A compiler that looked into them would
# compile each anew, so it sees one operator instead, and finds the layout by its number, which is data to it. The
# backward pass computes the calls again: what autograd keeps inside of an operator is lost.


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
    # Inside of an operator autograd does not record; here it has to.
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

    torchtitan's own passes as many keys as queries. This one passes the ends of both, as ``torch.nn.attention.varlen``
    documents: flash attention aligns the causal mask at the bottom right of each segment.

    torchtitan's own ends in its constructor on Hopper and Blackwell GPUs, for which it asks for FlashAttention 3 or 4,
    unless these are installed; torch does not bring them. This one then computes by FlashAttention 2, which torch has.
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
        if self.fa2:  # takes values only as wide as queries and keys; in multi-head latent attention they are narrower
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
            # torchtitan does not let FA2 divide keys among blocks either (pytorch issue 179760).
            num_splits=1 if self.fa2 and torch.version.hip is None else None,
        )
        assert isinstance(result, torch.Tensor)
        return result[..., :value_width].to(q_BLNH.dtype).unsqueeze(0)


_lacking: set[str] = set()
"""Kernels that this process has asked for and does not have."""


def _activate_kernels() -> None:
    """Have torch compute flash attention by the kernels that torchtitan takes for this GPU, if they are there.

    Without them torch computes by its own, FlashAttention 2. FlashAttention 4 is for compute capability 10; torch
    refuses it at the first call on 12, for which torchtitan would take it as well.
    """
    kernels = utils.get_cuda_flash_attention_impl()
    if kernels is None or kernels in _lacking or current_flash_attention_impl() == kernels:
        return
    if kernels == "FA4" and utils.has_cuda_capability(11, 0):
        return
    try:
        activate_flash_attention_impl(kernels)
    # Not installed (ImportError), without a backward pass (RuntimeError), unknown to this torch (ValueError), or
    # whatever the compiler raises that FlashAttention 4 brings: none of it is a reason not to train.
    except Exception as error:
        _lacking.add(kernels)
        if isinstance(error, ImportError):
            logger.info("attention is computed by torch's FlashAttention 2; %s is not installed: %s", kernels, error)
        else:
            cause = f"{type(error).__name__}: {error}"
            logger.warning("attention is computed by torch's FlashAttention 2; %s does not start: %s", kernels, cause)


def _check_causal(config: VarlenAttention.Config) -> None:
    if config.window_size != (-1, 0):
        raise ValueError(f"attention is causal over the whole episode here, not window {config.window_size}")


def inner_attention(half_on_gpu: bool) -> VarlenAttention.Config:
    """The attention of a model that computes on a GPU in half precision, or of any other."""
    return PrefixVarlenAttention.Config() if half_on_gpu else PackedAttention.Config()
