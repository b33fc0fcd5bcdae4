"""Decides which groups may start, which are trained next, and which are left out.

A group needs a *slot* to start (``admit``); there are ``(max_policy_lag + 1) * groups_per_step - window`` of them. The
batch that updates version ``v`` is made of the first ``groups_per_step`` complete groups in order of admission, but no
group is overtaken by more than ``window`` others in its life (``take``, ``order.py``). A slot returns when its group
is dropped, or when the version made from its batch is *published*, that is, served by every generator. It follows
that no token is trained more than ``max_policy_lag`` versions after the one that drew it: docs/buffer.md has the
proof, and ``take`` asserts it over the tokens' own versions.

This module knows no actors and never waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from monarch_rl.buffer.budget import ByteBudget
from monarch_rl.buffer.groups import LiveGroups
from monarch_rl.buffer.ledger import MASKED, PLAYED_AGAIN, RUN_ENDED, Counts, Ledger
from monarch_rl.buffer.order import Live, next_batch, note_overtaking
from monarch_rl.buffer.rules import Rules, token_lags
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.packed import PackedGroup
from monarch_rl.episode.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimiser step."""

    version: int
    """The version that they update."""
    groups: list[PackedGroup]
    """In order of admission."""
    oldest: int | None
    """Tokens that earlier versions drew are not trained; None trains all."""
    lag_counts: np.ndarray
    """int64[L]: tokens to train by lag 0, 1, ..."""


# size: every event moves groups, slots, bytes and counts together, and the checks belong where these move
class BufferCore:
    """The state machine of the module's rules.

    What can be understood alone is in ``groups.py``, ``budget.py``, ``order.py``, ``rules.py`` and ``ledger.py``.

    Args:
        groups_per_step: groups of one optimiser step.
        settings: see there.
        version: optimiser steps done, and served, at the start (a resumed run starts above 0).
        task_cursor: where in the stream of tasks to start.

    Raises:
        ValueError: a number is out of range. Every method raises ValueError, with group and state, when it is asked
            for something impossible.
    """

    def __init__(self, groups_per_step: int, settings: BufferSettings, version: int = 0, task_cursor: int = 0) -> None:
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
        self.groups_per_step = groups_per_step
        self.settings = settings
        self.window = settings.window_for(groups_per_step)
        self.slots = settings.slots_for(groups_per_step)
        self.version = version
        self.published_version = version
        self.closed = False
        self.groups = LiveGroups(task_cursor)
        self.budget = ByteBudget(settings.max_mib * 2**20)
        self._batch: tuple[Batch, list[Live]] | None = None
        self._unpublished: dict[int, int] = {}
        """Groups by the version that was made from them."""
        self._rules = Rules(settings, groups_per_step)
        self._ledger = Ledger()

    @property
    def slots_free(self) -> int | None:
        """None is any number."""
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
    def first_playing(self) -> int | None:
        """The group admitted first of those that are not complete; None if there is none. After ``close`` it is 0:
        nothing is known of the groups that were being played."""
        return 0 if self.closed else next((live.group_id for live in self.groups if live.group is None), None)

    # -- workers ----------------------------------------------------------------------------------------------

    def admit(self) -> Ticket | None:
        """Start a group if a slot is free and the run is not closed; first those that a lost worker had begun."""
        if self.closed:
            return None
        live = self.groups.begin_anew()
        if live is None:
            if self.slots_free == 0:
                return None
            live = self.groups.admit()
        return Ticket(live.group_id, live.task_cursor, live.attempt)

    def reserve(self, group_id: int, nbytes: int, attempt: int = 0) -> bool:
        """Promise room for a group of ``nbytes`` bytes; False if it has to wait.

        The groups admitted first among those still here, as many as a batch has, never wait: with them the next batch
        is complete, and its training makes room. A group that is not expected any more never waits either.
        """
        if self._is_unexpected(group_id, attempt):
            return True
        live = self.groups.playing(group_id, "be given room")
        due = any(first.group_id == group_id for first in self.groups.first(self.groups_per_step))
        return self.budget.reserve(live, nbytes, always=due)

    def put(self, group: PackedGroup) -> bool:
        """Hand in a complete group; True if it is kept.

        It is not kept if a rule of the settings leaves it out, if it was given to another worker, or after ``close``.
        """
        if self._is_unexpected(group.group_id, group.attempt):
            if not self.closed:
                self._ledger.note_wasted(PLAYED_AGAIN, group.trainable)
            return False
        live = self.groups.playing(group.group_id, "be put")
        if group.newest_version is None:
            raise ValueError(f"group {group.group_id} cannot be put: it has no token to train")
        if group.newest_version > self.version:
            raise ValueError(
                f"group {group.group_id} cannot be put: version {group.newest_version} drew a token of it, "
                f"but only {self.version} optimiser steps were reported"
            )
        if not self.reserve(group.group_id, group.nbytes, group.attempt):
            raise ValueError(
                f"group {group.group_id} cannot be put: its {group.nbytes} bytes do not fit beside "
                f"{self.budget.used} within buffer.max-mib {self.settings.max_mib}; reserve room first"
            )
        self.budget.fill(live, group)
        reason = self._rules.on_arrival(group, self.version)
        if reason is not None:
            self.drop(group.group_id, reason, attempt=group.attempt)
        return reason is None

    def drop(self, group_id: int, reason: str, tokens: int = 0, attempt: int = 0) -> bool:
        """Drop a group, played or complete; its slot is free again.

        Changes nothing, and returns False, after ``close``, or if the group was given to another worker.

        Args:
            tokens: that were drawn for it, if it was not put.
        """
        if self._is_unexpected(group_id, attempt):
            return False
        if self.groups.get(group_id) is None:
            raise ValueError(f"group {group_id} cannot be dropped ({reason}): it is {self._state_of(group_id)}")
        live = self.groups.remove(group_id)
        self.budget.free(live)
        self._ledger.note_dropped(reason, live.group.trainable if live.group else tokens)
        return True

    def release(self, group_ids: Iterable[int]) -> list[int]:
        """The worker that played these groups is lost: others start them again, in the same slots and places.

        Returns:
            Those that were being played; the others are complete or gone, and stay as they are.
        """
        released = self.groups.release(group_ids)
        for live in released:
            self.budget.withdraw(live)
        return [live.group_id for live in released]

    def _is_unexpected(self, group_id: int, attempt: int) -> bool:
        """Nobody expects this play of the group any more: the run has ended, or another worker has the group."""
        ended = self.closed and 0 <= group_id < self.groups.admitted
        return ended or self.groups.is_superseded(group_id, attempt)

    def _state_of(self, group_id: int) -> str:
        if self._batch is not None and any(live.group_id == group_id for live in self._batch[1]):
            return f"in the batch that updates version {self.version}"
        return self.groups.state_of(group_id)

    # -- trainer ----------------------------------------------------------------------------------------------

    def take(self, version: int) -> Batch | None:
        """The batch that updates ``version``; None while one of its groups is missing.

        Asked again for the same version it gives the same batch, so that every trainer rank can ask.

        Raises:
            ValueError: another version is next; or a token above the bound would be trained, which no order of calls
                leads to.
        """
        if version != self.version:
            raise ValueError(f"a batch for version {version} was asked for, but the policy is at {self.version}")
        if self._batch is None and not self.closed and (chosen := self._next_batch()) is not None:
            groups = [live.group for live in chosen if live.group is not None]
            oldest = self._rules.oldest(version)
            lags = token_lags(groups, version, oldest, self.settings.max_policy_lag)
            self._batch = Batch(version, groups, oldest, lags), chosen
            for live in chosen:
                self.groups.remove(live.group_id)
        return self._batch[0] if self._batch is not None else None

    def _next_batch(self) -> list[Live] | None:
        return next_batch(self.groups, self.groups_per_step, self.window)

    def trained(self, version: int) -> None:
        """The optimiser step that made ``version`` is done, with the batch taken for ``version - 1``."""
        if version != self.version + 1 or self._batch is None:
            raise ValueError(
                f"version {version} cannot have been trained: the policy is at {self.version} "
                f"and {self.taken} groups are taken"
            )
        batch, trained = self._batch
        self._ledger.note_trained(len(trained), batch.lag_counts)
        self._ledger.note_wasted(MASKED, sum(g.trainable for g in batch.groups) - int(batch.lag_counts.sum()))
        for live in trained:
            self.budget.free(live)
        self._unpublished[version] = len(trained)
        note_overtaking(self.groups, [live.group_id for live in trained])
        self._batch, self._rules.filtered, self.version = None, 0, version
        for live in list(self.groups):
            reason = self._rules.lag_reason(live.group, version) if live.group is not None else None
            if reason is not None:
                self.drop(live.group_id, reason, attempt=live.attempt)

    def published(self, version: int) -> None:
        """Every generator serves ``version`` now: the slots of all batches up to it are free again."""
        if not self.published_version <= version <= self.version:
            raise ValueError(
                f"version {version} cannot be published: {self.published_version} is, and {self.version} is trained"
            )
        self.published_version = version
        self._unpublished = {made: groups for made, groups in self._unpublished.items() if made > version}

    def close(self) -> None:
        """End the run: nothing more is admitted or taken, and groups that were not taken are dropped as ``run ended``.

        A batch that is being trained may still be reported as trained.
        """
        for live in list(self.groups):
            self.drop(live.group_id, RUN_ENDED, attempt=live.attempt)
        self.closed = True

    # -- figures ----------------------------------------------------------------------------------------------

    def missing(self) -> list[int | None]:
        """The groups that the next batch lacks; None stands for one that is not admitted yet."""
        first = self.groups.first(self.groups_per_step)
        playing: list[int | None] = [live.group_id for live in first if live.group is None]
        return playing + [None] * (self.groups_per_step - len(first))

    @property
    def held_back(self) -> bool:
        """Enough groups are complete for a batch, but a slow one is due first."""
        enough = self._batch is None and self.groups.complete() >= self.groups_per_step
        return enough and self._next_batch() is None

    def counts(self) -> Counts:
        complete = self.groups.complete()
        return Counts(
            admitted=self.groups.admitted,
            trained=self._ledger.trained,
            dropped=dict(self._ledger.dropped),
            wasted_tokens=dict(self._ledger.wasted_tokens),
            playing=len(self.groups) - complete,
            complete=complete,
            taken=self.taken,
            unpublished=sum(self._unpublished.values()),
            slots=self.slots,
            slots_free=self.slots_free,
            version=self.version,
            published=self.published_version,
            nbytes=self.budget.used,
            lag_counts=self._ledger.lag_counts.tolist(),
        )

    # -- resuming ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain values (complete groups as their bytes)."""
        return {
            "groups_per_step": self.groups_per_step,
            "slots": self.slots,
            "window": self.window,
            "version": self.version,
            "filtered": self._rules.filtered,
            "ledger": self._ledger.state(),
            **self.groups.state(self._batch[1] if self._batch is not None else []),
        }

    @classmethod
    def restore(cls, groups_per_step: int, settings: BufferSettings, state: dict[str, Any]) -> BufferCore:
        """Go on from :meth:`state`, once every generator serves its version.

        A batch that was being trained is complete again, and groups that were being played are started again.

        Raises:
            ValueError: the settings give other slots, another window or another batch than the state had.
        """
        core = cls(groups_per_step, settings, state["version"])
        for name in ("groups_per_step", "slots", "window"):
            if getattr(core, name) != state[name]:
                raise ValueError(
                    f"a buffer with {name} {state[name]} cannot go on with {getattr(core, name)}: its bound was "
                    "counted with the former; resume with the same groups-per-step and buffer settings"
                )
        core._rules.filtered = state["filtered"]
        core._ledger = Ledger.restore(state["ledger"])
        core.groups = LiveGroups.restore(state)
        core.budget.used = sum(live.nbytes for live in core.groups)
        core.release([live.group_id for live in core.groups])
        return core
