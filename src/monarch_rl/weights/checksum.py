"""A checksum of a tensor that adds up over shards and over slices of fused parameters.

The trainer holds a tensor in row shards, the engine holds it as a slice of a fused parameter. Both compute the
same 64-bit number, each where its data lies, without moving the data: with x a word of a row's bits (64 bits if
rows are made of such, else one element), r its row (first dimension) and c its place within the row,

    checksum = sum over words of  x * (a(r) + b(c))   mod 2**64

where ``a`` is odd and ``b`` even, both spread over 64 bits by splitmix64 (Steele et al., 2014). The factor is
odd, hence invertible: a change of one word always changes the sum. Sums are taken per row and per column first,
in pieces that fit a core's cache, so the cost is one pass over memory and two integer additions a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from monarch_rl.weights.manifest import Manifest

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 17
"""Words summed at a time: 1 MiB of int64 stays in a core's cache between the two sums."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _spread(index: torch.Tensor) -> torch.Tensor:
    """splitmix64 of int64 indices; int64 arithmetic wraps, which is arithmetic mod 2**64."""
    x = index * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _logical_shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _logical_shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _logical_shift(x, 31)


@lru_cache(maxsize=256)  # a model has few shapes, and a commit computes them while decoding stands still
def _row_factors(first_row: int, height: int, device: torch.device) -> torch.Tensor:
    return _spread(torch.arange(1 + first_row, 1 + first_row + height, device=device)) | 1


@lru_cache(maxsize=256)
def _column_factors(width: int, device: torch.device) -> torch.Tensor:
    return _spread(-torch.arange(1, 1 + width, device=device)) & -2


def tensor_checksum(rows: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Checksum of whole rows of a tensor.

    Args:
        rows: ``[R, ...]`` of any dtype: all rows, or consecutive ones. May be strided (a slice of a fused
            parameter); one-dimensional tensors have rows of one element.
        first_row: index of ``rows[0]`` in the whole tensor. Checksums of disjoint runs of rows add up (mod
            2**64) to that of the whole.

    Returns:
        int64 scalar on the device of ``rows``.
    """
    words = _words(rows)
    height, width = words.shape
    a, b = _row_factors(first_row, height, words.device), _column_factors(width, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    columns = torch.zeros(width, dtype=torch.int64, device=words.device)
    step = max(1, _CHUNK // max(1, width))
    for start in range(0, height, step):
        piece = words[start : start + step].to(torch.int64)
        total += (piece.sum(1) * a[start : start + step]).sum()
        columns += piece.sum(0)
    return total + (columns * b).sum()


def _words(rows: torch.Tensor) -> torch.Tensor:
    """``[R, W]`` integers: 64-bit words where a whole row divides into them, else the elements' own bits."""
    flat = rows.flatten(1) if rows.dim() > 1 else rows.reshape(-1, 1)
    if flat.shape[1] * flat.dtype.itemsize % 8:
        return flat.view(_INT_OF_SIZE[flat.dtype.itemsize])
    aligned = flat.is_contiguous() and flat.storage_offset() * flat.dtype.itemsize % 8 == 0
    return (flat if aligned else flat.clone()).view(torch.int64)


def shard_checksums(manifest: Manifest, rank: int, views: Sequence[torch.Tensor]) -> list[int]:
    """What trainer rank ``rank`` contributes to the checksum of each tensor of the manifest, signed 64-bit.

    Args:
        views: flat uint8, one for each of ``manifest.shards[rank]``.
    """
    device = views[0].device if views else torch.device("cpu")
    sums = torch.zeros(len(manifest.tensors), dtype=torch.int64, device=device)
    for shard, view in zip(manifest.shards[rank], views, strict=True):
        spec = manifest.tensors[shard.tensor]
        row = spec.numel // spec.shape[0] if spec.shape else 1
        rows = view.view(spec.dtype).view(-1, *spec.shape[1:])
        sums[shard.tensor] += tensor_checksum(rows, shard.start // row)
    found: list[int] = sums.tolist()
    return found
