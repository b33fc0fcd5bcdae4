"""A checksum of a tensor that is the sum of the checksums of any boxes the tensor is cut into.

The trainer holds a tensor in row shards, an engine holds it as a slice of a fused parameter, and the ranks of a tensor-
parallel engine hold rows or columns of it. Each computes its part of the same 64-bit number where its data lies,
without moving the data. A tensor is read as rows (its first dimension) of 64-bit words; the last word of a row is
padded with zero bits. With x a word, r its row and c its index in the row,

    checksum = sum over words of  x * (a(r) + b(c) * [r divisible by 8])   mod 2**64

where ``a`` is odd and ``b`` even, both spread over 64 bits by splitmix64 (Steele et al., 2014). The factor is odd,
hence invertible: a change of one word always changes the sum. Rows in wrong order change it through ``a``, columns in
wrong order through every eighth row. A box that begins or ends inside a word counts only its own bits of that word.

The cost is 1 1/8 integer additions per word, over blocks that fit a core's cache: summing each block right after it is
copied costs little more than the copy (:class:`Checksums`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from monarch_rl.weights.finite import FiniteProbe, NotFinite, not_finite
from monarch_rl.weights.manifest import Manifest

WORD = 8
"""Bytes."""
SAMPLED = 8
"""The order of columns is checked in every row whose index is a multiple of this."""
_CACHED_WORDS = 1 << 18
"""Words of a block on a CPU: 2 MiB stay in a core's cache between a copy and the sums. Measured: 0.5 to 4 MiB differ by
less than the noise."""
_DEVICE_WORDS = 1 << 24
"""Words of a block on another device: it reads its memory fast, and a call costs microseconds."""


def signed(value: int) -> int:
    """``value`` modulo 2**64 as a signed 64-bit number: sums of checksums wrap around like this."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _spread(index: torch.Tensor) -> torch.Tensor:
    """splitmix64 of int64 indices. int64 arithmetic wraps around, so it is arithmetic mod 2**64."""
    x = index * signed(0x9E3779B97F4A7C15)
    x = (x ^ _logical_shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _logical_shift(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _logical_shift(x, 31)


@lru_cache(maxsize=256)  # a model has few shapes
def _row_factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    return _spread(torch.arange(1 + first, 1 + first + count, device=device)) | 1


@lru_cache(maxsize=256)
def _column_factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    return _spread(-torch.arange(1 + first, 1 + first + count, device=device)) & -2


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box of a tensor, and the memory that holds it."""

    data: torch.Tensor
    """``[rows, columns]`` of any dtype; each row is contiguous, rows may be strided."""
    first_row: int = 0
    """The box's first row in the whole tensor."""
    first_column: int = 0
    """The box's first element in a row of the whole tensor."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows of a box that fit in cache."""

    box: int
    """Index of the box."""
    rows: slice
    """Within the box."""
    data: torch.Tensor
    """``[rows, columns]``: those rows."""
    _words: torch.Tensor
    _padded: torch.Tensor | None
    _row_sums: torch.Tensor
    _column_sums: torch.Tensor
    _offset: int

    def add(self) -> None:
        """Add the memory's present content to the sums."""
        if self._padded is not None:
            self._padded.copy_(self.data.view(torch.uint8))
        torch.sum(self._words, 1, out=self._row_sums)
        self._column_sums.add_(self._words[self._offset :: SAMPLED].sum(0))


class Checksums:
    """Checksums of several boxes on one device, planned once.

    For each use, call :meth:`RowBlock.add` of all blocks, then :meth:`take`.
    """

    def __init__(self, boxes: Sequence[TensorBox]) -> None:
        device = boxes[0].data.device
        leads = [box.first_column * box.data.element_size() % WORD for box in boxes]
        rows = [box.data.shape[0] for box in boxes]
        columns = [
            -(-(lead + box.data.shape[1] * box.data.element_size()) // WORD)
            for box, lead in zip(boxes, leads, strict=True)
        ]
        self._rows = _Weighted(rows, [_row_factors(b.first_row, n, device) for b, n in zip(boxes, rows, strict=True)])
        firsts = [box.first_column * box.data.element_size() // WORD for box in boxes]
        self._columns = _Weighted(
            columns, [_column_factors(first, n, device) for first, n in zip(firsts, columns, strict=True)]
        )
        self.blocks = [block for index in range(len(boxes)) for block in self._cut(index, boxes[index], leads[index])]

    def _cut(self, index: int, box: TensorBox, lead: int) -> list[RowBlock]:
        row_sums, column_sums = self._rows.sums[index], self._columns.sums[index]
        height, row_words = len(row_sums), len(column_sums)
        step = max(1, (_CACHED_WORDS if box.data.device.type == "cpu" else _DEVICE_WORDS) // max(1, row_words))
        width = box.data.shape[1] * box.data.element_size()
        aligned = lead == 0 and width % WORD == 0 and _on_word_boundaries(box.data)
        buffer = None if aligned else box.data.new_zeros((min(step, height), row_words), dtype=torch.int64)
        blocks = []
        for start in range(0, height if width else 0, step):
            rows = slice(start, min(start + step, height))
            data, padded = box.data[rows], None
            if buffer is None:
                words = data.view(torch.int64)
            else:
                words = buffer[: len(data)]
                padded = words.view(torch.uint8)[:, lead : lead + width]
            offset = -(box.first_row + start) % SAMPLED
            blocks.append(RowBlock(index, rows, data, words, padded, row_sums[rows], column_sums, offset))
        return blocks

    def take(self) -> torch.Tensor:
        """Return int64[boxes]: the sums of what was added since the last call, or since the start."""
        totals = self._rows.totals() + self._columns.totals()
        self._columns.flat.zero_()
        return totals


class _Weighted:
    """Several vectors of sums in one flat buffer; each is weighted and summed."""

    def __init__(self, lengths: list[int], factors: list[torch.Tensor]) -> None:
        self._factors = torch.cat(factors)
        self.flat = torch.zeros_like(self._factors)
        self.sums = list(self.flat.split(lengths))
        self._ends = torch.tensor(lengths, device=self.flat.device).cumsum(0)

    def totals(self) -> torch.Tensor:
        """int64[vectors]. Differences of cumulative sums are exact, because all arithmetic is modulo 2**64."""
        cumulative = torch.nn.functional.pad((self.flat * self._factors).cumsum(0), (1, 0))
        return cumulative[self._ends].diff(prepend=cumulative[:1])


def tensor_checksum(rows: torch.Tensor, first_row: int = 0, first_column: int = 0) -> torch.Tensor:
    """Checksum of a box of a tensor.

    Args:
        rows: ``[R, ...]`` of any dtype: all rows, or consecutive ones, or consecutive columns of them. May be strided
            (a slice of a fused parameter); one-dimensional tensors have rows of one element.
        first_row: index of ``rows[0]`` in the whole tensor.
        first_column: index of the first element of each row of ``rows`` in the row of the whole tensor.

    Returns:
        int64 scalar on the device of ``rows``. Checksums of boxes that make up a tensor add up to its own, mod 2**64.
    """
    flat = rows.flatten(1) if rows.dim() > 1 else rows.reshape(-1, 1)
    if flat.stride(1) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    checksums = Checksums([TensorBox(flat, first_row, first_column)])
    for block in checksums.blocks:
        block.add()
    return checksums.take()[0]


def _on_word_boundaries(data: torch.Tensor) -> bool:
    return data.data_ptr() % WORD == 0 and data.stride(0) * data.element_size() % WORD == 0


class ShardChecksums:
    """The part of trainer rank ``rank`` in the checksum of each tensor of the manifest, planned once.

    Args:
        views: flat uint8, one for each of ``manifest.shards[rank]``: the memory that each use sums.
    """

    def __init__(self, manifest: Manifest, rank: int, views: Sequence[torch.Tensor]) -> None:
        self._specs = [manifest.tensors[shard.tensor] for shard in manifest.shards[rank]]
        self._boxes = []
        for shard, spec, view in zip(manifest.shards[rank], self._specs, views, strict=True):
            row = spec.numel // spec.shape[0] if spec.shape else 1
            self._boxes.append(TensorBox(view.view(spec.dtype).view(-1, row), shard.start // row))
        self._checksums = Checksums(self._boxes) if self._boxes else None
        blocks = self._checksums.blocks if self._checksums is not None else []
        self._probe = FiniteProbe([block.data for block in blocks]) if blocks else None
        self._tensors = torch.tensor([shard.tensor for shard in manifest.shards[rank]])
        self._count = len(manifest.tensors)

    def take(self) -> list[int]:
        """Checksums of the memory's present content: signed 64-bit, one for each tensor of the manifest.

        Raises:
            NotFinite: a tensor holds NaN or infinity; names the first one, and the place in it. Each block is looked at
                right after it is summed, while it is in the core's cache.
        """
        sums = torch.zeros(self._count, dtype=torch.int64)
        if self._checksums is not None and self._probe is not None:
            for index, block in enumerate(self._checksums.blocks):
                block.add()
                self._probe.look(index)
            sums.index_add_(0, self._tensors, self._checksums.take().cpu())
            self._check_finite({self._checksums.blocks[index].box for index in self._probe.suspects()})
        contributions: list[int] = sums.tolist()
        return contributions

    def _check_finite(self, suspects: Iterable[int]) -> None:
        """Raise NotFinite if one of these boxes holds NaN or infinity."""
        for box, spec in ((self._boxes[index], self._specs[index]) for index in sorted(suspects)):
            problem = not_finite(box.data, box.first_row * box.data.shape[1], spec.shape)
            if problem:
                raise NotFinite(f"{spec.name} {problem}")
