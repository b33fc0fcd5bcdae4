"""Which groups may start, which are trained next, and what is left out.

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
from itertools import islice
from typing import Any

import numpy as np

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


class BufferCore:
    """The state machine of the module's rules.

    Args:
        groups_per_step: groups of one optimiser step.
        settings: see there.
        version: optimiser steps done, and served, at the start (a resumed run starts above 0).
        task_cursor: where in the stream of tasks to start.

    Raises:
        ValueError: a number is out of range. Every method raises ValueError, naming group and state, when it is
            asked for what cannot be.
    """

    def __init__(self, groups_per_step: int, settings: BufferSettings, version: int = 0, task_cursor: int = 0) -> None:
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
        self.groups_per_step = groups_per_step
        self.settings = settings
        self.window = settings.window_for(groups_per_step)
        self.slots = settings.slots_for(groups_per_step)
        self.max_bytes = settings.max_mib * 2**20
        self.version = version
        self.published_version = version
        self.closed = False
        self._first_task = task_cursor
        self._admitted = 0
        self._live: dict[int, Live] = {}
        """In order of admission: dicts keep it."""
        self._idle: list[int] = []
        """Groups whose worker was lost, the first admitted first."""
        self._attempts: dict[int, int] = {}
        """Of the groups that were begun anew, here or gone."""
        self._batch: tuple[Batch, list[Live]] | None = None
        self._unpublished: dict[int, int] = {}
        """Groups by the version that was made from them."""
        self._rules = Rules(settings, groups_per_step)
        self._nbytes = 0
        self._ledger = Ledger()

    @property
    def slots_free(self) -> int | None:
        """None is any number."""
        if self.slots is None:
            return None
        used = len(self._live) + self.taken + sum(self._unpublished.values())
        assert used <= self.slots, f"{used} slots used of {self.slots}"
        return self.slots - used

    @property
    def taken(self) -> int:
        """Groups in the batch that is being trained."""
        return len(self._batch[1]) if self._batch is not None else 0

    # -- workers ----------------------------------------------------------------------------------------------

    def admit(self) -> Ticket | None:
        """Start a group if a slot is free and the run is not closed; first those that a lost worker had begun."""
        if self.closed:
            return None
        if self._idle:
            one = self._live[self._idle.pop(0)]
            one.idle = False
        elif self.slots_free == 0:
            return None
        else:
            one = Live(self._admitted, self._first_task + self._admitted)
            self._live[one.group_id] = one
            self._admitted += 1
        return Ticket(one.group_id, one.task_cursor, one.attempt)

    def reserve(self, group_id: int, nbytes: int, attempt: int = 0) -> bool:
        """Promise room for a group of ``nbytes`` bytes; False if it has to wait.

        The groups admitted first among those still here, as many as a batch has, never wait: with them the next batch
        is complete, and its training makes room. A group that is not expected any more never waits either.
        """
        if self._given_up(group_id, attempt):
            return True
        one = self._playing(group_id, "be given room")
        if one.reserved:
            return True
        fits = self._nbytes + nbytes <= self.max_bytes
        if not fits and group_id not in islice(self._live, self.groups_per_step):
            return False
        one.reserved = nbytes
        self._nbytes += nbytes
        return True

    def put(self, group: PackedGroup) -> bool:
        """Hand in a complete group; True if it is kept.

        It is not if a rule of the settings leaves it out, if it was given to another worker, or after ``close``.
        """
        if self._given_up(group.group_id, group.attempt):
            if not self.closed:
                self._ledger.note_wasted(PLAYED_AGAIN, group.trainable)
            return False
        one = self._playing(group.group_id, "be put")
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
                f"{self._nbytes} within buffer.max-mib {self.settings.max_mib}; reserve room first"
            )
        self._nbytes += group.nbytes - one.reserved
        one.reserved, one.group = 0, group
        reason = self._rules.on_arrival(group, self.version)
        if reason is not None:
            self.drop(group.group_id, reason, attempt=group.attempt)
        return reason is None

    def drop(self, group_id: int, reason: str, tokens: int = 0, attempt: int = 0) -> None:
        """Give a group up, played or complete; its slot is free again.

        Changes nothing after ``close``, or if the group was given to another worker.

        Args:
            tokens: that were drawn for it, if it was not put.
        """
        if self._given_up(group_id, attempt):
            return
        if group_id not in self._live:
            raise ValueError(f"group {group_id} cannot be dropped ({reason}): it is {self._state(group_id)}")
        one = self._live.pop(group_id)
        self._nbytes -= one.reserved + (one.group.nbytes if one.group else 0)
        if one.idle:
            self._idle.remove(group_id)
        self._ledger.note_dropped(reason, one.group.trainable if one.group else tokens)

    def release(self, group_ids: Iterable[int]) -> list[int]:
        """The worker that played these groups is lost: others begin them anew, in the same slots and places.

        Returns:
            Those that were being played; the others are complete or gone, and stay as they are.
        """
        released = [group_id for group_id in group_ids if group_id in self._live]
        released = [group_id for group_id in released if not self._live[group_id].group]
        released = [group_id for group_id in released if not self._live[group_id].idle]
        for group_id in released:
            one = self._live[group_id]
            self._nbytes -= one.reserved
            one.reserved, one.idle, one.attempt = 0, True, one.attempt + 1
            self._attempts[group_id] = one.attempt
        self._idle = sorted(self._idle + released)
        return released

    # -- trainer ----------------------------------------------------------------------------------------------

    def take(self, version: int) -> Batch | None:
        """The batch that updates ``version``; None while one of its groups is missing.

        Asked again for the same version it gives the same batch, so that every trainer rank can ask.

        Raises:
            ValueError: another version is next; or a token above the bound would be trained, which no order of calls
                brings about.
        """
        if version != self.version:
            raise ValueError(f"a batch for version {version} was asked for, but the policy is at {self.version}")
        if self._batch is None and not self.closed:
            live = next_batch(self._live.values(), self.groups_per_step, self.window)
            if live is not None:
                groups = [one.group for one in live if one.group is not None]
                oldest = self._rules.oldest(version)
                lags = token_lags(groups, version, oldest, self.settings.max_policy_lag)
                self._batch = Batch(version, groups, oldest, lags), live
                for one in live:
                    del self._live[one.group_id]
        return self._batch[0] if self._batch is not None else None

    def trained(self, version: int) -> None:
        """The optimiser step that made ``version`` is done, with the batch taken for ``version - 1``."""
        if version != self.version + 1 or self._batch is None:
            raise ValueError(
                f"version {version} cannot have been trained: the policy is at {self.version} "
                f"and {self.taken} groups are taken"
            )
        batch, live = self._batch
        self._ledger.note_trained(len(live), batch.lag_counts)
        self._ledger.note_wasted(MASKED, sum(g.trainable for g in batch.groups) - int(batch.lag_counts.sum()))
        self._nbytes -= sum(group.nbytes for group in batch.groups)
        self._unpublished[version] = len(live)
        note_overtaking(self._live.values(), [one.group_id for one in live])
        self._batch, self._rules.filtered, self.version = None, 0, version
        for one in list(self._live.values()):
            reason = self._rules.lag_reason(one.group, version) if one.group is not None else None
            if reason is not None:
                self.drop(one.group_id, reason, attempt=one.attempt)

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
        for one in list(self._live.values()):
            self.drop(one.group_id, RUN_ENDED, attempt=one.attempt)
        self.closed = True

    # -- figures ----------------------------------------------------------------------------------------------

    def missing(self) -> list[int | None]:
        """The groups with which the next batch would be complete; None stands for one that is not even admitted."""
        first = list(islice(self._live.values(), self.groups_per_step))
        playing: list[int | None] = [one.group_id for one in first if one.group is None]
        return playing + [None] * (self.groups_per_step - len(first))

    @property
    def held_back(self) -> bool:
        """Enough groups are complete for a batch, but a slow one is due first."""
        complete = sum(one.group is not None for one in self._live.values())
        if self._batch is not None or complete < self.groups_per_step:
            return False
        return next_batch(self._live.values(), self.groups_per_step, self.window) is None

    def counts(self) -> Counts:
        playing = sum(one.group is None for one in self._live.values())
        return Counts(
            admitted=self._admitted,
            trained=self._ledger.trained,
            dropped=dict(self._ledger.dropped),
            wasted_tokens=dict(self._ledger.wasted_tokens),
            playing=playing,
            complete=len(self._live) - playing,
            taken=self.taken,
            unpublished=sum(self._unpublished.values()),
            slots=self.slots,
            slots_free=self.slots_free,
            version=self.version,
            published=self.published_version,
            nbytes=self._nbytes,
            lag_counts=self._ledger.lag_counts.tolist(),
        )

    # -- resuming ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, in plain values (complete groups as their bytes)."""
        taken = self._batch[1] if self._batch is not None else []
        live = sorted([*taken, *self._live.values()], key=lambda one: one.group_id)
        return {
            "groups_per_step": self.groups_per_step,
            "slots": self.slots,
            "window": self.window,
            "version": self.version,
            "first_task": self._first_task,
            "admitted": self._admitted,
            "attempts": dict(self._attempts),
            "filtered": self._rules.filtered,
            "ledger": self._ledger.state(),
            "live": [
                (one.group_id, one.task_cursor, one.attempt, one.overtaken, one.group.data if one.group else None)
                for one in live
            ],
        }

    @classmethod
    def restore(cls, groups_per_step: int, settings: BufferSettings, state: dict[str, Any]) -> BufferCore:
        """Go on from :meth:`state`, once every generator serves its version.

        A batch that was being trained is complete again, and groups that were being played are begun anew.

        Raises:
            ValueError: the settings give other slots, another window or another batch than the state had.
        """
        core = cls(groups_per_step, settings, state["version"], state["first_task"])
        for name in ("groups_per_step", "slots", "window"):
            if getattr(core, name) != state[name]:
                raise ValueError(
                    f"a buffer with {name} {state[name]} cannot go on with {getattr(core, name)}: its bound was "
                    "counted with the former; resume with the same groups-per-step and buffer settings"
                )
        core._admitted, core._rules.filtered = state["admitted"], state["filtered"]
        core._attempts = dict(state["attempts"])
        core._ledger = Ledger.restore(state["ledger"])
        for group_id, task_cursor, attempt, overtaken, data in state["live"]:
            group = PackedGroup.read(data) if data is not None else None
            core._live[group_id] = Live(group_id, task_cursor, attempt, overtaken=overtaken, group=group)
            core._nbytes += group.nbytes if group is not None else 0
        core.release(list(core._live))
        return core

    # -- inside -----------------------------------------------------------------------------------------------

    def _given_up(self, group_id: int, attempt: int) -> bool:
        """Nobody expects this play of the group any more: the run ended, or another worker has the group."""
        ended = self.closed and 0 <= group_id < self._admitted
        return ended or attempt < self._attempts.get(group_id, 0)

    def _playing(self, group_id: int, verb: str) -> Live:
        one = self._live.get(group_id)
        if one is None or one.group is not None or one.idle:
            raise ValueError(f"group {group_id} cannot {verb}: it is {self._state(group_id)}")
        return one

    def _state(self, group_id: int) -> str:
        if not 0 <= group_id < self._admitted:
            return "not admitted"
        if group_id in self._live:
            one = self._live[group_id]
            return "complete already" if one.group else "waiting for a worker" if one.idle else "being played"
        if self._batch is not None and any(one.group_id == group_id for one in self._batch[1]):
            return f"in the batch that updates version {self.version}"
        return "trained or dropped already"
