"""The buffer's promises under arbitrary orders of events, against a model with books of its own.

The generators are modelled as the buffer's premise states: a token of a group is sampled by any version from the one
published when the group was admitted up to the newest trained one (a replica may commit a version before all did, that
is, before it is published). Checkpoints are made at any moment, and the run returns to one at any later moment, also
several times: tokens trained and sampled since then belong to versions that do not exist any more, and new versions get
their numbers. Or some of the batches that were trained since the checkpoint are replayed, as from a journal. Each run
of the quick test tries the same few orders; the slow one tries many, each time others: the seed is printed, and
``BUFFER_SEED=<seed>`` repeats them.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from monarch_rl.buffer.core import BufferCore
from monarch_rl.buffer.groups import ATTEMPTS
from monarch_rl.buffer.ledger import EQUAL_REWARDS, LATE, PARTIAL, PLAYED_AGAIN, REJECTED, RUN_ENDED, STALE
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.admission_steps import AdmissionSteps
from monarch_rl.episode.episode import Fork, Group
from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from tests.buffer.helpers import episode

STEPS = 25
SEED = int(os.environ.get("BUFFER_SEED", random.SystemRandom().randrange(2**31)))
TIGHT_BYTES = 1000
"""A byte budget of some three of the groups below."""
WORKERS = 3
ANY = st.integers(0, 10**6)


BOUND = GroupBound(max_sequences=6, max_tokens=18)
"""What a group may hold. Each sequence has 3 to 5 tokens."""


@functools.lru_cache(100_000)
def read_group(
    group_id: int, attempt: int, versions: tuple[int, ...], failed: int, equal: bool, sequences: int = 2
) -> SerializedGroup:
    """Two rollouts: the first of one sequence, the second of all others, which are branches; groups of four or more
    sequences have two seats."""
    episodes = [episode(versions, 1.0)]
    episodes += [episode(versions[-1:], 1.0 if equal else float(n)) for n in range(sequences - 1)]
    for place, one in enumerate(episodes):
        one.rollout, one.seat = min(place, 1), f"seat {place % 2}" if sequences > 3 else ""
        one.fork = Fork(place - 2, 1) if place > 1 else None
    return SerializedGroup.read(serialize_group(Group(group_id, group_id, episodes, failed, attempt)))


@functools.cache
def most_bytes() -> int:
    """The largest size of a group within the bound."""
    largest = [
        read_group(999, 9, (97, 98, 99)[:n], 1, False, sequences) for n in (1, 2, 3) for sequences in range(2, 9)
    ]
    return max(group.nbytes for group in largest if BOUND.excess(len(group.episodes), group.tokens) is None)


def all_equal(group: SerializedGroup) -> bool:
    """Whether all rewards of each seat are equal."""
    by_seat: dict[str, set[float]] = {}
    for one in group.episodes:
        by_seat.setdefault(one.seat, set()).add(one.reward)
    return all(len(rewards) == 1 for rewards in by_seat.values())


@dataclass
class Attempt:
    """A group that a worker runs, or ran when it was lost."""

    worker: int
    attempt: int
    reserved: int = 0


@dataclass
class Books:
    """The model's books of the groups: each is in exactly one place."""

    published_at: dict[int, int] = field(default_factory=dict)
    playing: dict[int, Attempt] = field(default_factory=dict)
    idle: dict[int, int] = field(default_factory=dict)
    """Attempts of the groups that wait for a worker."""
    complete: dict[int, SerializedGroup] = field(default_factory=dict)
    taken: dict[int, SerializedGroup] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Attempts (group, attempt) whose worker was lost: it may still submit them."""
    again_tokens: int = 0
    unpublished: dict[int, int] = field(default_factory=dict)
    overtaken: Counter[int] = field(default_factory=Counter)
    filtered: int = 0
    queue: list[int] = field(default_factory=list)
    """Groups in the order in which batches take them; groups of the batch in training keep their places."""
    again: dict[int, SerializedGroup] = field(default_factory=dict)
    """Trained, and waiting for a replay."""
    uses: Counter[int] = field(default_factory=Counter)
    made: dict[int, int] = field(default_factory=dict)
    """By group, the version made from its last batch."""
    passed: list[int] = field(default_factory=list)
    """Not admitted, although later ones were trained."""
    steps: dict[int, AdmissionSteps] = field(default_factory=dict)
    """By group, the steps up to its block."""
    sampled_by: dict[int, list[int]] = field(default_factory=dict)
    """By group, the version that sampled each token, by its name in ``AnyOrder.lineage``."""

    def copied(self) -> Books:
        """Groups never change."""
        values = {name: copy.copy(value) for name, value in vars(self).items()}
        return Books(
            **values | {"playing": {group_id: copy.copy(running) for group_id, running in self.playing.items()}}
        )

    def everything_is_complete_or_idle(self, first_attempt: int) -> None:
        """The state a restored buffer begins with: nothing outside of it survives."""
        for group_id, group in self.taken.items():
            (self.again if self.uses[group_id] else self.complete)[group_id] = group
        self.taken, self.unpublished = {}, {}
        begun = self.idle | {group_id: running.attempt for group_id, running in self.playing.items()}
        self.idle = {group_id: max(attempt + 1, first_attempt) for group_id, attempt in begun.items()}
        self.playing = {}


def tokens(group: SerializedGroup) -> list[int]:
    """The version of each trainable token."""
    return [version for e in group.episodes for version, n in e.tokens_by_version.items() for _ in range(n)]


DEPTHS = st.sampled_from([None, 0, 1, 2, 3])


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        k=st.integers(1, 3),
        lag=DEPTHS,
        window=ANY,
        late=st.sampled_from(["wait", "wait", "wait", "drop", "mask"]),
        reject=st.sampled_from([None, None, "drop", "mask"]),
        equal=st.booleans(),
        partial=st.sampled_from(["train", "drop"]),
        tight=st.booleans(),
        replay=st.sampled_from([1, 1, 2, 3]),
    )
    def start(
        self,
        k: int,
        lag: int | None,
        window: int,
        late: str,
        reject: str | None,
        equal: bool,
        partial: str,
        tight: bool,
        replay: int,
    ) -> None:
        late = "wait" if lag is None else late
        self.replay = replay = replay if lag is None else min(replay, lag + 1)
        fixed = window % ((4 if lag is None else (lag + 1 - replay) * k) + 1)
        chosen: dict[str, object] = {"late": late, "drop_equal_rewards": equal, "max_filtered": 1, "partial": partial}
        chosen["replay"] = replay
        if late == "wait" and not (lag is None and window % 2):
            chosen["window"] = fixed
        if reject is not None and lag != 0:
            chosen |= {"reject": reject, "reject_lag": window % (lag or 3)}
        self.settings = BufferSettings(lag, **chosen)  # type: ignore[arg-type]
        self.k, self.lag = k, lag
        self.core = BufferCore(k, self.settings, bound=BOUND)
        self.tight = tight
        if tight:
            self.core.budget.limit = TIGHT_BYTES
        self.window = self.settings.window_for(k)
        self.limit = min([x for x in (lag, self.settings.reject_lag) if x is not None], default=None)
        self.generation, self.names = 0, itertools.count(1)
        self.lineage = [0]
        """A name for each version that the trainer has made, or read: a number may be reused, a name may not."""
        self.checkpoint: tuple[dict[str, Any], Books, Counter[int], list[int]] | None = None
        self.journal: list[tuple[list[int], Counter[int]]] = []
        """For each version made in this lineage: the groups of its batch, and their tokens by lag."""
        self.books = Books()
        self.lags: Counter[int] = Counter()

    # -- what the model expects -------------------------------------------------------------------------------

    def reason(self, group: SerializedGroup) -> str | None:
        s, lags = self.settings, [self.core.version - version for version in tokens(group)]
        for limit, mask, reason in (
            (s.max_policy_lag, s.late == "mask", STALE if s.late == "wait" else LATE),
            (s.reject_lag, s.reject == "mask", REJECTED),
        ):
            if limit is not None and (min(lags) if mask else max(lags)) > limit:
                return reason
        return None

    def free(self) -> int | None:
        b = self.books
        if self.lag is None:
            return None
        used = (
            len(b.playing) + len(b.idle) + len(b.complete) + len(b.again) + len(b.taken) + sum(b.unpublished.values())
        )
        return math.ceil(((self.lag + 1) * self.k - (self.window or 0)) / self.replay) - used

    def live(self) -> list[int]:
        """Groups that were in no batch."""
        return sorted([*self.books.playing, *self.books.idle, *self.books.complete])

    def queue(self) -> list[int]:
        return [group_id for group_id in self.books.queue if group_id not in self.books.taken]

    def nbytes(self) -> int:
        b = self.books
        held = [*b.complete.values(), *b.again.values(), *b.taken.values()]
        return sum(group.nbytes for group in held) + sum(running.reserved for running in b.playing.values())

    def may_pass(self, group_id: int, batch: Sequence[int]) -> bool:
        over = self.books.overtaken[group_id] + sum(other > group_id for other in batch)
        return self.window is None or over <= self.window

    def make(self, group_id: int, attempt: int, pick: int) -> SerializedGroup:
        """Two or more sequences with up to three sampled tokens each, by versions that the premise allows."""
        first = min(self.books.published_at.get(group_id, 0), self.core.version)
        span = self.core.version - first + 1
        versions = sorted(first + (pick // divisor) % span for divisor in (1, 7, 49)[: 1 + pick % 3])
        return read_group(group_id, attempt, tuple(versions), int(pick % 5 == 0), pick % 4 == 0, 2 + pick % 7)

    # -- events -----------------------------------------------------------------------------------------------

    @rule(worker=st.integers(0, WORKERS - 1))
    def admit(self, worker: int) -> None:
        b, free = self.books, self.free()
        batches = sum(bool(group_ids) for group_ids, _ in self.journal)
        step = batches + bool(b.taken) + len(self.queue()) // self.k
        ticket = self.core.admit()
        assert (ticket is not None) == bool(b.idle or free is None or free > 0)
        if ticket is None:
            return
        if b.idle:
            assert ticket.group_id == min(b.idle) and ticket.attempt == b.idle.pop(ticket.group_id)
        else:
            new = not b.passed
            group_id = len(b.published_at) if new else b.passed.pop(0)
            if new and group_id % self.k == 0:
                assert ticket.steps.step(group_id // self.k) == step
            b.steps[group_id] = ticket.steps.until(group_id // self.k)
            assert (ticket.group_id, ticket.attempt) == (group_id, self.generation * ATTEMPTS)
            b.published_at[ticket.group_id] = self.core.published_version
            b.queue.append(ticket.group_id)
        assert ticket.steps.until(ticket.group_id // self.k) == b.steps[ticket.group_id], "or its item would change"
        b.playing[ticket.group_id] = Attempt(worker, ticket.attempt)

    @precondition(lambda self: self.books.playing)
    @rule(which=ANY, pick=ANY)
    def end_attempt(self, which: int, pick: int) -> None:
        group_id = sorted(self.books.playing)[which % len(self.books.playing)]
        running = self.books.playing[group_id]
        group = self.make(group_id, running.attempt, pick)
        if BOUND.excess(len(group.episodes), group.tokens) is not None:
            before = self.core.counts()
            with pytest.raises(ValueError, match="may have"):
                self.core.submit(group)
            assert self.core.counts() == before
            return
        if not self.reserve(group, running):
            return
        if pick % 3 == 0:
            running.reserved = running.reserved or group.nbytes
            return
        self.submit(group)

    def reserve(self, group: SerializedGroup, running: Attempt) -> bool:
        always = group.group_id in self.queue()[: self.k] or running.reserved > 0
        room = self.core.reserve(group.group_id, group.nbytes, running.attempt)
        assert room == (always or self.make_room(group.nbytes))
        return room

    def make_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` fit once replayable groups are retired, as few as necessary."""
        limit = self.core.budget.limit
        again = [group_id for group_id in self.queue() if group_id in self.books.again]
        if self.nbytes() - sum(self.books.again[group_id].nbytes for group_id in again) + nbytes > limit:
            return False
        for group_id in again:
            if self.nbytes() + nbytes > limit:
                self.retire(group_id)
        return True

    def submit(self, group: SerializedGroup) -> None:
        b, s = self.books, self.settings
        del b.playing[group.group_id]
        reason = None
        if group.failed and s.partial == "drop":
            reason = PARTIAL
        elif s.drop_equal_rewards and all_equal(group) and b.filtered < s.max_filtered * self.k:
            reason, b.filtered = EQUAL_REWARDS, b.filtered + 1
        else:
            reason = self.reason(group)
        assert self.core.submit(group) == (reason is None)
        b.sampled_by[group.group_id] = [self.lineage[version] for version in tokens(group)]
        if reason is None:
            b.complete[group.group_id] = group
        else:
            b.queue.remove(group.group_id)
            b.dropped.append((group.group_id, reason))

    @rule(worker=st.integers(0, WORKERS - 1), pick=ANY)
    def a_quick_group(self, worker: int, pick: int) -> None:
        """Admit and submit in one event, or slow groups would rarely be overtaken."""
        self.admit(worker)
        if self.books.playing:
            self.end_attempt(len(self.books.playing) - 1, pick)
        self.take()
        if self.books.taken and pick % 2:
            self.train()
            self.publish(pick)

    @precondition(lambda self: self.books.playing)
    @rule(which=ANY, reason=st.sampled_from(["score hung", "score raised"]))
    def drop(self, which: int, reason: str) -> None:
        group_id = sorted(self.books.playing)[which % len(self.books.playing)]
        self.core.drop(group_id, reason, attempt=self.books.playing.pop(group_id).attempt)
        self.books.queue.remove(group_id)
        self.books.dropped.append((group_id, reason))

    @rule(worker=st.integers(0, WORKERS - 1))
    def lose_worker(self, worker: int) -> None:
        b = self.books
        held = {group_id: running for group_id, running in b.playing.items() if running.worker == worker}
        assert self.core.requeue([*held, *b.complete, *b.taken]) == list(held)
        for group_id, running in held.items():
            b.lost.append((group_id, running.attempt))
            b.idle[group_id] = running.attempt + 1
            del b.playing[group_id]

    @precondition(lambda self: self.books.lost)
    @rule(which=ANY, pick=ANY, drops=st.booleans())
    def lost_worker_was_only_slow(self, which: int, pick: int, drops: bool) -> None:
        group_id, attempt = self.books.lost[which % len(self.books.lost)]
        if drops:
            self.core.drop(group_id, "score hung", 5, attempt)
            return
        group = self.make(group_id, attempt, pick)
        assert self.core.reserve(group_id, group.nbytes, attempt) and not self.core.submit(group)
        self.books.again_tokens += group.trainable

    @rule()
    def take(self) -> None:
        b, batch = self.books, self.core.take(self.core.version)
        assert batch is None or batch is self.core.take(self.core.version)
        if b.taken:
            return
        ready = b.complete | b.again
        choices = itertools.combinations([group_id for group_id in b.queue if group_id in ready], self.k)
        slow = (*b.playing, *b.idle)
        first = next((ids for ids in choices if all(self.may_pass(group_id, ids) for group_id in slow)), None)
        assert (batch is not None) == (first is not None), "the first in the queue that the window allows"
        if batch is None or first is None:
            return
        assert tuple(group.group_id for group in batch.groups) == first
        assert batch.uses == ([b.uses[group_id] for group_id in first] if self.replay > 1 else [])
        b.taken = {group_id: ready[group_id] for group_id in first}
        for group_id in first:
            (b.again if b.uses[group_id] else b.complete).pop(group_id)

    @precondition(lambda self: self.books.taken)
    @rule()
    def train(self) -> None:
        b, version, by_lag = self.books, self.core.version, Counter[int]()
        for group in b.taken.values():
            lags = [version - sampled_by for sampled_by in tokens(group)]
            names = [self.lineage[sampled_by] for sampled_by in tokens(group)]
            assert b.sampled_by[group.group_id] == names, "sampled by a rolled-back version"
            if self.settings.late == "wait" and self.lag is not None:
                assert max(lags) <= self.lag  # by structure, whatever is masked
            by_lag.update(lag for lag in lags if self.limit is None or lag <= self.limit)
        self.core.trained(version + 1)
        self.lags += by_lag
        self.lineage.append(next(self.names))
        self.journal.append((list(b.taken), by_lag))
        for group_id in self.live():
            b.overtaken[group_id] += sum(other > group_id for other in b.taken)
            assert self.window is None or b.overtaken[group_id] <= self.window
        b.queue = [*self.queue(), *b.taken]
        for group_id, group in b.taken.items():
            b.uses[group_id] += 1
            b.made[group_id] = version + 1
            b.trained += [group_id] if b.uses[group_id] == 1 else []
            b.again[group_id] = group
        b.taken, b.filtered = {}, 0
        for group_id in self.queue():
            self.leave_out(group_id)

    def leave_out(self, group_id: int) -> None:
        """After a step: groups that can be trained no more. A group that was trained is no loss, and makes room."""
        b = self.books
        if group_id in b.again:
            reason = self.reason(b.again[group_id])
            assert b.uses[group_id] <= self.replay
            if reason or b.uses[group_id] == self.replay or self.nbytes() > self.core.budget.limit:
                self.retire(group_id)
        elif group_id in b.complete and (reason := self.reason(b.complete[group_id])) is not None:
            del b.complete[group_id]
            b.queue.remove(group_id)
            b.dropped.append((group_id, reason))

    def retire(self, group_id: int) -> None:
        b = self.books
        del b.again[group_id]
        b.queue.remove(group_id)
        if b.made[group_id] > self.core.published_version:
            b.unpublished[b.made[group_id]] = b.unpublished.get(b.made[group_id], 0) + 1

    @rule()
    def supervised_step(self) -> None:
        """A version without a batch, which only comes before all groups."""
        version = self.core.version + 1
        if self.books.published_at:
            with pytest.raises(ValueError, match="admitted"):
                self.core.note_supervised_version(version)
            return
        self.core.note_supervised_version(version)
        self.lineage.append(next(self.names))
        self.journal.append(([], Counter()))
        self.books.unpublished = {version: self.core.slots or 0}

    @rule(which=ANY)
    def publish(self, which: int) -> None:
        span = self.core.version - self.core.published_version + 1
        version = self.core.published_version + which % span
        self.core.published(version)
        self.books.unpublished = {made: n for made, n in self.books.unpublished.items() if made > version}

    @rule()
    def resume(self) -> None:
        """Nothing outside of the core survives; every generator serves the newest version."""
        self.restore_from(self.core.state(), self.books)

    @rule()
    def make_a_checkpoint(self) -> None:
        self.checkpoint = self.core.state(), self.books.copied(), self.lags.copy(), self.lineage.copy()

    @precondition(lambda self: self.checkpoint is not None)
    @rule(steps=st.integers(0, 6))
    def roll_back(self, steps: int) -> None:
        """The trainer reads the checkpoint, and so do all others. Earlier workers may still submit. Then the trainer
        replays the next ``steps`` versions, as many as there were."""
        made = self.lineage
        state, books, lags, lineage = copy.copy(self.checkpoint)  # type: ignore[misc]
        self.lags, self.lineage = lags.copy(), lineage.copy()
        self.restore_from(state, books.copied())
        journal, self.journal = self.journal, self.journal[: len(lineage) - 1]
        for group_ids, by_lag in journal[len(lineage) - 1 :][:steps]:
            self.lineage.append(made[len(self.lineage)])
            self.replay_step(group_ids, by_lag)

    def replay_step(self, group_ids: list[int], by_lag: Counter[int]) -> None:
        b, version = self.books, self.core.version + 1
        self.core.note_replayed(version, group_ids, np.asarray([by_lag[lag] for lag in range(version + 1)], np.int64))
        self.lags += by_lag
        self.journal.append((group_ids, by_lag))
        for group_id in group_ids:
            for place in (b.complete, b.again, b.idle):
                place.pop(group_id, None)
            if group_id in b.queue:
                b.queue.remove(group_id)
            for passed in range(len(b.published_at), group_id + 1):
                b.published_at[passed] = version
                b.passed.append(passed)
            if group_id in b.passed:
                b.passed.remove(group_id)
            b.uses[group_id] += 1
            b.trained += [group_id] if b.uses[group_id] == 1 else []
        for group_id in self.live():
            b.overtaken[group_id] += sum(other > group_id for other in group_ids)
            if group_id in b.idle:  # it is sampled again, by this version or later ones
                b.published_at[group_id] = version
                b.overtaken[group_id] = min(b.overtaken[group_id], self.window if self.window is not None else 10**9)
            assert self.window is None or b.overtaken[group_id] <= self.window
        b.filtered = 0
        for group_id in self.queue():
            self.leave_out(group_id)

    def restore_from(self, state: dict[str, Any], books: Books) -> None:
        before = self.books
        self.generation += 1
        self.core = BufferCore.restore(self.k, self.settings, state, self.generation, BOUND)
        if self.tight:
            self.core.budget.limit = TIGHT_BYTES
        lost = [*before.lost, *((group_id, running.attempt) for group_id, running in before.playing.items())]
        books.everything_is_complete_or_idle(self.generation * ATTEMPTS)
        self.books = books
        books.lost = lost

    @rule()
    def fair_workers_feed_the_trainer(self) -> None:
        """Once everybody acts, the trainer gets its batch: nothing starves it, not even bytes."""
        if self.books.taken:
            self.train()
        self.publish(self.core.version - self.core.published_version)
        for _ in range(100):
            self.admit(0)
            for group_id in self.live():  # the first ones always have room
                running = self.books.playing.get(group_id)
                if running is None:
                    continue
                group = read_group(group_id, running.attempt, (self.core.version,), 0, False)
                if self.reserve(group, running):
                    self.submit(group)
            self.take()
            if self.books.taken:
                return
        raise AssertionError(f"no batch: {self.core.counts()}")

    # -- what always holds ------------------------------------------------------------------------------------

    @invariant()
    def slots_in_are_slots_out(self) -> None:
        assert self.core.slots_free == self.free()

    @invariant()
    def each_group_ends_once_and_is_trained_at_most_replay_times(self) -> None:
        b, counts = self.books, self.core.counts()
        taken = [group_id for group_id in b.taken if not b.uses[group_id]]
        everywhere = [*b.playing, *b.idle, *b.complete, *taken, *b.trained, *(group_id for group_id, _ in b.dropped)]
        assert sorted([*everywhere, *b.passed]) == list(range(counts.admitted + len(b.passed)))
        assert counts.playing == len(b.playing) + len(b.idle)
        assert (counts.complete, counts.taken, counts.trained) == (len(b.complete), len(taken), len(b.trained))
        assert counts.again == len(b.again) + len(b.taken) - len(taken)
        assert counts.dropped == Counter(reason for _, reason in b.dropped)

    @invariant()
    def the_bound_holds_without_the_guard(self) -> None:
        assert STALE not in self.core.counts().dropped

    @invariant()
    def trained_tokens_are_counted_by_lag(self) -> None:
        counts = self.core.counts()
        assert {lag: n for lag, n in enumerate(counts.lag_counts) if n} == dict(self.lags)
        assert self.limit is None or max(self.lags, default=0) <= self.limit
        assert self.lag != 0 or set(self.lags) <= {0}  # depth 0: each batch is sampled by the version it updates
        assert counts.wasted_tokens.get(PLAYED_AGAIN, 0) == self.books.again_tokens

    @invariant()
    def bytes_are_bounded(self) -> None:
        b = self.books
        held = [group.nbytes for group in (*b.complete.values(), *b.again.values(), *b.taken.values())]
        assert self.core.counts().nbytes == self.nbytes()
        largest = sorted([*held, *(running.reserved for running in b.playing.values())])[-2 * self.k :]
        assert self.core.counts().nbytes <= self.core.budget.limit + sum(largest)
        assert self.core.counts().nbytes <= self.core.budget.limit + 2 * self.k * most_bytes()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.close()
        counts, live = self.core.counts(), len(self.live())
        assert counts.playing == counts.complete == 0 and self.core.admit() is None
        assert counts.again == sum(self.books.uses[group_id] > 0 for group_id in self.books.taken)
        assert counts.dropped.get(RUN_ENDED, 0) == live
        assert counts.admitted == counts.trained + sum(counts.dropped.values()) + counts.taken
        for group_id, running in self.books.playing.items():
            assert not self.core.submit(read_group(group_id, running.attempt, (self.core.version,), 0, False))


def run(name: str, first: int, orders: int) -> None:
    print(f"seed {first}: {orders} orders of up to {STEPS} events")
    machine = seed(first)(type(name, (AnyOrder,), {}))
    chosen = settings(
        max_examples=orders,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    # Hypothesis parses this file. Python 3.11.7 cannot parse while garbage that logs a traceback is collected.
    gc.collect()
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("part", range(2))
def test_the_promises_hold_in_any_order_of_events(part: int) -> None:
    run(f"AnyOrder{part}", part, 200)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_the_promises_hold_in_many_orders_of_events(part: int) -> None:
    print(f"BUFFER_SEED={SEED}")
    run(f"AnyOfManyOrders{part}", SEED + part, 2000)
