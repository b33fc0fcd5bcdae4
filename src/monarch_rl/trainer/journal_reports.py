"""What a trainer rank reports to the controller about the steps in its journal.

Separate from ``step_journal.py``, because the controller must not import the training code, which would take 80 MiB and
some seconds in the middle of a resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A step that a rank has replayed from the journal."""

    metrics: dict[str, float]
    """Metrics of the update, as the trainer's ``update`` returns them."""
    group_ids: list[int]
    """Ids of the groups of the whole batch."""
    lag_counts: np.ndarray
    """int64[L]: tokens of the whole batch, by policy lag."""
    equal: bool | None
    """Whether this rank's weights are bit-identical to those of the original step; None if that was not recorded."""


class JournalBatch(NamedTuple):
    """A batch of the journal that a rank can replay. Equal on all ranks if it is the same batch."""

    version: int
    generation: int
    """Generation of the run that trained on it."""
    sum: int
    """CRC-32 of what all ranks have in common: its groups, and its numbers of tokens, episodes and rows."""
