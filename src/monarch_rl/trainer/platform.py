"""Lets torchtitan 0.3.0 run where there is no GPU; does next to nothing where there is one.

:func:`prepare` must run before anything else of torchtitan is imported. It works around two things:

- ``torchtitan.tools.utils`` reports "cuda" on a machine without an accelerator, and other modules copy that
  value when they are imported: it is set to the CPU first.
- ``torchtitan.distributed.minimal_async_ep.kernels`` imports triton, which CPU builds of torch lack; every
  decoder imports it. Without triton the module is replaced by one whose functions raise when called.

:func:`force_sum_reduction` is needed after the model is sharded: FSDP2 scales gradients with a reduction that
gloo does not have.
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
"""With it torch begins with TF32 on (``aten/src/ATen/Context.h``); some images set it."""
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
                f"{TF32_OVERRIDE} is set: what is to be multiplied in float32 outside of this project's own passes is "
                "multiplied in TF32, with 10 bits. Unset it",
                stacklevel=2,
            )
        return torch.device("cuda", torch.cuda.current_device())
    # The router asks for fp32 by autocast, which CPUs have only for half precision: there it uses the compute dtype.
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(_KERNELS, _NoKernels(_KERNELS))
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    return torch.device("cpu")


@contextmanager
def tensor_float32(enabled: bool) -> Iterator[None]:
    """Have a GPU multiply float32 matrices in TF32 during the block, where ``enabled``, and else in float32.

    TF32 keeps 10 bits behind the leading one. It is meant for operands that are bfloat16 values, which have 7: their
    products are the same, and are added in float32 too. So it is with the LM head, which is several times faster then,
    and with routers. Gradients of logits are rounded, but those of the parameters are rounded to bfloat16 next.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def force_sum_reduction(model: nn.Module) -> None:
    """Reduce gradients with a plain sum where gloo is used.

    torchtitan sets the gradient divide factor to 1, which FSDP2 turns into ``PREMUL_SUM``; gloo has only
    ``SUM``, and with a factor of 1 the two are equal.
    """
    from torch.distributed.fsdp import FSDPModule

    if torch.cuda.is_available():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


# -- a trainer rank whose updates can be made again bit for bit on a GPU: docs/journal.md -----------------------------

CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Streams that share a workspace choose other split sums. One of the two values that torch takes beside its switch."""


def make_deterministic() -> None:
    """Have this process compute the same bits from the same tensors; operations that cannot raise RuntimeError.

    It comes before the first handle of cuBLAS and the first communicator of NCCL, which read the environment.
    """
    os.environ.update(CUBLAS_WORKSPACE)
    fix_nccl_order()
    torch.use_deterministic_algorithms(True)
    # Else every torch.empty() is filled, also what is written whole right after.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
