"""Whether tensors hold only finite values, found while they lie in a core's cache for another reason.

A sum of floats is finite only if each of them is: NaN stays in a sum, and so does infinity, because inf - inf is NaN. A
sum of finite values may overflow; then its values are looked at one by one. The bits of 16-bit floats are compared
instead, because a CPU converts them one by one to add them: positive ones from infinity on are the greatest 16-bit
integers, and negative ones from minus infinity on the greatest without a sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch


class NotFinite(RuntimeError):
    """A tensor holds NaN or infinity; the message names it."""


class FiniteProbe:
    """A quick look at blocks of tensors, one number for each; nothing is read back before :meth:`suspects`.

    Args:
        count: of blocks.
        device: where they lie.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._sums = torch.zeros(count, device=device)
        self._of_block = list(self._sums)

    def look(self, block: int, data: torch.Tensor) -> None:
        """Look at block number ``block``, ``[rows, columns]`` of any dtype."""
        if not data.is_floating_point():
            return
        if data.itemsize == 2 and data.device.type == "cpu":
            self._sums[block] = 0.0 if _finite_bits(data) else math.nan
        else:
            torch.sum(data, (0, 1), dtype=torch.float32, out=self._of_block[block])

    def suspects(self) -> list[int]:
        """The blocks that may hold values that are not finite: all that do, and those whose sum overflows."""
        indices: list[int] = (~self._sums.isfinite()).nonzero().flatten().tolist()
        return indices


def _finite_bits(data: torch.Tensor) -> bool:
    """Whether 16-bit floats on a CPU are finite."""
    infinities = torch.tensor([math.inf, -math.inf], dtype=data.dtype).view(torch.int16).numpy()
    bits = data.view(torch.int16).numpy()
    negative = np.uint16
    return bool(bits.max() < infinities[0] and bits.view(negative).max() < infinities.view(negative)[1])


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
    return f"holds {len(wrong)} values that are not finite, the first at {place}"
