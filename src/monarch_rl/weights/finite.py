"""Whether tensors hold only finite values, found while they lie in a core's cache for another reason.

A sum of floats is finite only if each of them is: NaN stays in a sum, and so does infinity, because inf - inf is NaN. A
sum of finite values may overflow; then its values are looked at one by one. The bits of 16-bit floats are compared
instead, because a CPU converts them one by one to add them: positive ones from infinity on are the greatest 16-bit
integers, and negative ones from minus infinity on the greatest without a sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch


class NotFinite(RuntimeError):
    """A tensor holds NaN or infinity; the message names it."""


class FiniteProbe:
    """A quick look at parts of tensors, one number for each, planned once. Nothing is read back before
    :meth:`suspects`.

    Args:
        parts: of any shape and dtype, all on one device: the memory that each use looks at.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._sums = torch.zeros(len(parts), device=parts[0].device)
        self._wrong: set[int] = set()
        self._look = [self._planned(index, part) for index, part in enumerate(parts)]

    def look(self, index: int) -> None:
        """Look at the present content of a part."""
        self._look[index]()

    def suspects(self) -> list[int]:
        """The parts that may hold values that are not finite: all that do, and those whose sum overflows."""
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
    """16-bit floats on a CPU as integers with a sign, and without; each with the least that is not finite."""
    infinities = torch.tensor([math.inf, -math.inf], dtype=part.dtype).view(torch.int16).numpy()
    bits = part.view(torch.int16).numpy()
    return bits, int(infinities[0]), bits.view(np.uint16), int(infinities.view(np.uint16)[1])


def not_finite(part: torch.Tensor, first: int, shape: Sequence[int]) -> str | None:
    """What of a part of a tensor is not finite, to be read after the tensor's name; None if all is.

    Args:
        part: consecutive elements, row-major, in any shape.
        first: index of the first of them in the whole tensor.
        shape: of the whole tensor.
    """
    wrong = (~part.flatten().isfinite()).nonzero().flatten()
    if not len(wrong):
        return None
    place = [int(index) for index in np.unravel_index(int(wrong[0]) + first, tuple(shape))]
    return values_not_finite(len(wrong), place)


def values_not_finite(count: int, place: Sequence[int]) -> str:
    """Says of a tensor that it holds ``count`` of them, the first at the indices ``place``."""
    return f"holds {count} values that are not finite, the first at {list(place)}"
