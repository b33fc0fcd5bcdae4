"""The groups that may enter a batch, from admission to their last batch, and the order in which they do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from monarch_rl.episode.serialization import SerializedGroup

ATTEMPTS = 1 << 20
"""Attempts of generation g of a run are numbered from g times this on, so that the attempt alone shows whether it was
begun before or after the run was resumed."""


class LiveGroups:
    """The queue of live groups: in order of admission, and behind them those to be trained again. Iterating yields
    :class:`LiveGroup` in queue order.

    Args:
        first_task: position of group 0 in the stream of tasks.
        generation: how often the run was resumed.
    """

    def __init__(self, first_task: int = 0, generation: int = 0) -> None:
        self.next_id = 0
        """Id of the next new group, after all that were admitted or skipped."""
        self._skipped: list[int] = []
        """Ids below ``next_id`` that were not admitted, ascending: they are admitted before any new id."""
        self._first_task = first_task
        self._live: dict[int, LiveGroup] = {}
        """By id, in queue order: a dict keeps insertion order."""
        self._places = 0
        """Queue places handed out so far."""
        self._idle: list[int] = []
        """Groups whose worker was lost, in order of admission."""
        self._first_attempt = generation * ATTEMPTS
        self._attempts: dict[int, int] = {}
        """Attempt number of every group that was restarted, live or gone."""

    def __iter__(self) -> Iterator[LiveGroup]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def get(self, group_id: int) -> LiveGroup | None:
        """A live group; None if it was not admitted, or is in a batch, trained or dropped."""
        return self._live.get(group_id)

    def first(self, count: int) -> list[LiveGroup]:
        """The first ``count`` groups of the queue, or all if there are fewer."""
        return list(islice(self._live.values(), count))  # one call, because the wait registry reads on another thread

    def complete(self) -> int:
        """Number of complete groups, including those to be trained again."""
        return sum(live.group is not None for live in self)

    def again(self) -> int:
        """Number of groups that were trained and are to be trained again."""
        return sum(live.times_trained > 0 for live in self)

    @property
    def admitted(self) -> int:
        """Groups admitted so far, live or gone."""
        return self.next_id - len(self._skipped)

    @property
    def next_cursor(self) -> int:
        """Task cursor of the next new group."""
        return self._first_task + self.next_id

    def was_admitted(self, group_id: int) -> bool:
        """Whether the group was admitted, live or gone."""
        return 0 <= group_id < self.next_id and group_id not in self._skipped

    def admit(self) -> LiveGroup:
        """Start a new group."""
        if self._skipped:
            group_id = self._skipped.pop(0)
        else:
            group_id, self.next_id = self.next_id, self.next_id + 1
        live = LiveGroup(group_id, self._first_task + group_id, 0, self._first_attempt)
        self.put_last(live)
        return live

    def note_gone(self, group_id: int) -> bool:
        """Record a group that is not live as admitted and gone. Lower ids not admitted yet are skipped for now, and
        admitted later. Returns whether this was new."""
        admitted = self.was_admitted(group_id)
        if group_id >= self.next_id:
            self._skipped += range(self.next_id, group_id)
            self.next_id = group_id + 1
        elif not admitted:
            self._skipped.remove(group_id)
        return not admitted

    def put_last(self, live: LiveGroup) -> None:
        """Append a group that is not in the queue to its end."""
        live.place, self._places = self._places, self._places + 1
        self._live[live.group_id] = live

    def restart_idle(self) -> LiveGroup | None:
        """Restart the earliest-admitted group that a lost worker had begun; None if there is none."""
        if not self._idle:
            return None
        live = self._live[self._idle.pop(0)]
        live.idle = False
        return live

    def in_progress(self, group_id: int, verb: str) -> LiveGroup:
        """A group that a worker is generating. Raises ValueError for any other; ``verb`` is what it cannot do."""
        live = self._live.get(group_id)
        if live is None or live.group is not None or live.idle:
            raise ValueError(f"group {group_id} cannot {verb}: it is {self.state_of(group_id)}")
        return live

    def is_superseded(self, group_id: int, attempt: int) -> bool:
        """Whether this attempt was replaced: its worker was lost and the group reassigned, or the run was resumed after
        the attempt began."""
        live = self._live.get(group_id)
        if live is not None:
            return attempt < live.attempt
        return attempt < max(self._first_attempt, self._attempts.get(group_id, 0))

    def remove(self, group_id: int) -> LiveGroup:
        live = self._live.pop(group_id)
        if live.idle:
            self._idle.remove(group_id)
        return live

    def requeue(self, group_ids: Iterable[int]) -> list[LiveGroup]:
        """Make the groups that are in progress available to other workers, as their next attempt; returns them."""
        found = [live for group_id in group_ids if (live := self._live.get(group_id)) is not None]
        requeued = [live for live in found if live.group is None and not live.idle]
        for live in requeued:
            live.idle, live.attempt = True, max(live.attempt + 1, self._first_attempt)
            self._attempts[live.group_id] = live.attempt
        self._idle = sorted(self._idle + [live.group_id for live in requeued])
        return requeued

    def state_of(self, group_id: int) -> str:
        """The group's state in words, for messages."""
        if not self.was_admitted(group_id):
            return "not admitted"
        if (live := self._live.get(group_id)) is None:
            return "trained or dropped already"
        return "complete already" if live.group else "waiting for a worker" if live.idle else "in progress"

    # -- checkpoint and resume --------------------------------------------------------------------------------

    def state(self, taken: list[LiveGroup]) -> dict[str, Any]:
        """Plain values for :meth:`restore`. Groups in ``taken``, whose batch is not trained yet, count as complete."""
        groups = sorted([*taken, *self], key=lambda live: live.place)
        return {
            "first_task": self._first_task,
            "next": self.next_id,
            "passed": list(self._skipped),
            "places": self._places,
            "attempts": dict(self._attempts),
            "live": [
                (
                    *(live.group_id, live.task_cursor, live.place, live.attempt),
                    *(live.overtaken, live.times_trained, live.last_trained_version),
                    live.group.data if live.group else None,
                )
                for live in groups
            ],
        }

    @classmethod
    def restore(cls, state: dict[str, Any], generation: int = 0) -> LiveGroups:
        groups = cls(state["first_task"], generation)
        groups.next_id, groups._skipped = state["next"], list(state["passed"])
        groups._attempts, groups._places = dict(state["attempts"]), state["places"]
        for group_id, task_cursor, place, attempt, overtaken, times_trained, last_version, data in state["live"]:
            groups._live[group_id] = LiveGroup(
                group_id,
                task_cursor,
                place,
                attempt,
                overtaken=overtaken,
                times_trained=times_trained,
                last_trained_version=last_version,
                group=SerializedGroup.read(data) if data is not None else None,
            )
        return groups


# -- the next batch: the first complete groups in the queue, as far as the window allows ------------------------------


@dataclass(slots=True)
class LiveGroup:
    """An admitted group that is in no batch now, and may enter one."""

    group_id: int
    task_cursor: int
    place: int
    """Place in the queue for the next batch, counting admissions and returns for another training."""
    attempt: int = 0
    """Number of the current attempt: restarts so far, counted from the generation's first attempt."""
    idle: bool = False
    """Its worker was lost, and no other has begun it."""
    overtaken: int = 0
    """How many groups admitted later were trained before it; a group in several batches counts once per batch."""
    times_trained: int = 0
    """Number of batches it was in."""
    last_trained_version: int = 0
    """Version made from its last batch."""
    reserved: int = 0
    """Bytes reserved by its worker."""
    group: SerializedGroup | None = None
    """None until it is complete."""

    @property
    def nbytes(self) -> int:
        """Bytes of the budget that it uses: reserved ones, or its own."""
        return self.reserved + (self.group.nbytes if self.group is not None else 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups from which one version is made."""

    version: int
    """Version that the batch updates."""
    groups: list[SerializedGroup]
    """In queue order: in order of admission, except for those that were trained before."""
    oldest: int | None
    """Oldest version whose tokens are trained; earlier tokens are masked. None trains all."""
    lag_counts: np.ndarray
    """int64[L]: number of tokens to train by lag 0, 1, ..."""
    uses: list[int] = field(default_factory=list)
    """How often each group was trained before; empty if ``buffer.replay`` is 1."""


def next_batch(groups: Iterable[LiveGroup], size: int, window: int | None) -> list[LiveGroup] | None:
    """The first ``size`` complete groups that the window allows, or None if it allows fewer.

    A group is overtaken by groups that were admitted after it, but not by a group that was admitted before it and waits
    behind it in the queue to be trained again. So for each incomplete group, the window bounds how many groups of a
    batch were admitted after it. Of any two such sets of later groups one contains the other (they form a laminar
    matroid), so greedily taking every allowed group, in queue order, never yields a smaller batch than another choice.

    Args:
        groups: in queue order; each incomplete one comes before all that were admitted after it.
        window: how many groups admitted later may be trained before a group, over its whole life; None: unlimited.
    """
    batch: list[LiveGroup] = []
    first_uses = 0
    """Groups in ``batch`` that are trained for the first time; each overtakes all incomplete groups before it."""
    slow: list[int] = []
    """Ids of the incomplete groups so far, ascending."""
    limits: list[int] = []
    """For each of them, the ``first_uses`` that its window allows, less the repeated uses that overtake it."""
    tightest = size
    for live in groups:
        if live.group is None:
            if window is not None:
                slow.append(live.group_id)
                limits.append(first_uses + window - live.overtaken)
                tightest = min(tightest, limits[-1])
            continue
        if live.times_trained:
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


def note_overtaking(groups: Iterable[LiveGroup], batch: Iterable[int]) -> None:
    """For each group that was in no batch yet, count the groups of a trained ``batch`` (ids) admitted after it."""
    ids = list(batch)
    for live in (live for live in groups if not live.times_trained):
        live.overtaken += sum(group_id > live.group_id for group_id in ids)
