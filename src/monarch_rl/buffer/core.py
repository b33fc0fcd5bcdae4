"""Decides which groups may start, which are trained next, and which are left out.

A group needs a *slot* to start (``admit``). There are ``((max_policy_lag + 1) * groups_per_step - window) / replay``
slots, rounded up. The batch that updates version ``v`` consists of the first ``groups_per_step`` complete groups in
the queue. If taking them would let more than ``window`` later groups overtake an incomplete one, ``take`` returns None
until that group is complete or dropped (with ``replay``, groups that overtake fewer may be taken instead: see
``next_batch``). A trained group moves to the end of the queue, until it has been in ``replay`` batches or the lag bound
retires it. A slot is freed when its group is dropped, or when the version made from its last batch is *published*, that
is, served by every generator. It follows that no token is trained more than ``max_policy_lag`` versions after the one
that sampled it: docs/buffer.md has the proof, and ``take`` asserts it on the tokens' own versions.

This module has no actors and never waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from monarch_rl.buffer.groups import Batch, LiveGroup, LiveGroups, next_batch, note_overtaking
from monarch_rl.buffer.ledger import (
    EQUAL_REWARDS,
    LATE,
    MASKED,
    PARTIAL,
    PLAYED_AGAIN,
    REJECTED,
    ROLLED_BACK,
    RUN_ENDED,
    STALE,
    Counts,
    Ledger,
)
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.admission_steps import AdmissionSteps
from monarch_rl.episode.episode import Ticket
from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound
from monarch_rl.episode.serialization import SerializedGroup


class BufferCore:
    """The state machine that enforces the module's rules. Its components can be understood in isolation: ``LiveGroups``
    and ``next_batch`` in ``groups.py``, ``Ledger`` in ``ledger.py``, :class:`ByteBudget` and :class:`FilterRules`
    below.

    Args:
        groups_per_step: groups per batch.
        settings: the buffer's settings.
        version: batches trained, and version served, at the start (a resumed run starts above 0).
        task_cursor: start position in the stream of tasks.
        bound: maximum sequences and tokens of each group.

    Raises:
        ValueError: a number is out of range. Every method raises ValueError, naming the group and its state, if a call
            is impossible in the current state.
    """

    def __init__(
        self,
        groups_per_step: int,
        settings: BufferSettings,
        version: int = 0,
        task_cursor: int = 0,
        bound: GroupBound = UNBOUNDED,
    ) -> None:
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
        self.groups_per_step = groups_per_step
        self.settings = settings
        self.bound = bound
        self.window = settings.window_for(groups_per_step)
        self.slots = settings.slots_for(groups_per_step)
        self.version = version
        self.published_version = version
        self.batches = version
        """Batches trained: the current step of the run, counted from 0."""
        self.steps = AdmissionSteps(groups_per_step)
        self.closed = False
        self.groups = LiveGroups(task_cursor)
        self.budget = ByteBudget(settings.max_mib * 2**20)
        self._batch: tuple[Batch, list[LiveGroup]] | None = None
        self._unpublished: dict[int, int] = {}
        """Number of groups by the version that was made from their last batch."""
        self._rules = FilterRules(settings, groups_per_step)
        self._ledger = Ledger()

    @property
    def slots_free(self) -> int | None:
        """None: unlimited."""
        if self.slots is None:
            return None
        used = len(self.groups) + self.taken + sum(self._unpublished.values())
        assert used <= self.slots, f"{used} slots used of {self.slots}"
        return self.slots - used

    @property
    def taken(self) -> int:
        """Groups in the batch that is being trained."""
        return len(self._batch[1]) if self._batch is not None else 0

    @property
    def first_in_progress(self) -> int | None:
        """The earliest-admitted group that is not complete; None if all are. After ``close`` it is 0, because the state
        of groups that were in progress is unknown."""
        return 0 if self.closed else next((live.group_id for live in self.groups if live.group is None), None)

    # -- called by workers ------------------------------------------------------------------------------------

    def admit(self) -> Ticket | None:
        """Start a group if a slot is free and the run is not closed. Groups that a lost worker had begun come first."""
        if self.closed:
            return None
        live = self.groups.restart_idle()
        if live is None:
            if self.slots_free == 0:
                return None
            new, step = self.groups.next_cursor, self._step_of_new_group()
            live = self.groups.admit()
            # One that was skipped keeps the step of its block: a resumed run does not know where it was then.
            if live.task_cursor == new:
                self.steps = self.steps.admitted(new, step)
        return Ticket(live.group_id, live.task_cursor, self.steps, live.attempt, self.bound)

    def _step_of_new_group(self) -> int:
        """The step that trains a group at the end of the queue, if none before it is dropped."""
        return self.batches + (self._batch is not None) + len(self.groups) // self.groups_per_step

    def reserve(self, group_id: int, nbytes: int, attempt: int = 0) -> bool:
        """Reserve ``nbytes`` bytes for a group; False if it has to wait.

        The first ``groups_per_step`` groups in the queue never wait: they complete the next batch, and training it
        frees memory. An attempt that is no longer expected never waits either, because submitting it stores nothing.
        Before any other group waits, already trained groups are retired if that frees enough.
        """
        if self._is_obsolete(group_id, attempt):
            return True
        live = self.groups.in_progress(group_id, "reserve memory")
        due = any(first.group_id == group_id for first in self.groups.first(self.groups_per_step))
        if not due and not live.reserved:
            for trained in self.budget.in_the_way((other for other in self.groups if other.times_trained), nbytes):
                self._retire(trained)
        return self.budget.reserve(live, nbytes, always=due)

    def submit(self, group: SerializedGroup) -> bool:
        """Submit a complete group; True if the buffer keeps it.

        It is not kept if the settings filter it out, if it was reassigned to another worker, or after ``close``.
        """
        if self._is_obsolete(group.group_id, group.attempt):
            if not self.closed:
                self._ledger.note_wasted(PLAYED_AGAIN, group.trainable)
            return False
        live = self.groups.in_progress(group.group_id, "be submitted")
        if group.newest_version is None:
            raise ValueError(f"group {group.group_id} cannot be submitted: it has no token to train")
        if group.newest_version > self.version:
            raise ValueError(
                f"group {group.group_id} cannot be submitted: one of its tokens was sampled by version "
                f"{group.newest_version}, but the newest version reported to the buffer is {self.version}"
            )
        excess = self.bound.excess(len(group.episodes), group.tokens)
        if excess is not None:
            raise ValueError(f"group {group.group_id} cannot be submitted: it has {excess}")
        if not self.reserve(group.group_id, group.nbytes, group.attempt):
            raise ValueError(
                f"group {group.group_id} cannot be submitted: its {group.nbytes} bytes exceed buffer.max_mib "
                f"{self.settings.max_mib}, of which {self.budget.used} bytes are in use; reserve memory first"
            )
        self.budget.fill(live, group)
        reason = self._rules.on_arrival(group, self.version)
        if reason is not None:
            self.drop(group.group_id, reason, attempt=group.attempt)
        return reason is None

    def drop(self, group_id: int, reason: str, tokens: int = 0, attempt: int = 0) -> bool:
        """Drop a group, in progress or complete, and free its slot.

        Changes nothing and returns False after ``close``, or if the group was reassigned to another worker.

        Args:
            tokens: number of tokens sampled for the group, if it was not submitted.
        """
        if self._is_obsolete(group_id, attempt):
            return False
        if self.groups.get(group_id) is None:
            raise ValueError(f"group {group_id} cannot be dropped ({reason}): it is {self._state_of(group_id)}")
        live = self.groups.remove(group_id)
        self.budget.free(live)
        self._ledger.note_dropped(reason, live.group.trainable if live.group else tokens)
        return True

    def requeue(self, group_ids: Iterable[int]) -> list[int]:
        """The worker that held these groups is lost: other workers restart them, in the same slots and queue places.

        Returns:
            The groups that were in progress. The others are complete or gone, and are not changed.
        """
        requeued = self.groups.requeue(group_ids)
        for live in requeued:
            self.budget.withdraw(live)
        return [live.group_id for live in requeued]

    def _is_obsolete(self, group_id: int, attempt: int) -> bool:
        """Whether this attempt no longer counts: the run has ended, or the group was reassigned to another worker."""
        ended = self.closed and self.groups.was_admitted(group_id)
        return ended or self.groups.is_superseded(group_id, attempt)

    def _state_of(self, group_id: int) -> str:
        if self._batch is not None and any(live.group_id == group_id for live in self._batch[1]):
            return f"in the batch that updates version {self.version}"
        return self.groups.state_of(group_id)

    # -- called by the trainer and the publisher --------------------------------------------------------------

    def take(self, version: int) -> Batch | None:
        """The batch that updates ``version``; None while one of its groups is missing.

        Repeated calls for the same version return the same batch, so that every trainer rank can call it.

        Raises:
            ValueError: another version is next. Or a token above the lag bound would be trained: this is an assertion,
                no order of calls leads to it.
        """
        if version != self.version:
            raise ValueError(f"the batch of version {version} was requested, but the policy is at {self.version}")
        if self._batch is None and not self.closed and (chosen := self._next_batch()) is not None:
            groups = [live.group for live in chosen if live.group is not None]
            oldest = self._rules.oldest(version)
            lags = token_lags(groups, version, oldest, self.settings.max_policy_lag)
            uses = [live.times_trained for live in chosen] if self.settings.replay > 1 else []
            self._batch = Batch(version, groups, oldest, lags, uses), chosen
            for live in chosen:
                self.groups.remove(live.group_id)
        return self._batch[0] if self._batch is not None else None

    def _next_batch(self) -> list[LiveGroup] | None:
        return next_batch(self.groups, self.groups_per_step, self.window)

    def trained(self, version: int) -> None:
        """The update that made ``version``, from the batch taken for ``version - 1``, is done."""
        if version != self.version + 1 or self._batch is None:
            raise ValueError(
                f"version {version} cannot have been trained: the policy is at {self.version} "
                f"and {self.taken} groups are taken"
            )
        batch, trained = self._batch
        first = [live.group for live in trained if live.group is not None and not live.times_trained]
        self._ledger.note_trained(len(first), batch.lag_counts)
        self._ledger.note_wasted(MASKED, tokens_before(batch.oldest, first))
        note_overtaking(self.groups, [live.group_id for live in trained])
        self._batch = None
        self.batches += 1
        for live in trained:
            live.times_trained, live.last_trained_version = live.times_trained + 1, version
            self.groups.put_last(live)
        self._advance_to(version)

    def _advance_to(self, version: int) -> None:
        """The policy is at ``version``: remove groups that can no longer be trained."""
        self._rules.filtered, self.version = 0, version
        for live in list(self.groups):
            reason = self._rules.lag_reason(live.group, version) if live.group is not None else None
            if live.times_trained and (reason is not None or self._is_used_up(live)):
                self._retire(live)
            elif reason is not None:
                self.drop(live.group_id, reason, attempt=live.attempt)

    def _is_used_up(self, live: LiveGroup) -> bool:
        """Whether a trained group is retired. Retiring it loses nothing, so it also makes room for other groups."""
        return live.times_trained == self.settings.replay or self.budget.exceeded or self.closed

    def _retire(self, live: LiveGroup) -> None:
        """Remove a trained group. Its slot is freed once the version made from its last batch is published."""
        self.budget.free(self.groups.remove(live.group_id))
        if live.last_trained_version > self.published_version:
            self._unpublished[live.last_trained_version] = self._unpublished.get(live.last_trained_version, 0) + 1

    def note_supervised_version(self, version: int) -> None:
        """A supervised warm-start step made ``version`` without a batch. Allowed only before the first admission; no
        slot is free until ``version`` is published.

        Raises:
            ValueError: groups were admitted already, or the policy is past ``version``.
        """
        if version < self.version:
            raise ValueError(f"version {version} is before the current version {self.version}")
        if self.groups.admitted:  # their lag would grow without a batch being trained
            raise ValueError(
                f"supervised steps must precede rollouts, but {self.groups.admitted} groups were already admitted"
            )
        self.version, self._unpublished = version, {version: self.slots or 0}

    def note_replayed(self, version: int, group_ids: Iterable[int], lag_counts: np.ndarray) -> None:
        """The trainer of a resumed run has replayed the step that made ``version``, from its original batch. Allowed
        only before the first admission. ``version`` counts as published, because every generator serves it before
        anything is admitted.

        Args:
            group_ids: groups of the batch. Those that are here are now trained and gone; the others were admitted after
                the checkpoint. Skipped groups, with lower ids than these but not trained, are the next to be admitted.
            lag_counts: int64[L]: the batch's tokens by lag.
        """
        if version != self.version + 1 or self._batch is not None or self._unpublished:
            raise ValueError(
                f"version {version} cannot have been replayed: the policy is at {self.version}, "
                f"{self.taken} groups are taken, and {self.published_version} is published"
            )
        ids = list(group_ids)
        here = [self.groups.remove(group_id) for group_id in ids if self.groups.get(group_id) is not None]
        for live in here:
            self.budget.free(live)
        new = sum(self.groups.note_gone(group_id) for group_id in ids)
        self._ledger.note_trained(new + sum(not live.times_trained for live in here), lag_counts)
        note_overtaking(self.groups, ids)
        # The lag bound holds as in docs/buffer.md, "After a checkpoint", because replayed versions are the same ones:
        # - A complete group that is still here had the same place when the batches were first taken, so it was
        #   overtaken by at most the window, and fewer groups are before it than were then.
        # - In the original run, a group in progress may have been dropped and then overtaken by more than the window.
        #   It is now generated from scratch, by this version or a later one, so its count is capped at the window: no
        #   other group overtakes it, and the groups before it plus the window are fewer than (lag bound + 1) batches,
        #   as for a group that is admitted now.
        # - Skipped groups are admitted before new ones, so ids in the queue still ascend.
        for live in (live for live in self.groups if live.group is None and self.window is not None):
            live.overtaken = min(live.overtaken, self.window or 0)
        self.published_version = version
        self.batches += bool(ids)  # a supervised step has no groups
        self._advance_to(version)

    def published(self, version: int) -> None:
        """Every generator serves ``version`` now: free the slots of all batches up to it."""
        if not self.published_version <= version <= self.version:
            raise ValueError(
                f"version {version} cannot be published: {self.published_version} is published, and {self.version} is "
                "trained"
            )
        self.published_version = version
        self._unpublished = {made: groups for made, groups in self._unpublished.items() if made > version}

    def close(self) -> None:
        """End the run: nothing more is admitted or taken, and groups not yet taken are dropped as ``run ended``.

        A batch that is being trained may still be reported as trained.
        """
        for live in list(self.groups):
            if live.times_trained:
                self._retire(live)
            else:
                self.drop(live.group_id, RUN_ENDED, attempt=live.attempt)
        self.closed = True

    # -- status and metrics -----------------------------------------------------------------------------------

    def missing(self) -> list[int | None]:
        """The groups that the next batch is missing; None for each one not admitted yet."""
        first = self.groups.first(self.groups_per_step)
        in_progress: list[int | None] = [live.group_id for live in first if live.group is None]
        return in_progress + [None] * (self.groups_per_step - len(first))

    @property
    def held_back(self) -> bool:
        """Enough groups are complete for a batch, but the window requires a slow group first."""
        enough = self._batch is None and self.groups.complete() >= self.groups_per_step
        return enough and self._next_batch() is None

    def counts(self) -> Counts:
        complete, again = self.groups.complete(), self.groups.again()
        taken_again = sum(live.times_trained > 0 for live in self._batch[1]) if self._batch is not None else 0
        return Counts(
            admitted=self.groups.admitted,
            trained=self._ledger.trained,
            dropped=dict(self._ledger.dropped),
            wasted_tokens=dict(self._ledger.wasted_tokens),
            playing=len(self.groups) - complete,
            complete=complete - again,
            taken=self.taken - taken_again,
            again=again + taken_again,
            unpublished=sum(self._unpublished.values()),
            slots=self.slots,
            slots_free=self.slots_free,
            version=self.version,
            published=self.published_version,
            cursor=self.groups.next_cursor,
            nbytes=self.budget.used,
            lag_counts=self._ledger.lag_counts.tolist(),
        )

    # -- checkpoint and resume --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain values (complete groups as bytes)."""
        return {
            "groups_per_step": self.groups_per_step,
            "slots": self.slots,
            "window": self.window,
            "replay": self.settings.replay,
            "version": self.version,
            "batches": self.batches,
            "steps": self.steps.jumps,
            "filtered": self._rules.filtered,
            "ledger": self._ledger.state(),
            **self.groups.state(self._batch[1] if self._batch is not None else []),
        }

    @classmethod
    def restore(
        cls,
        groups_per_step: int,
        settings: BufferSettings,
        state: dict[str, Any],
        generation: int = 0,
        bound: GroupBound = UNBOUNDED,
        usable: Callable[[SerializedGroup], bool] = lambda group: True,
    ) -> BufferCore:
        """Resume from :meth:`state`, once every generator serves its version.

        The groups of a batch that was being trained count as complete again. Groups that were in progress are
        restarted, and so are groups with a token of a later version: the resumed trainer has not made that version, and
        may make a different one with the same number.

        Args:
            generation: how often the run was resumed; attempts of earlier generations are ignored.
            usable: whether a complete group can be trained with the run's settings; others are restarted, too.

        Raises:
            ValueError: groups per step, slots, window or replay differ from those of the state.
        """
        core = cls(groups_per_step, settings, state["version"], bound=bound)
        given = {"groups_per_step": groups_per_step, "slots": core.slots, "window": core.window}
        for name, value in (given | {"replay": settings.replay}).items():
            if value != state[name]:
                raise ValueError(
                    f"Cannot resume: the buffer's {name} was {state[name]} and is now {value}, but the lag bound "
                    "depends on it. Resume with the same groups-per-step and buffer settings."
                )
        # States of before 0.2 lack both: supervised steps counted as steps, and a group's step was that of its number.
        core.batches = state.get("batches", core.version)
        core.steps = AdmissionSteps(
            groups_per_step, tuple((block, step) for block, step in state.get("steps", [(0, 0)]))
        )
        core._rules.filtered = state["filtered"]
        core._ledger = Ledger.restore(state["ledger"])
        core.groups = LiveGroups.restore(state, generation)
        for live in core.groups:
            if live.group is None:
                continue
            if (live.group.newest_version or 0) > core.version or not usable(live.group):
                core._ledger.note_wasted(ROLLED_BACK, live.group.trainable)
                live.group = None
        core.budget.used = sum(live.nbytes for live in core.groups)
        core.requeue([live.group_id for live in core.groups])
        return core


# -- memory budget: bytes of complete groups, and bytes reserved by workers -------------------------------------------


class ByteBudget:
    """Counts the bytes that groups use: the bytes reserved by the worker, then the group's own until it is trained.

    Args:
        limit: maximum bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @property
    def exceeded(self) -> bool:
        """Whether more than the limit is used, which happens because groups of the next batch always fit."""
        return self.used > self.limit

    def in_the_way(self, dispensable: Iterable[LiveGroup], nbytes: int) -> list[LiveGroup]:
        """The fewest first groups of ``dispensable`` whose removal makes ``nbytes`` fit; empty if ``nbytes`` already
        fit, or would not fit even without all of them."""
        found, excess, others = list[LiveGroup](), self.used + nbytes - self.limit, iter(dispensable)
        while excess > 0 and (live := next(others, None)) is not None:
            found.append(live)
            excess -= live.nbytes
        return found if excess <= 0 else []

    def reserve(self, live: LiveGroup, nbytes: int, always: bool) -> bool:
        """Reserve ``nbytes`` for a group, once; False if they do not fit. With ``always`` they count as fitting."""
        if live.reserved:
            return True
        if self.used + nbytes > self.limit and not always:
            return False
        live.reserved = nbytes
        self.used += nbytes
        return True

    def fill(self, live: LiveGroup, group: SerializedGroup) -> None:
        """The group has arrived: its own bytes replace the reserved ones."""
        self.used += group.nbytes - live.reserved
        live.reserved, live.group = 0, group

    def withdraw(self, live: LiveGroup) -> None:
        """Cancel a reservation, because the worker is lost."""
        self.used -= live.reserved
        live.reserved = 0

    def free(self, live: LiveGroup) -> None:
        """The group is trained or dropped."""
        self.used -= live.nbytes


# -- filtering: the settings' rules on what is not trained, and the assertion of the lag bound ------------------------


@dataclass(frozen=True, slots=True)
class LagLimit:
    """What is not trained above a maximum lag: the whole group, or, with ``mask``, only its tokens above the limit."""

    lag: int
    mask: bool
    reason: str

    def drops(self, group: SerializedGroup, version: int) -> bool:
        decisive = group.newest_version if self.mask else group.oldest_version
        return decisive is not None and version - decisive > self.lag


def token_lags(groups: Iterable[SerializedGroup], version: int, oldest: int | None, bound: int | None) -> np.ndarray:
    """Number of tokens to train by lag behind ``version``: int64[bound + 1], or as long as needed without a bound.

    Raises:
        ValueError: a token would be trained whose lag is negative or above the bound.
    """
    by_lag: Counter[int] = Counter()
    for group in groups:
        for episode in group.episodes:
            for sampled_by, count in episode.tokens_by_version.items():
                if oldest is not None and sampled_by < oldest:
                    continue
                if version < sampled_by or (bound is not None and version - sampled_by > bound):
                    raise ValueError(
                        f"group {group.group_id} has {count} tokens sampled by version {sampled_by} in the batch that "
                        f"updates version {version}, but the maximum policy lag is {bound}"
                    )
                by_lag[version - sampled_by] += count
    length = 1 + (max(by_lag, default=0) if bound is None else bound)
    return np.asarray([by_lag[lag] for lag in range(length)], np.int64)


def tokens_before(oldest: int | None, groups: Iterable[SerializedGroup]) -> int:
    """Number of trainable tokens sampled by versions before ``oldest``."""
    if oldest is None:
        return 0
    by_version = (item for group in groups for episode in group.episodes for item in episode.tokens_by_version.items())
    return sum(tokens for sampled_by, tokens in by_version if sampled_by < oldest)


class FilterRules:
    """Which groups and tokens the settings exclude from training, for batches of ``groups_per_step`` groups."""

    def __init__(self, settings: BufferSettings, groups_per_step: int) -> None:
        self._partial = settings.partial
        self._max_filtered_groups = settings.max_filtered * groups_per_step if settings.drop_equal_rewards else 0
        self.filtered = 0
        """Groups dropped for equal rewards since the last batch was trained."""
        self._limits: list[LagLimit] = []
        if settings.max_policy_lag is not None:
            reason = STALE if settings.late == "wait" else LATE
            self._limits.append(LagLimit(settings.max_policy_lag, settings.late == "mask", reason))
        if settings.reject_lag is not None:
            self._limits.append(LagLimit(settings.reject_lag, settings.reject == "mask", REJECTED))

    def oldest(self, version: int) -> int | None:
        """The oldest version whose tokens may be trained in the update of ``version``; None: any version."""
        return version - min(limit.lag for limit in self._limits) if self._limits else None

    def lag_reason(self, group: SerializedGroup, version: int) -> str | None:
        """Why the group is too old for the update of ``version`` and of later ones; None if it is not."""
        return next((limit.reason for limit in self._limits if limit.drops(group, version)), None)

    def on_arrival(self, group: SerializedGroup, version: int) -> str | None:
        """Why a group that was just submitted is not trained; None if it is kept."""
        if group.failed and self._partial == "drop":
            return PARTIAL
        # Beyond this number they are trained: refilling the batch forever would hang the run.
        if self.filtered < self._max_filtered_groups and rewards_are_equal(group):
            self.filtered += 1
            return EQUAL_REWARDS
        return self.lag_reason(group, version)


def rewards_are_equal(group: SerializedGroup) -> bool:
    """Whether all sequences of the group, or with seats all sequences of each seat, have the same reward."""
    return len({(episode.seat, episode.reward) for episode in group.episodes}) == len(
        {episode.seat for episode in group.episodes}
    )
