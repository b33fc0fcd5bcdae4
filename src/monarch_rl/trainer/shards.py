"""Which part of a sharded tensor this rank holds."""

from __future__ import annotations

from math import prod

import torch
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from monarch_rl.weights.checksum import values_not_finite

NamedShape = tuple[str, tuple[int, ...]]
"""Name and shape of a whole tensor."""
Span = tuple[str, int, int]
"""``(name, first element, number of elements)``: a contiguous (row-major) span of a tensor that a rank holds."""
TENSOR_PARALLEL = "tp"
"""torchtitan's name of the device mesh dimension of tensor parallelism."""


def local_span(value: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's part of a tensor, and the row-major index of its first element in the whole tensor.

    Raises:
        ValueError: the part is not contiguous, because the tensor is sharded along another dimension than 0.
    """
    if not isinstance(value, DTensor):
        return value, 0
    local = value.to_local()
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(shape[1:]) != tuple(value.shape[1:]):
        raise ValueError(f"a tensor sharded by {value.placements} cannot be sent: only shards of whole rows can be")
    row = value.numel() // value.shape[0]
    return local, (offset[0] if offset else 0) * row


def not_finite_part(value: torch.Tensor) -> str | None:
    """Describes the non-finite values in this rank's part of a tensor, to follow the tensor's name; None without
    any."""
    local, offset = value, (0,) * value.ndim
    if isinstance(value, DTensor):
        local = value.to_local()
        _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    wrong = (~local.isfinite()).nonzero()
    if not len(wrong):
        return None
    return values_not_finite(len(wrong), [int(i) + first for i, first in zip(wrong[0], offset, strict=True)])


def has_columns(value: torch.Tensor) -> bool:
    """Whether tensor-parallel ranks divide the tensor by columns."""
    tensor_parallel = _tensor_parallel_dim(value)
    return tensor_parallel is not None and _placement(value, tensor_parallel).is_shard(1)


def by_rows(value: torch.Tensor) -> torch.Tensor:
    """The tensor redistributed from columns to whole rows among tensor-parallel ranks, if they hold columns. Each rank
    holds as many elements as before. All ranks call it together."""
    if not has_columns(value):
        return value
    assert isinstance(value, DTensor)
    return value.redistribute(placements=_by_rows(value))


def row_span(value: torch.Tensor) -> tuple[int, int]:
    """First element and number of elements of this rank's part after :func:`by_rows`, without communication."""
    assert isinstance(value, DTensor)
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, _by_rows(value))
    return offset[0] * value.shape[1], prod(shape)


def _by_rows(value: DTensor) -> list[Placement]:
    tensor_parallel = _tensor_parallel_dim(value)
    return [Shard(0) if dim == tensor_parallel else p for dim, p in enumerate(value.placements)]


def is_owner(value: torch.Tensor) -> bool:
    """Whether this rank publishes its part: a part that all tensor-parallel ranks hold is published by the first one
    only."""
    tensor_parallel = _tensor_parallel_dim(value)
    if tensor_parallel is None or not _placement(value, tensor_parallel).is_replicate():
        return True
    assert isinstance(value, DTensor)
    return value.device_mesh.get_local_rank(tensor_parallel) == 0


def _tensor_parallel_dim(value: torch.Tensor) -> int | None:
    names = (value.device_mesh.mesh_dim_names or ()) if isinstance(value, DTensor) else ()
    return names.index(TENSOR_PARALLEL) if TENSOR_PARALLEL in names else None


def _placement(value: torch.Tensor, dim: int) -> Placement:
    assert isinstance(value, DTensor)
    return value.placements[dim]
