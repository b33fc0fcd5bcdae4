"""Makes torchtitan 0.3.0 run on machines without a GPU, and makes trainer ranks deterministic.

:func:`prepare` must run before any other import of torchtitan. It works around two things:

- ``torchtitan.tools.utils`` reports "cuda" on a machine without an accelerator, and other modules copy that value when
  they are imported: it is set to the CPU first.
- ``torchtitan.distributed.minimal_async_ep.kernels``, which every decoder imports, needs triton, which CPU builds of
  torch lack: without triton the module is replaced by one whose functions raise when called.

:func:`force_sum_reduction` must run after the model is sharded: FSDP2 scales gradients with a reduction that gloo does
not have.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from monarch_rl.runtime.network import fix_nccl_order

TF32_OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""Makes torch start with TF32 enabled (``aten/src/ATen/Context.h``); some images set it."""
_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


class _NoKernels(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if not name.endswith("_kernel"):
            raise AttributeError(name)

        def missing(*_args: object, **_kwargs: object) -> None:
            raise RuntimeError(f"{name} needs triton and a GPU: choose another expert-parallel dispatcher")

        return missing


def prepare() -> torch.device:
    """Make torchtitan importable; returns the device of this process."""
    if torch.cuda.is_available():
        if os.environ.get(TF32_OVERRIDE) == "1":
            warnings.warn(
                f"{TF32_OVERRIDE} is set: float32 products outside of this project's own passes are computed in TF32, "
                "with 10 bits. Unset it",
                stacklevel=2,
            )
        return torch.device("cuda", torch.cuda.current_device())
    # The router requests fp32 by autocast, which CPUs support only for half precision: it uses the compute dtype there.
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(_KERNELS, _NoKernels(_KERNELS))
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    return torch.device("cpu")


@contextmanager
def tensor_float32(enabled: bool) -> Iterator[None]:
    """Multiply float32 matrices in TF32 on a GPU within the block if ``enabled``, else in float32.

    Enable it for operands whose values are bfloat16, as in the LM head, which is then several times faster, and in
    routers. TF32 keeps 10 bits after the leading one, bfloat16 only 7: products are exact, and are added in float32 in
    both cases. Gradients of logits are rounded, but those of the parameters are rounded to bfloat16 afterwards anyway.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def force_sum_reduction(model: nn.Module) -> None:
    """Reduce gradients with a plain sum if gloo is used.

    torchtitan sets the gradient divide factor to 1, which FSDP2 turns into ``PREMUL_SUM``. gloo has only ``SUM``, which
    is the same for a factor of 1.
    """
    from torch.distributed.fsdp import FSDPModule

    if torch.cuda.is_available():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


# -- deterministic trainer ranks, whose updates can be replayed bit for bit on a GPU: docs/journal.md -----------------
#
# Causes of differences, according to the sources of torch 2.13 and torchtitan; not verified on a GPU:
#   atomic additions (gradients of an embedding, index_add, scatter_add)     use_deterministic_algorithms
#   attention's backward pass     the same: flash attention's varlen kernel then orders its sums, at a cost of time and
#                                 memory. SDPA's memory-efficient kernel has no such order
#   cuBLAS, cuDNN                 CUBLAS_WORKSPACE_CONFIG; cudnn.deterministic, no benchmark
#   NCCL                          ring and simple protocol in all meshes (fix_nccl_order), unless the environment sets
#                                 others
#   torch.compile                 use_deterministic_algorithms also disables Inductor's autotuning
#   experts                       nothing: grouped matrix products have fixed sums for the shapes of the batch

CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Streams that share a workspace may choose other split sums. One of the two values that torch accepts."""


def make_deterministic() -> None:
    """Make this process compute the same bits from the same tensors. Operations that cannot then raise RuntimeError.

    Call it before the first cuBLAS handle and NCCL communicator are created, because they read the environment.
    """
    os.environ.update(CUBLAS_WORKSPACE)
    fix_nccl_order()
    torch.use_deterministic_algorithms(True)
    # Otherwise every torch.empty() is filled, even if it is overwritten right after.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
