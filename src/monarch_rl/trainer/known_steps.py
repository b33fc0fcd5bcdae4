"""What a trainer rank reports of the steps in its journal.

Apart from the journal itself: the controller reads it, and must not import what trains, which takes it 80 MiB and some
seconds in the middle of a resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A step that a rank has made again from the journal."""

    metrics: dict[str, float]
    """Of the update, as the trainer's ``update`` returns them."""
    group_ids: list[int]
    """Of the whole batch."""
    lag_counts: np.ndarray
    """int64[L]: tokens of the whole batch by lag."""
    equal: bool | None
    """Whether this rank's weights are those that it had then, bit for bit; None if the run did not get to say."""


class JournalBatch(NamedTuple):
    """A batch of the journal that a rank could train again; equal on all ranks if it is the same batch."""

    version: int
    generation: int
    """Of the run that took it."""
    sum: int
    """CRC-32 of what all ranks know of it: its groups, and how many tokens and rows."""
