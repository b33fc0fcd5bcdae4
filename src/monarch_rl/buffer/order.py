"""Which groups make the next batch: the first complete ones, but none overtaken by more groups than the window."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from monarch_rl.episode.packed import PackedGroup


@dataclass(slots=True)
class Live:
    """A group that was admitted, is in no batch now, and may come into one."""

    group_id: int
    task_cursor: int
    place: int
    """In the line for the next batch: admissions, and groups that are to be trained again, in order."""
    attempt: int = 0
    """How often it was started again."""
    idle: bool = False
    """Its worker was lost, and no other has begun it."""
    overtaken: int = 0
    """Groups admitted later and trained before it; of one that several batches had, once for each."""
    uses: int = 0
    """Batches that it was in."""
    made: int = 0
    """The version that the last of them made."""
    reserved: int = 0
    """Bytes promised to its worker."""
    group: PackedGroup | None = None
    """None until it is complete."""

    @property
    def nbytes(self) -> int:
        """Bytes of the budget that it takes: promised ones, or its own."""
        return self.reserved + (self.group.nbytes if self.group is not None else 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups that one version is made from."""

    version: int
    """The version that they update."""
    groups: list[PackedGroup]
    """In line: in order of admission, but for those that were trained before."""
    oldest: int | None
    """Tokens that earlier versions drew are not trained; None trains all."""
    lag_counts: np.ndarray
    """int64[L]: tokens to train by lag 0, 1, ..."""
    uses: list[int] = field(default_factory=list)
    """How often each group was trained before; empty where none is trained again."""


def next_batch(groups: Iterable[Live], size: int, window: int | None) -> list[Live] | None:
    """The first ``size`` complete groups that the window allows, or None if it allows fewer.

    A group is overtaken by those that were admitted after it, not by one that is trained again and was admitted before
    it, although that stands behind it in line. So for each incomplete group the window bounds how many of a batch were
    admitted after it. Of two such sets one holds the other (they make a laminar matroid), so taking whatever may be
    taken, in line, never makes the batch smaller than another choice would.

    Args:
        groups: in line; each incomplete one stands before all that were admitted after it.
        window: how many groups admitted later may be trained before a group, in all; None is any number.
    """
    batch: list[Live] = []
    first_uses = 0
    """In ``batch``; each overtakes all incomplete groups before it."""
    slow: list[int] = []
    limits: list[int] = []
    """For each incomplete group so far, ``first_uses`` that there may be, less other uses that overtake it."""
    tightest = size
    for live in groups:
        if live.group is None:
            if window is not None:
                slow.append(live.group_id)
                limits.append(first_uses + window - live.overtaken)
                tightest = min(tightest, limits[-1])
            continue
        if live.uses:
            overtakes = bisect_left(slow, live.group_id)
            if min(limits[:overtakes], default=size) <= first_uses:
                continue
            limits[:overtakes] = [limit - 1 for limit in limits[:overtakes]]
            tightest = min([size, *limits])
        elif tightest <= first_uses:
            continue
        else:
            first_uses += 1
        batch.append(live)
        if len(batch) == size:
            return batch
    return None


def note_overtaking(groups: Iterable[Live], batch: Iterable[int]) -> None:
    """Count, for each group here that no batch had, those of a trained ``batch`` (ids) that were admitted after it."""
    ids = list(batch)
    for live in (live for live in groups if not live.uses):
        live.overtaken += sum(group_id > live.group_id for group_id in ids)
