"""Leave to play one group: what the buffer hands to a rollout worker."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to play one group."""

    group_id: int
    """Counts admissions: 0, 1, 2, ..."""
    task_cursor: int
    """Position in the stream of tasks; differs from ``group_id`` only in a resumed run."""
    attempt: int = 0
    """How often the group was begun before, by workers that were lost."""
    bound: GroupBound = UNBOUNDED
    """What the group may hold: the buffer takes no more."""
