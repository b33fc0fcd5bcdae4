"""Which part of a sharded tensor is this rank's."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

NamedShape = tuple[str, tuple[int, ...]]
"""Name and shape of a whole tensor."""
Run = tuple[str, int, int]
"""``(name, first element, elements)``: a contiguous part, row-major, of a tensor that a rank holds."""


def local_run(value: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's part of a tensor, and the index (row-major) of its first element in the whole.

    Raises:
        ValueError: the part is not a contiguous run of elements (sharded along another dimension than 0).
    """
    if not isinstance(value, DTensor):
        return value, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = value.to_local()
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(shape[1:]) != tuple(value.shape[1:]):
        raise ValueError(f"a tensor sharded by {value.placements} cannot be sent: only shards of whole rows can")
    row = value.numel() // value.shape[0]
    return local, (offset[0] if offset else 0) * row
