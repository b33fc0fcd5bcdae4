"""Which groups may start, which are trained next, and why no trained token is staler than allowed.

The rules. A group needs a *slot* to start (``admit``); there are ``S = (max_policy_lag + 1) * groups_per_step``
slots. The batch that updates version ``v`` is made of the ``groups_per_step`` groups that were admitted first
among those still here, and only once all of them are complete (``take``). A slot returns when its group is
dropped, or when the version made from its batch is *published*, that is, served by every generator.

Theorem. A token trained in the update of version ``v`` was drawn by a version ``u >= v - max_policy_lag``.

Proof. Let ``k = groups_per_step``, and let ``p`` be the last published version when the token's group was
admitted. Generators serve ``p`` or later from then on, so ``p <= u``. If ``v <= p`` there is nothing to show. Else
consider the batches that update ``p, p + 1, ..., v - 1``: ``v - p`` batches of ``k`` groups each. All these groups
were admitted before ours, as batches go in admission order; and all of them held a slot when ours was admitted, as
the versions made from them (``p + 1`` and later) were not published. So ``(v - p) * k`` slots were taken besides
ours: ``(v - p) * k <= S - 1 < (max_policy_lag + 1) * k``, hence ``v - p <= max_policy_lag``, and
``v - u <= v - p``. Dropped groups are in no batch and hold no slot, so they change nothing.

Two remarks. The lag is counted against the version being *updated*, which may be ahead of the one that is served
(an update is done, its publication is not): the proof covers it because slots return on publication and not on
training. And with ``max_policy_lag = 0`` all ``k`` slots belong to one batch, so every token of it was drawn by the
very version that it updates: synchronous RL by the same code.

The premise, that generators never serve less than what is published, is theirs to keep. Should it be broken,
``take`` sees it in the tokens' own versions and drops the group as ``stale``: it is counted and never trained.

This module knows no actors and never waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from monarch_rl.episode import Group

STALE = "stale"
"""Reason of a group dropped by ``take`` because its oldest token is above the bound."""
RUN_ENDED = "run ended"
"""Reason of the groups that were still here when the run was closed."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to play one group."""

    group_id: int
    """Counts admissions: 0, 1, 2, ..."""
    task_cursor: int
    """Position in the stream of tasks; differs from ``group_id`` only in a resumed run."""


@dataclass(slots=True)
class Counts:
    """What became of the groups so far. ``admitted = trained + dropped + playing + complete + taken``."""

    admitted: int
    trained: int
    dropped: dict[str, int]
    """Groups by reason."""
    playing: int
    """Admitted and not yet put."""
    complete: int
    """Put and waiting for the trainer."""
    taken: int
    """In the batch being trained."""
    unpublished: int
    """Trained, but the version made from them is not served yet: they hold their slots."""
    slots: int
    slots_free: int
    version: int
    """Optimiser steps done."""
    published: int
    """The version that every generator serves."""
    lag_counts: list[int] = field(default_factory=list)
    """Trained tokens by lag 0, 1, ..., ``max_policy_lag``."""

    @property
    def mean_lag(self) -> float:
        """Mean lag over all trained tokens; nan before the first."""
        total = sum(self.lag_counts)
        return sum(lag * count for lag, count in enumerate(self.lag_counts)) / total if total else float("nan")


def token_lags(groups: list[Group], version: int, bins: int) -> np.ndarray:
    """Trainable tokens by lag against ``version``: int64[bins]. Raises ValueError on a lag outside the bins."""
    counts = np.zeros(bins, np.int64)
    for group in groups:
        for episode in group.episodes:
            lags = version - episode.policy_versions[episode.trainable]
            if len(lags) and (lags.min() < 0 or lags.max() >= bins):
                raise ValueError(
                    f"group {group.group_id} has token lags {lags.min()}..{lags.max()}, allowed are 0..{bins - 1}"
                )
            counts += np.bincount(lags, minlength=bins)
    return counts


class BufferCore:
    """The state machine of the module's rules.

    Args:
        groups_per_step: groups of one optimiser step.
        max_policy_lag: largest lag of a trained token; 0 is synchronous.
        version: optimiser steps done, and served, at the start (a resumed run starts above 0).
        task_cursor: where in the stream of tasks to start.

    Raises:
        ValueError: a number is out of range. Every method raises ValueError, naming group and state, when it is
            asked for what cannot be.
    """

    def __init__(self, groups_per_step: int, max_policy_lag: int, version: int = 0, task_cursor: int = 0) -> None:
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
        if max_policy_lag < 0:
            raise ValueError(f"max_policy_lag must not be negative (0 is synchronous), got {max_policy_lag}")
        self.groups_per_step = groups_per_step
        self.max_policy_lag = max_policy_lag
        self.slots = (max_policy_lag + 1) * groups_per_step
        self.version = version
        self.published_version = version
        self.closed = False
        self._first_task = task_cursor
        self._admitted = 0
        self._trained = 0
        self._dropped: dict[str, int] = {}
        self._live: dict[int, Group | None] = {}
        """In admission order (dicts keep it); None while the group is being played."""
        self._taken: list[Group] = []
        self._unpublished: dict[int, int] = {}
        """Groups by the version that was made from them."""
        self._lag_counts = np.zeros(max_policy_lag + 1, np.int64)

    @property
    def slots_free(self) -> int:
        used = len(self._live) + len(self._taken) + sum(self._unpublished.values())
        assert used <= self.slots, f"{used} slots used of {self.slots}"
        return self.slots - used

    def admit(self) -> Ticket | None:
        """Start a group if a slot is free and the run is not closed."""
        if self.closed or not self.slots_free:
            return None
        ticket = Ticket(self._admitted, self._first_task + self._admitted)
        self._live[ticket.group_id] = None
        self._admitted += 1
        return ticket

    def put(self, group: Group) -> None:
        """Hand in a complete group. After ``close`` this changes nothing: the group is counted already."""
        if self._ended_with_run(group.group_id):
            return
        if self._live.get(group.group_id, group) is not None:
            raise ValueError(f"group {group.group_id} cannot be put: it is {self._state(group.group_id)}")
        if group.oldest_version is None:
            raise ValueError(f"group {group.group_id} cannot be put: it has no token to train")
        newest = max(int(episode.policy_versions.max()) for episode in group.episodes if episode.num_tokens)
        if newest > self.version:
            raise ValueError(
                f"group {group.group_id} cannot be put: version {newest} drew a token of it, "
                f"but only {self.version} optimiser steps were reported"
            )
        self._live[group.group_id] = group

    def drop(self, group_id: int, reason: str) -> None:
        """Give a group up, played or complete; its slot is free again. After ``close`` this changes nothing."""
        if self._ended_with_run(group_id):
            return
        if group_id not in self._live:
            raise ValueError(f"group {group_id} cannot be dropped ({reason}): it is {self._state(group_id)}")
        del self._live[group_id]
        self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def take(self, version: int) -> list[Group] | None:
        """The batch that updates ``version``, oldest first; None while one of its groups is missing.

        Asked again for the same version it gives the same batch, so that every trainer rank can ask. Groups whose
        tokens are too stale are dropped first.
        """
        if version != self.version:
            raise ValueError(f"a batch for version {version} was asked for, but the policy is at {self.version}")
        if self._taken:
            return self._taken
        for group_id, group in list(self._live.items()):
            oldest = group.oldest_version if group is not None else None
            if oldest is not None and version - oldest > self.max_policy_lag:
                self.drop(group_id, STALE)
        if self.missing() or self.closed:
            return None
        batch = [group for group in self._oldest().values() if group is not None]
        for group in batch:
            del self._live[group.group_id]
        self._taken = batch
        return batch

    def trained(self, version: int) -> None:
        """The optimiser step that made ``version`` is done, with the batch taken for ``version - 1``."""
        if version != self.version + 1 or not self._taken:
            raise ValueError(
                f"version {version} cannot have been trained: the policy is at {self.version} "
                f"and {len(self._taken)} groups are taken"
            )
        self._lag_counts += token_lags(self._taken, self.version, self.max_policy_lag + 1)
        self._trained += len(self._taken)
        self._unpublished[version] = len(self._taken)
        self._taken = []
        self.version = version

    def published(self, version: int) -> None:
        """Every generator serves ``version`` now: the slots of all batches up to it are free again."""
        if not self.published_version <= version <= self.version:
            raise ValueError(
                f"version {version} cannot be published: {self.published_version} is, and {self.version} is trained"
            )
        self.published_version = version
        self._unpublished = {made: groups for made, groups in self._unpublished.items() if made > version}

    def close(self) -> None:
        """End the run: nothing is admitted or taken any more, and what was not taken is dropped as ``run ended``.

        A batch that is being trained may still be reported as trained.
        """
        for group_id in list(self._live):
            self.drop(group_id, RUN_ENDED)
        self.closed = True

    def missing(self) -> list[int | None]:
        """The groups that the next batch waits for; None stands for one that is not even admitted."""
        oldest = self._oldest()
        playing: list[int | None] = [group_id for group_id, group in oldest.items() if group is None]
        return playing + [None] * (self.groups_per_step - len(oldest))

    def counts(self) -> Counts:
        playing = sum(group is None for group in self._live.values())
        return Counts(
            admitted=self._admitted,
            trained=self._trained,
            dropped=dict(self._dropped),
            playing=playing,
            complete=len(self._live) - playing,
            taken=len(self._taken),
            unpublished=sum(self._unpublished.values()),
            slots=self.slots,
            slots_free=self.slots_free,
            version=self.version,
            published=self.published_version,
            lag_counts=self._lag_counts.tolist(),
        )

    def _oldest(self) -> dict[int, Group | None]:
        return dict(list(self._live.items())[: self.groups_per_step])

    def _ended_with_run(self, group_id: int) -> bool:
        return self.closed and 0 <= group_id < self._admitted

    def _state(self, group_id: int) -> str:
        if not 0 <= group_id < self._admitted:
            return "not admitted"
        if group_id in self._live:
            return "being played" if self._live[group_id] is None else "complete already"
        if any(group.group_id == group_id for group in self._taken):
            return f"in the batch that updates version {self.version}"
        return "trained or dropped already"
