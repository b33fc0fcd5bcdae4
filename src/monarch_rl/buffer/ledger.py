"""The buffer's metrics: what became of the groups and tokens of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

# -- reasons for which groups are dropped and tokens wasted: keys of ``Counts.dropped`` and ``Counts.wasted_tokens`` --

STALE = "stale"
"""A group above the lag bound although late is `wait`: a generator served an older version than the published one."""
LATE = "late"
"""A group above the lag bound, with late `drop` (or `mask`, if no token is left to train)."""
REJECTED = "rejected for its lag"
"""A group above reject-lag."""
EQUAL_REWARDS = "equal rewards"
"""A group that drop-equal-rewards filtered out."""
PARTIAL = "partial"
"""A group in which an episode failed, with partial `drop`."""
RUN_ENDED = "run ended"
"""A group still in the buffer when the run was closed."""
ROLLED_BACK = "rolled back"
"""Tokens sampled by a version that no longer exists, because the run resumed from an earlier one."""
MASKED = "masked"
"""Tokens of trained groups that were masked for their lag."""
PLAYED_AGAIN = "played again"
"""Tokens that a worker submitted for a group that had been reassigned to another worker."""


@dataclass(slots=True)
class Counts:
    """What became of the groups so far. ``admitted = trained + dropped + playing + complete + taken``. Groups counted
    in ``playing``, ``complete``, ``taken``, ``again`` and ``unpublished`` hold slots."""

    admitted: int
    trained: int
    """Groups trained at least once."""
    dropped: dict[str, int]
    """Groups by reason."""
    wasted_tokens: dict[str, int]
    """Tokens that were sampled but not trained, by reason."""
    playing: int
    """Groups in progress: admitted and not yet submitted."""
    complete: int
    """Groups submitted and waiting for their first training."""
    taken: int
    """Groups in the batch being trained, for the first time."""
    again: int
    """Groups already trained, and waiting to be trained again or in the batch being trained (``buffer.replay``)."""
    unpublished: int
    """Groups trained for the last time whose version is not served yet: they still hold their slots."""
    slots: int | None
    """None without a lag bound."""
    slots_free: int | None
    version: int
    """Batches trained: the current policy version."""
    published: int
    """Version that every generator serves."""
    cursor: int
    """Position in the stream of items: those that groups were admitted for, in this run and before a resume."""
    nbytes: int
    """Bytes of groups that are complete or taken, and bytes reserved by workers."""
    lag_counts: list[int] = field(default_factory=list)
    """Trained tokens by lag 0, 1, ..."""
    order_waits: int = 0
    """Batches that the trainer waited for although enough groups were complete: the window required a slow one."""
    order_wait_s: float = 0.0
    """Total seconds of those waits."""


class Ledger:
    """Totals over the run, kept by the core."""

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
        """Count a trained batch, which was the first one for ``groups`` groups; ``lag_counts``: its tokens by lag."""
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
