"""Lets the trainer run with torch 2.11, which images of GPU machines bring, for tools/gpu_check.py alone.

torchtitan 0.3.0 and this project are made for torch 2.13 and later. Of what the trainer uses, torch 2.11 lacks a name
that torchtitan imports and only its other sharding backend uses, and two arguments of ``varlen_attn``. Both have no
effect there: its FlashAttention 2 takes fewer heads of keys than of queries without being told, and does not divide
keys among blocks.
"""

from __future__ import annotations

import inspect
from typing import Any


def prepare() -> None:
    """Add what this torch lacks; nothing with torch 2.13 and later. Call it before torchtitan is imported."""
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
