"""What became of the groups and tokens of a run: the figures of the buffer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

STALE = "stale"
"""Reason of a group above the bound although late is `wait`: a generator served an older version than the published."""
LATE = "late"
"""Reason of a group above the bound with late `drop` (or `mask`, and no token is left)."""
REJECTED = "rejected for its lag"
"""Reason of a group above reject-lag."""
EQUAL_REWARDS = "equal rewards"
"""Reason of a group that drop-equal-rewards filtered."""
PARTIAL = "partial"
"""Reason of a group of which an episode failed, with partial `drop`."""
RUN_ENDED = "run ended"
"""Reason of the groups that were still here when the run was closed."""
ROLLED_BACK = "rolled back"
"""Reason of tokens that a version drew which the trainer has not made since the run was resumed."""
MASKED = "masked"
"""Reason of tokens of trained groups that were left out for their lag."""
PLAYED_AGAIN = "played again"
"""Reason of tokens that a worker put for a group that had been given to another worker."""


@dataclass(slots=True)
class Counts:
    """What became of the groups so far. ``admitted = trained + dropped + playing + complete + taken``. Those that are
    playing, complete, taken, again or unpublished hold slots."""

    admitted: int
    trained: int
    """Once or more often."""
    dropped: dict[str, int]
    """Groups by reason."""
    wasted_tokens: dict[str, int]
    """Tokens that were drawn and are not trained, by reason."""
    playing: int
    """Admitted and not yet put."""
    complete: int
    """Put and waiting for the trainer."""
    taken: int
    """In the batch being trained, their first one."""
    again: int
    """Trained, and in the batch being trained again, or waiting for it (``buffer.replay``)."""
    unpublished: int
    """Trained for the last time, but the version made from them is not served yet: they hold their slots."""
    slots: int | None
    """None without a bound on the lag."""
    slots_free: int | None
    version: int
    """Optimiser steps done."""
    published: int
    """The version that every generator serves."""
    nbytes: int
    """Bytes of the groups that are complete or taken, and bytes promised to workers."""
    lag_counts: list[int] = field(default_factory=list)
    """Trained tokens by lag 0, 1, ..."""
    order_waits: int = 0
    """Batches that the trainer had to wait for although enough groups were complete: a slow one was due first."""
    order_wait_s: float = 0.0
    """Seconds of those waits."""


class Ledger:
    """Sums over the run, kept by the core."""

    def __init__(self) -> None:
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.wasted_tokens: Counter[str] = Counter()
        self.lag_counts = np.zeros(0, np.int64)

    def note_dropped(self, reason: str, tokens: int) -> None:
        self.dropped[reason] += 1
        self.note_wasted(reason, tokens)

    def note_wasted(self, reason: str, tokens: int) -> None:
        if tokens:
            self.wasted_tokens[reason] += tokens

    def note_trained(self, groups: int, lag_counts: np.ndarray) -> None:
        """A batch was trained, the first one of so many groups."""
        self.trained += groups
        sums = np.zeros(max(len(self.lag_counts), len(lag_counts)), np.int64)
        sums[: len(self.lag_counts)] += self.lag_counts
        sums[: len(lag_counts)] += lag_counts
        self.lag_counts = sums

    def state(self) -> dict[str, object]:
        """Plain values for :meth:`restore`."""
        return {
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "wasted_tokens": dict(self.wasted_tokens),
            "lag_counts": self.lag_counts.tolist(),
        }

    @classmethod
    def restore(cls, state: dict[str, object]) -> Ledger:
        ledger = cls()
        for name, value in state.items():
            kind = type(getattr(ledger, name))
            setattr(ledger, name, np.asarray(value, np.int64) if name == "lag_counts" else kind(value))
        return ledger
