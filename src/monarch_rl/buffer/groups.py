"""The groups that may come into a batch, from their start to their last batch, and the order in which they do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from monarch_rl.episode.serialization import PackedGroup

ATTEMPTS = 1 << 20
"""The attempts of a generation of the run are numbered from this many times its number on: so what was begun before the
run was resumed is told from what was begun after it."""


class LiveGroups:
    """In line: in order of admission, and behind them those that are to be trained again. Iterating gives
    :class:`Live`.

    Args:
        first_task: position of group 0 in the stream of tasks.
        generation: how often the run was resumed.
    """

    def __init__(self, first_task: int = 0, generation: int = 0) -> None:
        self.next_id = 0
        """Of the group after all that were admitted or passed over."""
        self._passed: list[int] = []
        """Groups below that were not admitted, ascending: they come before all others."""
        self._first_task = first_task
        self._live: dict[int, Live] = {}
        """By id; in line, because dicts keep the order in which they got their entries."""
        self._places = 0
        """That were given in line."""
        self._idle: list[int] = []
        """Groups whose worker was lost, the first admitted first."""
        self._first_attempt = generation * ATTEMPTS
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
        """The groups at the head of the line; fewer if fewer are here."""
        return list(islice(self._live.values(), count))  # in one piece: the lookout asks from another thread

    def complete(self) -> int:
        """How many are complete, those that are to be trained again included."""
        return sum(live.group is not None for live in self)

    def again(self) -> int:
        """How many were trained, and are to be trained again."""
        return sum(live.uses > 0 for live in self)

    @property
    def admitted(self) -> int:
        """Groups started so far, here or gone."""
        return self.next_id - len(self._passed)

    def was_admitted(self, group_id: int) -> bool:
        """Whether the group was started, here or gone."""
        return 0 <= group_id < self.next_id and group_id not in self._passed

    def admit(self) -> Live:
        """Start a new group."""
        if self._passed:
            group_id = self._passed.pop(0)
        else:
            group_id, self.next_id = self.next_id, self.next_id + 1
        live = Live(group_id, self._first_task + group_id, 0, self._first_attempt)
        self.put_last(live)
        return live

    def note_gone(self, group_id: int) -> bool:
        """Count a group that is not here as admitted and gone; those before it that were not admitted still will be.
        Returns whether it was not known to be gone."""
        known = self.was_admitted(group_id)
        if group_id >= self.next_id:
            self._passed += range(self.next_id, group_id)
            self.next_id = group_id + 1
        elif not known:
            self._passed.remove(group_id)
        return not known

    def put_last(self, live: Live) -> None:
        """Put a group that is not here at the end of the line."""
        live.place, self._places = self._places, self._places + 1
        self._live[live.group_id] = live

    def restart_idle(self) -> Live | None:
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
        """Whether this play was given to another worker since, because its own was lost, or is of a run that has been
        resumed since."""
        live = self._live.get(group_id)
        if live is not None:
            return attempt < live.attempt
        return attempt < max(self._first_attempt, self._attempts.get(group_id, 0))

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
            live.idle, live.attempt = True, max(live.attempt + 1, self._first_attempt)
            self._attempts[live.group_id] = live.attempt
        self._idle = sorted(self._idle + [live.group_id for live in released])
        return released

    def state_of(self, group_id: int) -> str:
        """In words, for messages."""
        if not self.was_admitted(group_id):
            return "not admitted"
        if (live := self._live.get(group_id)) is None:
            return "trained or dropped already"
        return "complete already" if live.group else "waiting for a worker" if live.idle else "being played"

    # -- resuming ---------------------------------------------------------------------------------------------

    def state(self, taken: list[Live]) -> dict[str, Any]:
        """Plain values for :meth:`restore`; groups in ``taken``, whose batch is not trained, count as complete here."""
        groups = sorted([*taken, *self], key=lambda live: live.place)
        return {
            "first_task": self._first_task,
            "next": self.next_id,
            "passed": list(self._passed),
            "places": self._places,
            "attempts": dict(self._attempts),
            "live": [
                (
                    *(live.group_id, live.task_cursor, live.place, live.attempt, live.overtaken, live.uses, live.made),
                    live.group.data if live.group else None,
                )
                for live in groups
            ],
        }

    @classmethod
    def restore(cls, state: dict[str, Any], generation: int = 0) -> LiveGroups:
        groups = cls(state["first_task"], generation)
        groups.next_id, groups._passed = state["next"], list(state["passed"])
        groups._attempts, groups._places = dict(state["attempts"]), state["places"]
        for group_id, task_cursor, place, attempt, overtaken, uses, made, data in state["live"]:
            group = PackedGroup.read(data) if data is not None else None
            live = Live(group_id, task_cursor, place, attempt, overtaken=overtaken, uses=uses, made=made, group=group)
            groups._live[group_id] = live
        return groups


# -- the next batch: the first complete groups, none overtaken by more than the window allows -------------------------


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
