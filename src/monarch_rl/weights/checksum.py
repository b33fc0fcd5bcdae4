"""A checksum of a tensor that adds up over shards and over slices of fused parameters.

The trainer holds a tensor in row shards, the engine holds it as a slice of a fused parameter. Both compute the
same 64-bit number, each where its data lies, without moving the data: with x the element's bits, r its row
(first dimension) and c its place within the row,

    checksum = sum over elements of  x * (a(r) + b(c))   mod 2**64

where ``a`` is odd and ``b`` even, both spread over 64 bits by splitmix64 (Steele et al., 2014). The factor is
odd, hence invertible: a change of one element always changes the sum. Sums are taken per row and per column
first, so the cost is two passes of integer addition over the data.
"""

from __future__ import annotations

import torch

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
"""Elements summed at a time: bounds the temporary int64 copy to 32 MiB."""


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
    bits = rows.view(_INT_OF_SIZE[rows.dtype.itemsize]) if rows.dtype.is_floating_point else rows
    bits = bits.flatten(1) if bits.dim() > 1 else bits.reshape(-1, 1)
    height, width = bits.shape
    a = _spread(torch.arange(1 + first_row, 1 + first_row + height, device=bits.device)) | 1
    b = _spread(-torch.arange(1, 1 + width, device=bits.device)) & -2
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    step = max(1, _CHUNK // max(1, width))
    for start in range(0, height, step):
        wide = bits[start : start + step].to(torch.int64)
        total += (wide.sum(1) * a[start : start + step]).sum() + (wide.sum(0) * b).sum()
    return total
