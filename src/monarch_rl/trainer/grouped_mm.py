"""Products of rows with their own expert's weight, in any dtype, for the compiler: torch describes them to it in
bfloat16 alone, and computes them in others too.

Shapes: R rows, E experts, I width in, O width out.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("monarch_rl::grouped_mm", mutates_args=())
def opaque_grouped_mm(x_RI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Each row times the weight of its expert: the rows of expert e end before ``ends_E[e]`` (int32)."""
    return torch._grouped_mm(x_RI, weight_EIO, offs=ends_E)


@opaque_grouped_mm.register_fake
def _(x_RI: torch.Tensor, weight_EIO: torch.Tensor, _ends_E: torch.Tensor) -> torch.Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[2])


def _keep_for_backward(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


@torch.library.custom_op("monarch_rl::grouped_mm_backward", mutates_args=())
def _grouped_mm_backward(
    grad_RO: torch.Tensor, x_RI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_x_RI = torch._grouped_mm(grad_RO, weight_EIO.transpose(-2, -1), offs=ends_E)
    grad_weight_EIO = torch._grouped_mm(x_RI.transpose(-2, -1), grad_RO, offs=ends_E)
    return grad_x_RI.contiguous(), grad_weight_EIO.contiguous()


@_grouped_mm_backward.register_fake
def _(
    _grad: torch.Tensor, x_RI: torch.Tensor, weight_EIO: torch.Tensor, _ends_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return x_RI.new_empty(x_RI.shape), weight_EIO.new_empty(weight_EIO.shape)


def _backward(ctx: Any, grad_RO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x_RI, weight_EIO, ends_E = ctx.saved_tensors
    grad_x_RI, grad_weight_EIO = torch.ops.monarch_rl.grouped_mm_backward(
        grad_RO.contiguous(), x_RI, weight_EIO, ends_E
    )
    return grad_x_RI, grad_weight_EIO, None


opaque_grouped_mm.register_autograd(_backward, setup_context=_keep_for_backward)
