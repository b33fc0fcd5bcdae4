"""Makes the trainer run with torch 2.11, which images of GPU machines contain. Only for tools/gpu_check.py.

torchtitan 0.3.0 and this project require torch 2.13 or later. torch 2.11 lacks a name that torchtitan imports but only
uses in its other sharding backend, and two arguments of ``varlen_attn``. The arguments can be dropped: FlashAttention 2
in torch 2.11 accepts fewer key heads than query heads without an option, and does not split keys among blocks.
"""

from __future__ import annotations

import inspect
from typing import Any


def prepare() -> None:
    """Add what this torch lacks; does nothing on torch 2.13 and later. Call it before torchtitan is imported."""
    import torch.distributed.fsdp
    import torch.nn.attention.varlen

    fsdp: Any = torch.distributed.fsdp
    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
    varlen: Any = torch.nn.attention.varlen
    known = inspect.signature(varlen.varlen_attn).parameters
    if "enable_gqa" in known:
        return
    original = varlen.varlen_attn

    def varlen_attn(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{name: value for name, value in kwargs.items() if name in known})

    varlen.varlen_attn = varlen_attn
