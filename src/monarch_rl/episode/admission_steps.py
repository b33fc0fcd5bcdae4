"""The step of the run for which each group is admitted; curricula follow it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class AdmissionSteps:
    """The steps, 0, 1, 2, ..., of blocks of ``groups_per_step`` groups, numbered by admission.

    The step of a block is the one that would train its first group if no group that was admitted earlier were dropped
    any more. It never changes afterwards, so a group that is restarted, also in a resumed run, has the same item.
    """

    groups_per_step: int
    jumps: tuple[tuple[int, int], ...] = ((0, 0),)
    """(block, its step), ascending, for the blocks whose step is not that of the previous block plus 1. Dropped groups
    cause them, so a run without any has only the first."""

    def step(self, block: int) -> int:
        """The step of a block. A block that is not admitted yet follows the last one."""
        first, step = self.jumps[bisect_right(self.jumps, block, key=_block) - 1]
        return step + block - first

    def until(self, block: int) -> AdmissionSteps:
        """The steps of ``block`` and those before, which is all that the items of ``block`` depend on."""
        return replace(self, jumps=self.jumps[: bisect_right(self.jumps, block, key=_block)])

    def admitted(self, cursor: int, step: int) -> AdmissionSteps:
        """After the admission of group ``cursor``, the newest one, for ``step``."""
        block, place = divmod(cursor, self.groups_per_step)
        if place or step == self.step(block):
            return self
        return replace(self, jumps=(*self.jumps, (block, step)))


def _block(jump: tuple[int, int]) -> int:
    return jump[0]
