"""Which groups make the next batch: the first complete ones, but none overtaken by more groups than the window."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from monarch_rl.episode.packed import PackedGroup


@dataclass(slots=True)
class Live:
    """A group that was admitted and is in no batch yet."""

    group_id: int
    task_cursor: int
    attempt: int = 0
    """How often it was started again."""
    idle: bool = False
    """Its worker was lost, and no other has begun it."""
    overtaken: int = 0
    """Groups admitted later and trained already."""
    reserved: int = 0
    """Bytes promised to its worker."""
    group: PackedGroup | None = None
    """None until it is complete."""

    @property
    def nbytes(self) -> int:
        """Bytes of the budget that it takes: promised ones, or its own."""
        return self.reserved + (self.group.nbytes if self.group is not None else 0)


def next_batch(groups: Iterable[Live], size: int, window: int | None) -> list[Live] | None:
    """The first ``size`` complete groups, or None if there are fewer or the window forbids it.

    If any ``size`` complete groups make a batch that the window allows, these do: taking an earlier group instead of a
    later one never makes another group overtaken more often.

    Args:
        groups: in order of admission.
        window: how many groups admitted later may be trained before a group, in all; None is any number.
    """
    batch: list[Live] = []
    allowed: float = math.inf
    """Size that the batch may reach without overtaking an incomplete group, of those passed so far, too often."""
    for live in groups:
        if live.group is not None:
            if len(batch) >= allowed:
                return None
            batch.append(live)
            if len(batch) == size:
                return batch
        elif window is not None:
            allowed = min(allowed, len(batch) + window - live.overtaken)
    return None


def note_overtaking(groups: Iterable[Live], batch: Iterable[int]) -> None:
    """Count, for each group still here, the groups of a trained ``batch`` (ids) that were admitted after it."""
    ids = list(batch)
    for live in groups:
        live.overtaken += sum(group_id > live.group_id for group_id in ids)
