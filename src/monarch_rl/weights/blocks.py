"""Boxes of tensors, and the blocks in which they are copied and summed.

A block is what is summed at a time, because it fits in cache: a part of a large box, or several small ones. The
checksum (``weights/checksum.py``) is made of the sums of rows and of columns of large boxes, and of the words of small
ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from monarch_rl.weights.manifest import INT_OF_SIZE

WORD = 8
"""Bytes."""
SAMPLED = 8
"""The order of columns is checked in every row whose index is a multiple of this."""


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box of a tensor, or the same box of several tensors that are alike, and the memory that holds it."""

    data: torch.Tensor
    """``[rows, columns]``, or ``[tensors, rows, columns]``, of any dtype. Each row is contiguous; rows and tensors may
    be strided."""
    first_row: int = 0
    """The box's first row in the whole tensor."""
    first_column: int = 0
    """The box's first element in a row of the whole tensor."""

    @property
    def tensors(self) -> torch.Tensor:
        """``[tensors, rows, columns]``."""
        return self.data if self.data.dim() == 3 else self.data[None]


class BoxShape(NamedTuple):
    """Where in a tensor the words of a box are, and what they hold."""

    first_row: int
    rows: int
    first_word: int
    words: int
    """Of a row."""
    lead: int
    """Bytes of the first word that are not the box's."""
    dtype: torch.dtype

    @classmethod
    def of(cls, box: TensorBox) -> BoxShape:
        size = box.data.element_size()
        first_word, lead = divmod(box.first_column * size, WORD)
        rows, columns = box.data.shape[-2:]
        words = -(-(lead + columns * size) // WORD)
        return cls(box.first_row, rows, first_word, words, lead, box.data.dtype)

    def padded(self, words: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Where the bits of ``data``, which are integers, go in ``words`` (``[..., words of a row]``)."""
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
        """This part of ``[tensors, rows, columns]``."""
        return data[self.tensors, self.rows]


class Block(Protocol):
    """What is summed at a time, because it fits in cache: a part of a box, or several small boxes."""

    parts: list[BoxPart]
    data: list[torch.Tensor]
    """The memory of each part, ``[tensors, rows, columns]``."""
    values: torch.Tensor
    """The content of all of it once it was added, in the boxes' dtype; there may be zeros in between."""

    def add(self) -> None:
        """Add the memory's present content to the sums."""


class PartBlock:
    """A part of one box: whole tensors, or some rows of one."""

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
            row_sums: of the box, int64 ``[tensors, rows]``.
            column_sums: of the box, int64 ``[tensors, words of a row]``.
            scratch: room for the part's words if they do not lie in memory as such: int64 zeros.
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
    """Small boxes that are alike: their words are copied side by side first."""

    def __init__(self, boxes: dict[int, TensorBox], words: torch.Tensor) -> None:
        """``words``: int64 ``[tensors of all boxes, words of a box]``, zeros."""
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
    """Whether rows (the last dimension) begin and end with words of memory."""
    size = bits.element_size()
    on_words = all(stride * size % WORD == 0 for stride in bits.stride()[:-1])
    return lead == 0 and bits.shape[-1] * size % WORD == 0 and on_words and bits.data_ptr() % WORD == 0


# -- runs of neighbours that are alike and lie at equal distances: one kernel works on all of them --------------------
# The experts of a layer are tensors of their own by name. In the trainer, in an area and in the engine they are
# slices of one piece of memory.


def find_runs(kinds: Sequence[Hashable], *places: Sequence[int]) -> list[range]:
    """Cut items into runs: neighbours of one kind that are equally far apart.

    Args:
        kinds: of the items: equal where they are alike.
        places: of the items, in one memory or in several; within each, all members of a run are the same distance after
            the one before.

    Returns:
        The indices of each run's members, in order.
    """
    runs: list[range] = []
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
        runs.append(range(first, end))
        first = end
    return runs


def stack_run(members: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """The memory of a run's members: ``[count, *shape of a member]``.

    Args:
        members: the first two, or the only one.
        count: of all members.
    """
    first = members[0]
    step = members[1].data_ptr() - first.data_ptr() if count > 1 else first.nbytes
    return first.as_strided((count, *first.shape), (step // first.element_size(), *first.stride()))


def memory_kind(tensor: torch.Tensor) -> Hashable:
    """What members of a run have in common as memory."""
    return tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
