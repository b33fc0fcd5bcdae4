"""Boxes (rectangular parts of tensors), and the blocks in which they are copied and summed.

A block fits in cache, and is summed at once: a part of a large box, or several small boxes. The checksum
(``weights/checksum.py``) is computed from the row sums and column sums of large boxes, and from the words of small
boxes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from monarch_rl.weights.manifest import INT_OF_SIZE

WORD = 8
"""Bytes of a word."""
SAMPLED = 8
"""The checksum detects a wrong order of columns in rows whose index is a multiple of this."""


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box of a tensor, or the same box of several tensors of the same kind, and the memory that holds it."""

    data: torch.Tensor
    """``[rows, columns]``, or ``[tensors, rows, columns]``, of any dtype. Each row is contiguous; rows and tensors may
    be strided."""
    first_row: int = 0
    """Index of the box's first row in the whole tensor."""
    first_column: int = 0
    """Index of the box's first element in a row of the whole tensor."""

    @property
    def tensors(self) -> torch.Tensor:
        """``[tensors, rows, columns]``."""
        return self.data if self.data.dim() == 3 else self.data[None]


class BoxShape(NamedTuple):
    """Position of a box in its tensor, in rows and words, and its dtype."""

    first_row: int
    rows: int
    first_word: int
    words: int
    """Words per row."""
    lead: int
    """Bytes of each row's first word that precede the box."""
    dtype: torch.dtype

    @classmethod
    def of(cls, box: TensorBox) -> BoxShape:
        size = box.data.element_size()
        first_word, lead = divmod(box.first_column * size, WORD)
        rows, columns = box.data.shape[-2:]
        words = -(-(lead + columns * size) // WORD)
        return cls(box.first_row, rows, first_word, words, lead, box.data.dtype)

    def padded(self, words: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """The part of ``words`` (``[..., words of a row]``) to which the bits of ``data`` (integers) are copied."""
        start = self.lead // data.element_size()
        return words.view(data.dtype)[..., start : start + data.shape[-1]]


@dataclass(frozen=True, slots=True)
class BoxPart:
    """A part of a box."""

    box: int
    """Index of the box."""
    tensors: slice
    rows: slice

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """This part of ``data`` (``[tensors, rows, columns]``)."""
        return data[self.tensors, self.rows]


class Block(Protocol):
    """A unit of summation that fits in cache: a part of a box, or several small boxes."""

    parts: list[BoxPart]
    data: list[torch.Tensor]
    """Memory of each part, ``[tensors, rows, columns]``."""
    values: torch.Tensor
    """After :meth:`add`, the content of the whole block in the boxes' dtype, possibly with zeros in between."""

    def add(self) -> None:
        """Add the current content of the memory to the sums."""


class PartBlock:
    """A part of one box: whole tensors, or some rows of one tensor."""

    def __init__(
        self,
        part: BoxPart,
        box: TensorBox,
        row_sums: torch.Tensor,
        column_sums: torch.Tensor,
        scratch: torch.Tensor | None,
    ) -> None:
        """
        Args:
            part: the part.
            box: the whole box.
            row_sums: int64 ``[tensors, rows]``, for the whole box.
            column_sums: int64 ``[tensors, words of a row]``, for the whole box.
            scratch: int64 zeros to copy the part's words to, if its memory is not aligned to words; else None.
        """
        shape = BoxShape.of(box)
        self.values = part.of(box.tensors)
        self.parts, self.data = [part], [self.values]
        self._row_sums, self._column_sums = row_sums[part.tensors, part.rows], column_sums[part.tensors]
        bits = self.values.view(INT_OF_SIZE[box.data.element_size()])
        self._bits, self._padded = bits, None
        if scratch is None:
            words = bits.view(torch.int64)
        else:
            words = scratch[: len(bits), : bits.shape[1]]
            self._padded = shape.padded(words, bits)
        self._words, self._sampled = words, words[:, -(box.first_row + part.rows.start) % SAMPLED :: SAMPLED]

    def add(self) -> None:
        if self._padded is not None:
            self._padded.copy_(self._bits)
        torch.sum(self._words, 2, out=self._row_sums)
        self._column_sums.add_(self._sampled.sum(1))


class GatheredBlock:
    """Small boxes of one shape and dtype, whose words are first copied next to each other."""

    def __init__(self, boxes: dict[int, TensorBox], words: torch.Tensor) -> None:
        """
        Args:
            boxes: the boxes, by index.
            words: int64 zeros ``[tensors of all boxes, words of a box]``, to which the words are copied.
        """
        self.parts = [BoxPart(index, slice(None), slice(None)) for index in boxes]
        self.data = [box.tensors for box in boxes.values()]
        self.values = words.view(self.data[0].dtype)
        self._bits, self._targets = [], list[torch.Tensor]()
        shape = BoxShape.of(next(iter(boxes.values())))
        split = words.view(len(words), shape.rows, shape.words).split([len(data) for data in self.data])
        for data, target in zip(self.data, split, strict=True):
            bits = data.view(INT_OF_SIZE[data.element_size()])
            aligned = in_words(bits, shape.lead)
            self._bits.append(bits.view(torch.int64) if aligned else bits)
            self._targets.append(target if aligned else shape.padded(target, bits))

    def add(self) -> None:
        torch._foreach_copy_(self._targets, self._bits)


def in_words(bits: torch.Tensor, lead: int) -> bool:
    """Whether rows (the last dimension) begin and end at word boundaries of memory."""
    size = bits.element_size()
    on_words = all(stride * size % WORD == 0 for stride in bits.stride()[:-1])
    return lead == 0 and bits.shape[-1] * size % WORD == 0 and on_words and bits.data_ptr() % WORD == 0


# -- spans: neighbouring tensors of one kind at equal distances in memory, on which one kernel can work at once --------
# The experts of a layer have tensors of their own by name. In the trainer, in an area and in the engine, these are
# slices of one block of memory.


def find_spans(kinds: Sequence[Hashable], *places: Sequence[int]) -> list[range]:
    """Split items into spans: neighbours of one kind at equal distances.

    Args:
        kinds: kind of each item; members of a span have equal kinds.
        places: position of each item in memory, for one memory or several. In each memory, all members of a span have
            the same positive distance from the member before.

    Returns:
        Indices of each span's members, in order.
    """
    spans: list[range] = []
    first = 0
    while first < len(kinds):
        end, steps = first + 1, [0] * len(places)
        if end < len(kinds):
            steps = [place[end] - place[first] for place in places]
        if all(step > 0 for step in steps):
            while (
                end < len(kinds)
                and kinds[end] == kinds[first]
                and all(place[end] - place[end - 1] == step for place, step in zip(places, steps, strict=True))
            ):
                end += 1
        spans.append(range(first, end))
        first = end
    return spans


def stack_span(members: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """The memory of all members of a span as one tensor: ``[count, *shape of a member]``.

    Args:
        members: the first two members, or the only one.
        count: number of members of the span.
    """
    first = members[0]
    step = members[1].data_ptr() - first.data_ptr() if count > 1 else first.nbytes
    return first.as_strided((count, *first.shape), (step // first.element_size(), *first.stride()))


def memory_kind(tensor: torch.Tensor) -> Hashable:
    """The memory properties that all members of a span have in common."""
    return tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
