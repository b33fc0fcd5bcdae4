"""The groups that were admitted and are in no batch yet: who is played, who waits for a worker, who is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from monarch_rl.buffer.order import Live
from monarch_rl.episode.packed import PackedGroup


class LiveGroups:
    """In order of admission. Iterating gives :class:`Live`.

    Args:
        first_task: position of group 0 in the stream of tasks.
    """

    def __init__(self, first_task: int = 0) -> None:
        self.admitted = 0
        """Groups started so far, here or gone."""
        self._first_task = first_task
        self._live: dict[int, Live] = {}
        """By id; dicts keep the order of admission."""
        self._idle: list[int] = []
        """Groups whose worker was lost, the first admitted first."""
        self._attempts: dict[int, int] = {}
        """Of the groups that were started again, here or gone."""

    def __iter__(self) -> Iterator[Live]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def get(self, group_id: int) -> Live | None:
        """None if it was not admitted, or is in a batch, trained or dropped."""
        return self._live.get(group_id)

    def first(self, count: int) -> list[Live]:
        """The groups admitted first among those here; fewer if fewer are here."""
        return list(islice(self._live.values(), count))  # in one piece: the lookout asks from another thread

    def complete(self) -> int:
        """How many are complete."""
        return sum(live.group is not None for live in self)

    def admit(self) -> Live:
        """Start a new group."""
        live = Live(self.admitted, self._first_task + self.admitted)
        self._live[live.group_id] = live
        self.admitted += 1
        return live

    def begin_anew(self) -> Live | None:
        """Start again the first group that a lost worker had begun; None if there is none."""
        if not self._idle:
            return None
        live = self._live[self._idle.pop(0)]
        live.idle = False
        return live

    def playing(self, group_id: int, verb: str) -> Live:
        """A group that a worker plays. Raises ValueError for any other: it cannot ``verb``."""
        live = self._live.get(group_id)
        if live is None or live.group is not None or live.idle:
            raise ValueError(f"group {group_id} cannot {verb}: it is {self.state_of(group_id)}")
        return live

    def is_superseded(self, group_id: int, attempt: int) -> bool:
        """Whether this play was given to another worker since, because its own was lost."""
        return attempt < self._attempts.get(group_id, 0)

    def remove(self, group_id: int) -> Live:
        live = self._live.pop(group_id)
        if live.idle:
            self._idle.remove(group_id)
        return live

    def release(self, group_ids: Iterable[int]) -> list[Live]:
        """Leave the groups that are being played to other workers, under the next attempt; returns those."""
        found = [live for group_id in group_ids if (live := self._live.get(group_id)) is not None]
        released = [live for live in found if live.group is None and not live.idle]
        for live in released:
            live.idle, live.attempt = True, live.attempt + 1
            self._attempts[live.group_id] = live.attempt
        self._idle = sorted(self._idle + [live.group_id for live in released])
        return released

    def state_of(self, group_id: int) -> str:
        """In words, for messages."""
        if not 0 <= group_id < self.admitted:
            return "not admitted"
        if (live := self._live.get(group_id)) is None:
            return "trained or dropped already"
        return "complete already" if live.group else "waiting for a worker" if live.idle else "being played"

    # -- resuming ---------------------------------------------------------------------------------------------

    def state(self, taken: list[Live]) -> dict[str, Any]:
        """Plain values for :meth:`restore`; groups in ``taken``, whose batch is not trained, count as complete here."""
        groups = sorted([*taken, *self], key=lambda live: live.group_id)
        return {
            "first_task": self._first_task,
            "admitted": self.admitted,
            "attempts": dict(self._attempts),
            "live": [
                (live.group_id, live.task_cursor, live.attempt, live.overtaken, live.group.data if live.group else None)
                for live in groups
            ],
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> LiveGroups:
        groups = cls(state["first_task"])
        groups.admitted, groups._attempts = state["admitted"], dict(state["attempts"])
        for group_id, task_cursor, attempt, overtaken, data in state["live"]:
            group = PackedGroup.read(data) if data is not None else None
            groups._live[group_id] = Live(group_id, task_cursor, attempt, overtaken=overtaken, group=group)
        return groups
