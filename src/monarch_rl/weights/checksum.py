"""An additive checksum: the checksum of a tensor is the sum of the checksums of any boxes into which it is split.

The trainer holds a tensor in row shards, an engine holds it as a slice of a fused parameter, and the ranks of a tensor-
parallel engine hold rows or columns of it. Each computes its part of the same 64-bit number in place, without moving
data. A tensor is read as rows (its first dimension) of 64-bit words; the last word of a row is padded with zero bits.
With x a word, r its row and c its index in the row,

    checksum = sum over words of  x * (a(r) + b(c) * [r divisible by 8])   mod 2**64

where ``a`` is odd and ``b`` even, both spread over 64 bits by splitmix64 (Steele et al., 2014). The factor is odd,
hence invertible: a change of one word always changes the sum. A wrong order of rows changes it through ``a``, a wrong
order of columns through every eighth row. A box that begins or ends inside a word counts only its own bits of it.

The cost is 1 1/8 integer additions per word, over blocks that fit in a core's cache: summing each block right after it
is copied costs little more than the copy (:class:`Checksums`).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from monarch_rl.errors import NotFinite
from monarch_rl.weights.blocks import (
    SAMPLED,
    Block,
    BoxPart,
    BoxShape,
    GatheredBlock,
    PartBlock,
    TensorBox,
    find_spans,
    in_words,
    memory_kind,
    stack_span,
)
from monarch_rl.weights.manifest import Manifest, Shard

_CACHED_WORDS = 1 << 18
"""Words of a block on a CPU: 2 MiB stay in a core's cache between the copy and the sums. Measured: 0.5 to 4 MiB differ
by less than the noise."""
_DEVICE_WORDS = 1 << 24
"""Words of a block on another device, which reads memory fast, while each call costs microseconds."""
_SMALL_SHARE = 32
"""A box of at most 1 / this of a CPU block counts as small: copying 64 KiB costs less than the calls for a block."""


def signed(value: int) -> int:
    """``value`` modulo 2**64 as a signed 64-bit number: sums of checksums wrap around like this."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def add_checksums(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Sum of the trainer ranks' partial checksums, int64[tensors] each: int64[tensors], mod 2**64."""
    return np.add.reduce(np.stack(parts), dtype=np.int64)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _spread(index: torch.Tensor) -> torch.Tensor:
    """splitmix64 of int64 indices. int64 arithmetic wraps around, which makes it arithmetic mod 2**64."""
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


@lru_cache(maxsize=256)
def _word_factors(shape: BoxShape, device: torch.device) -> torch.Tensor:
    """int64[rows * words of a row]: the factor of each word of a box."""
    rows = _row_factors(shape.first_row, shape.rows, device)
    factors = rows[:, None].repeat(1, shape.words)
    factors[-shape.first_row % SAMPLED :: SAMPLED] += _column_factors(shape.first_word, shape.words, device)
    return factors.flatten()


class Checksums:
    """Checksums of the tensors of several boxes on one device. Planned once, used repeatedly.

    For each use, call :meth:`Block.add` of all blocks, then :meth:`take`. Tensors of one kind are summed together, as
    one box or as small boxes, so the number of kernels grows with the bytes, with the number of large boxes, and with
    the number of different kinds of small boxes.
    """

    def __init__(self, boxes: Sequence[TensorBox]) -> None:
        self._device = boxes[0].data.device
        self._words_at_once = _CACHED_WORDS if self._device.type == "cpu" else _DEVICE_WORDS
        shapes = [BoxShape.of(box) for box in boxes]
        large: list[int] = []
        small: dict[BoxShape, list[int]] = {}
        for index, (box, shape) in enumerate(zip(boxes, shapes, strict=True)):
            if len(box.tensors) * shape.rows * shape.words * _SMALL_SHARE <= _CACHED_WORDS:
                small.setdefault(shape, []).append(index)
            else:
                large.append(index)
        counts = [len(boxes[i].tensors) for i in large]
        row_factors = [_row_factors(shapes[i].first_row, shapes[i].rows, self._device) for i in large]
        column_factors = [_column_factors(shapes[i].first_word, shapes[i].words, self._device) for i in large]
        self._rows = _Weighted(counts, row_factors, self._device)
        self._columns = _Weighted(counts, column_factors, self._device)
        gathered = [i for alike in small.values() for i in alike]
        counts = [len(boxes[i].tensors) for i in gathered]
        word_factors = [_word_factors(shapes[i], self._device) for i in gathered]
        self._gathered = _Weighted(counts, word_factors, self._device)
        self.blocks: list[Block] = []
        for index, row_sums, column_sums in zip(large, self._rows.sums, self._columns.sums, strict=True):
            self.blocks += self._cut(index, boxes[index], shapes[index], row_sums, column_sums)
        for alike in small.values():
            self.blocks += self._gather({i: boxes[i] for i in alike}, self._gathered.of(gathered.index(alike[0])))
        firsts = np.cumsum([0, *(len(box.tensors) for box in boxes)])
        order = [np.arange(firsts[i], firsts[i + 1]) for i in (*large, *gathered)]
        self._order = torch.from_numpy(np.argsort(np.concatenate(order))).to(self._device)

    def _cut(
        self, index: int, box: TensorBox, shape: BoxShape, row_sums: torch.Tensor, column_sums: torch.Tensor
    ) -> Iterator[Block]:
        count, rows = len(box.tensors), shape.rows
        tensors_at_once = self._words_at_once // max(1, rows * shape.words)
        step = rows if tensors_at_once else max(1, self._words_at_once // shape.words)
        tensors_at_once = min(count, max(1, tensors_at_once))
        scratch = None
        if not in_words(box.tensors, shape.lead):
            scratch = row_sums.new_zeros((tensors_at_once, min(step, rows), shape.words))
        for first in range(0, count, tensors_at_once):
            tensors = slice(first, min(first + tensors_at_once, count))
            for row in range(0, rows, step):
                part = BoxPart(index, tensors, slice(row, min(row + step, rows)))
                yield PartBlock(part, box, row_sums, column_sums, scratch)

    def _gather(self, boxes: dict[int, TensorBox], words: torch.Tensor) -> Iterator[Block]:
        """Blocks of small boxes of one shape and dtype, each with as many boxes as fit in cache."""
        together: dict[int, TensorBox] = {}
        first = count = 0
        for index, box in boxes.items():
            if together and (count + len(box.tensors)) * words.shape[1] > self._words_at_once:
                yield GatheredBlock(together, words[first : first + count])
                together, first, count = {}, first + count, 0
            together[index] = box
            count += len(box.tensors)
        yield GatheredBlock(together, words[first : first + count])

    def take(self) -> torch.Tensor:
        """Checksums of the content added since the last call, or since the start: int64[tensors of all boxes]."""
        totals = self._rows.totals() + self._columns.totals()
        self._columns.clear()
        return torch.cat([totals, self._gathered.totals()]).index_select(0, self._order)


class _Weighted:
    """Weighted sums of vectors: each box has one vector per tensor. Boxes with the same factors share memory, so that
    few kernels are needed."""

    def __init__(self, counts: list[int], factors: list[torch.Tensor], device: torch.device) -> None:
        """
        Args:
            counts: number of vectors of each box.
            factors: factors of each box's vectors, int64[length of a vector]. Boxes of one kind must pass the same
                object.
            device: device of the vectors.
        """
        members: dict[int, list[int]] = {}
        for index, factor in enumerate(factors):
            members.setdefault(id(factor), []).append(index)
        self._kinds: list[tuple[torch.Tensor, torch.Tensor]] = []
        """For each kind: vectors ``[count, length]`` and factors."""
        self.sums: list[torch.Tensor] = [torch.empty(0)] * len(factors)
        """Vectors of each box: int64 ``[count, length]``."""
        self._kind_of = dict[int, int]()
        places: list[np.ndarray] = []
        firsts = np.cumsum([0, *counts])
        for indices in members.values():
            factor = factors[indices[0]]
            vectors = factor.new_zeros((sum(counts[i] for i in indices), len(factor)))
            for index, part in zip(indices, vectors.split([counts[i] for i in indices]), strict=True):
                self.sums[index], self._kind_of[index] = part, len(self._kinds)
                places.append(np.arange(firsts[index], firsts[index + 1]))
            self._kinds.append((vectors, factor))
        order = np.argsort(np.concatenate([np.zeros(0, np.int64), *places]))
        self._order = torch.from_numpy(order).to(device)

    def of(self, box: int) -> torch.Tensor:
        """The vectors of all boxes that share memory with ``box``."""
        return self._kinds[self._kind_of[box]][0]

    def clear(self) -> None:
        for vectors, _ in self._kinds:
            vectors.zero_()

    def totals(self) -> torch.Tensor:
        """Weighted sum of each vector: int64[vectors of all boxes]."""
        totals = [_weighted_sums(vectors, factors) for vectors, factors in self._kinds]
        return torch.cat(totals).index_select(0, self._order) if totals else self._order


def _weighted_sums(vectors: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    if vectors.device.type == "cpu":
        return torch.mv(vectors, factors)
    return (vectors * factors).sum(1)  # CUDA has no integer matrix multiplication


def tensor_checksum(rows: torch.Tensor, first_row: int = 0, first_column: int = 0) -> torch.Tensor:
    """Checksum of a box of a tensor.

    Args:
        rows: ``[R, ...]`` of any dtype: all rows, consecutive rows, or consecutive columns of these. May be strided (a
            slice of a fused parameter). A one-dimensional tensor has rows of one element.
        first_row: index of ``rows[0]`` in the whole tensor.
        first_column: index of the first element of each row of ``rows`` in the row of the whole tensor.

    Returns:
        int64 scalar on the device of ``rows``. The checksums of boxes that make up a tensor add up to the tensor's
        checksum, mod 2**64.
    """
    flat = rows.flatten(1) if rows.dim() > 1 else rows.reshape(-1, 1)
    if flat.stride(1) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    checksums = Checksums([TensorBox(flat, first_row, first_column)])
    for block in checksums.blocks:
        block.add()
    return checksums.take()[0]


class ShardChecksums:
    """A trainer rank's partial checksum of each tensor of the manifest. Planned once, used repeatedly.

    Args:
        manifest: manifest of the version.
        rank: trainer rank.
        views: flat uint8, one for each of ``manifest.shards[rank]``: the memory that each use sums.
    """

    def __init__(self, manifest: Manifest, rank: int, views: Sequence[torch.Tensor]) -> None:
        self._manifest, self._shards = manifest, manifest.shards[rank]
        held = [self._rows(shard, view) for shard, view in zip(self._shards, views, strict=True)]
        first_rows = [shard.start // rows.shape[1] for shard, rows in zip(self._shards, held, strict=True)]
        kinds = [(first, memory_kind(rows)) for first, rows in zip(first_rows, held, strict=True)]
        self._spans = find_spans(kinds, [rows.data_ptr() for rows in held])
        """Runs of shards; each one is a box."""
        self._boxes = [
            TensorBox(stack_span([held[i] for i in span[:2]], len(span)), first_rows[span[0]]) for span in self._spans
        ]
        self._checksums = Checksums(self._boxes) if self._boxes else None
        blocks = self._checksums.blocks if self._checksums is not None else []
        self._probe = FiniteProbe([block.values for block in blocks]) if blocks else None
        self._tensors = torch.tensor([shard.tensor for shard in self._shards])

    def _rows(self, shard: Shard, view: torch.Tensor) -> torch.Tensor:
        spec = self._manifest.tensors[shard.tensor]
        return view.view(spec.dtype).view(-1, spec.numel // spec.shape[0] if spec.shape else 1)

    def take(self) -> np.ndarray:
        """Partial checksums of the memory's current content: int64, one for each tensor of the manifest.

        Raises:
            NotFinite: a tensor holds NaN or infinity; names the first such tensor, and the index in it.
        """
        sums = torch.zeros(len(self._manifest.tensors), dtype=torch.int64)
        if self._checksums is not None and self._probe is not None:
            blocks = self._checksums.blocks
            for index, block in enumerate(blocks):
                block.add()
                self._probe.look(index)  # right after the sum, while the block is in the core's cache
            sums.index_add_(0, self._tensors, self._checksums.take().cpu())
            self._check_finite({part.box for index in self._probe.suspects() for part in blocks[index].parts})
        return np.asarray(sums)

    def _check_finite(self, suspects: Iterable[int]) -> None:
        """Raise NotFinite if one of these boxes holds NaN or infinity."""
        for box in sorted(suspects):
            for index, rows in zip(self._spans[box], self._boxes[box].tensors, strict=True):
                shard = self._shards[index]
                spec = self._manifest.tensors[shard.tensor]
                problem = not_finite(rows, shard.start, spec.shape)
                if problem:
                    raise NotFinite(f"{spec.name} {problem}")


# -- finite check: whether tensors hold only finite values, while they are in a core's cache --------------------------
# A sum of floats is finite only if each of them is: NaN propagates, and so does infinity, because inf - inf is NaN. A
# sum of finite values may overflow; then the values are checked one by one. 16-bit floats on a CPU are not summed,
# because it would convert them one by one; their bits are compared instead: the positive floats from infinity on are
# the largest signed 16-bit integers, and the negative ones from minus infinity on the largest unsigned ones.


class FiniteProbe:
    """A fast check of parts of tensors for values that are not finite, one number per part. Planned once, used
    repeatedly. Nothing is copied back from the device before :meth:`suspects`.

    Args:
        parts: the memory to check, of any shape and dtype, all on one device.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._sums = torch.zeros(len(parts), device=parts[0].device)
        self._wrong: set[int] = set()
        self._look = [self._planned(index, part) for index, part in enumerate(parts)]

    def look(self, index: int) -> None:
        """Check the current content of a part."""
        self._look[index]()

    def suspects(self) -> list[int]:
        """The parts that may hold values that are not finite: all that do, and parts whose sum overflows."""
        overflown: list[int] = (~self._sums.isfinite()).nonzero().flatten().tolist()
        wrong, self._wrong = self._wrong, set()
        return sorted({*wrong, *overflown})

    def _planned(self, index: int, part: torch.Tensor) -> Callable[[], object]:
        if not part.is_floating_point():
            return lambda: None
        if part.itemsize == 2 and part.device.type == "cpu":
            return partial(self._compare, index, *_bits(part))
        return partial(torch.sum, part, tuple(range(part.dim())), dtype=torch.float32, out=self._sums[index])

    def _compare(self, index: int, positive: np.ndarray, above: int, negative: np.ndarray, below: int) -> None:
        if positive.max() >= above or negative.max() >= below:
            self._wrong.add(index)


def _bits(part: torch.Tensor) -> tuple[np.ndarray, int, np.ndarray, int]:
    """16-bit floats on a CPU as signed and as unsigned integers, each with the smallest integer that is not finite."""
    infinities = torch.tensor([math.inf, -math.inf], dtype=part.dtype).view(torch.int16).numpy()
    bits = part.view(torch.int16).numpy()
    return bits, int(infinities[0]), bits.view(np.uint16), int(infinities.view(np.uint16)[1])


def not_finite(part: torch.Tensor, first: int, shape: Sequence[int]) -> str | None:
    """Describes the values of a part that are not finite, in words that follow the tensor's name; None if all are.

    Args:
        part: consecutive elements of a tensor, row-major, in any shape.
        first: index of the part's first element in the whole tensor.
        shape: shape of the whole tensor.
    """
    wrong = (~part.flatten().isfinite()).nonzero().flatten()
    if not len(wrong):
        return None
    place = [int(index) for index in np.unravel_index(int(wrong[0]) + first, tuple(shape))]
    return values_not_finite(len(wrong), place)


def values_not_finite(count: int, place: Sequence[int]) -> str:
    """Message that a tensor holds ``count`` values that are not finite, the first at the indices ``place``."""
    return f"holds {count} values that are not finite, the first at {list(place)}"


def sums_by_layer(tensors: Sequence[str], dtype: str, checksums: np.ndarray) -> dict[str, int]:
    """CRC-32 of the checksums of each layer's tensors, by the layer's name with the dtype: a fraction of the tensors'
    number, of which there are many thousands with experts.

    Args:
        tensors: names of the tensors.
        dtype: dtype of which the checksums are.
        checksums: int64[tensors].
    """
    layers: dict[str, int] = {}
    for tensor, checksum in zip(tensors, checksums, strict=True):
        layer = re.sub(r"(\.\d+)\..*", r"\1", tensor)
        name = f"{layer} ({dtype.removeprefix('torch.')})"
        layers[name] = zlib.crc32(checksum.tobytes(), layers.get(name, 0))
    return layers
