"""The buffer's promises under arbitrary orders of events, against a model that keeps its own books.

The generators are modelled as the buffer's premise states: a token of a group is drawn by any version from the one
published when the group was admitted up to the newest trained one (a replica may commit a version before all did, that
is, before it is published). RUNS x ORDERS orders are tried, each time others; the seed is printed, and
``BUFFER_SEED=<seed>`` repeats them.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from dataclasses import dataclass, field

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
from monarch_rl.buffer.ledger import EQUAL_REWARDS, LATE, PARTIAL, PLAYED_AGAIN, REJECTED, RUN_ENDED, STALE
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.episode import Group
from monarch_rl.episode.packed import PackedGroup, pack_group
from tests.buffer.helpers import episode

RUNS, ORDERS, STEPS = 5, 2000, 25
SEED = int(os.environ.get("BUFFER_SEED", random.SystemRandom().randrange(2**31)))
TIGHT_BYTES = 1000
"""A byte budget of some three of the groups below."""
WORKERS = 3
ANY = st.integers(0, 10**6)


@functools.lru_cache(100_000)
def read_group(group_id: int, attempt: int, versions: tuple[int, ...], failed: int, equal: bool) -> PackedGroup:
    episodes = [episode(versions, 1.0), episode(versions[-1:], 1.0 if equal else 0.0)]
    return PackedGroup.read(pack_group(Group(group_id, group_id, episodes, failed, attempt)))


@dataclass
class Play:
    """A group that a worker plays, or played when it was lost."""

    worker: int
    attempt: int
    reserved: int = 0


@dataclass
class Books:
    """What the model knows of the groups: each is in exactly one place."""

    published_at: dict[int, int] = field(default_factory=dict)
    playing: dict[int, Play] = field(default_factory=dict)
    idle: dict[int, int] = field(default_factory=dict)
    """Attempts of the groups that wait for a worker."""
    complete: dict[int, PackedGroup] = field(default_factory=dict)
    taken: dict[int, PackedGroup] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Plays (group, attempt) whose worker was lost: it may still put them."""
    again_tokens: int = 0
    unpublished: dict[int, int] = field(default_factory=dict)
    overtaken: Counter[int] = field(default_factory=Counter)
    filtered: int = 0


def tokens(group: PackedGroup) -> list[int]:
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
    ) -> None:
        late = "wait" if lag is None else late
        fixed = window % ((4 if lag is None else lag * k) + 1)
        chosen: dict[str, object] = {"late": late, "drop_equal_rewards": equal, "max_filtered": 1, "partial": partial}
        if late == "wait" and not (lag is None and window % 2):
            chosen["window"] = fixed
        if reject is not None and lag != 0:
            chosen |= {"reject": reject, "reject_lag": window % (lag or 3)}
        self.settings = BufferSettings(lag, **chosen)  # type: ignore[arg-type]
        self.k, self.lag = k, lag
        self.core = BufferCore(k, self.settings)
        self.tight = tight
        if tight:
            self.core.budget.limit = TIGHT_BYTES
        self.window = self.settings.window_for(k)
        self.limit = min([x for x in (lag, self.settings.reject_lag) if x is not None], default=None)
        self.books = Books()
        self.lags: Counter[int] = Counter()

    # -- what the model expects -------------------------------------------------------------------------------

    def reason(self, group: PackedGroup) -> str | None:
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
        used = len(b.playing) + len(b.idle) + len(b.complete) + len(b.taken) + sum(b.unpublished.values())
        return (self.lag + 1) * self.k - (self.window or 0) - used

    def live(self) -> list[int]:
        return sorted([*self.books.playing, *self.books.idle, *self.books.complete])

    def may_pass(self, group_id: int, batch: list[int]) -> bool:
        over = self.books.overtaken[group_id] + sum(other > group_id for other in batch)
        return self.window is None or over <= self.window

    def make(self, group_id: int, attempt: int, pick: int) -> PackedGroup:
        """A group of up to three tokens, by versions that the premise allows."""
        first, span = self.books.published_at[group_id], self.core.version - self.books.published_at[group_id] + 1
        versions = sorted(first + (pick // divisor) % span for divisor in (1, 7, 49)[: 1 + pick % 3])
        return read_group(group_id, attempt, tuple(versions), int(pick % 5 == 0), pick % 4 == 0)

    # -- events -----------------------------------------------------------------------------------------------

    @rule(worker=st.integers(0, WORKERS - 1))
    def admit(self, worker: int) -> None:
        b, free = self.books, self.free()
        ticket = self.core.admit()
        assert (ticket is not None) == bool(b.idle or free is None or free > 0)
        if ticket is None:
            return
        if b.idle:
            assert ticket.group_id == min(b.idle) and ticket.attempt == b.idle.pop(ticket.group_id)
        else:
            assert (ticket.group_id, ticket.attempt) == (len(b.published_at), 0)
            b.published_at[ticket.group_id] = self.core.published_version
        b.playing[ticket.group_id] = Play(worker, ticket.attempt)

    @precondition(lambda self: self.books.playing)
    @rule(which=ANY, pick=ANY)
    def put(self, which: int, pick: int) -> None:
        group_id = sorted(self.books.playing)[which % len(self.books.playing)]
        play = self.books.playing[group_id]
        group = self.make(group_id, play.attempt, pick)
        held = self.core.counts().nbytes
        room = self.core.reserve(group_id, group.nbytes, play.attempt)
        fits = held - play.reserved + group.nbytes <= self.core.budget.limit
        assert room == (fits or group_id in self.live()[: self.k] or play.reserved > 0)
        if not room:
            return
        if pick % 3 == 0:
            play.reserved = play.reserved or group.nbytes
            return
        self.hand_in(group)

    def hand_in(self, group: PackedGroup) -> None:
        b, s = self.books, self.settings
        del b.playing[group.group_id]
        reason = None
        if group.failed and s.partial == "drop":
            reason = PARTIAL
        elif s.drop_equal_rewards and len(set(group.rewards.tolist())) == 1 and b.filtered < s.max_filtered * self.k:
            reason, b.filtered = EQUAL_REWARDS, b.filtered + 1
        else:
            reason = self.reason(group)
        assert self.core.put(group) == (reason is None)
        if reason is None:
            b.complete[group.group_id] = group
        else:
            b.dropped.append((group.group_id, reason))

    @rule(worker=st.integers(0, WORKERS - 1), pick=ANY)
    def a_quick_group(self, worker: int, pick: int) -> None:
        """All at once, or slow groups would rarely be overtaken."""
        self.admit(worker)
        if self.books.playing:
            self.put(len(self.books.playing) - 1, pick)
        self.take()
        if self.books.taken and pick % 2:
            self.train()
            self.publish(pick)

    @precondition(lambda self: self.books.playing)
    @rule(which=ANY, reason=st.sampled_from(["score hung", "score raised"]))
    def drop(self, which: int, reason: str) -> None:
        group_id = sorted(self.books.playing)[which % len(self.books.playing)]
        self.core.drop(group_id, reason, attempt=self.books.playing.pop(group_id).attempt)
        self.books.dropped.append((group_id, reason))

    @rule(worker=st.integers(0, WORKERS - 1))
    def lose_worker(self, worker: int) -> None:
        b = self.books
        held = {group_id: play for group_id, play in b.playing.items() if play.worker == worker}
        assert self.core.release([*held, *b.complete, *b.taken]) == list(held)
        for group_id, play in held.items():
            b.lost.append((group_id, play.attempt))
            b.idle[group_id] = play.attempt + 1
            del b.playing[group_id]

    @precondition(lambda self: self.books.lost)
    @rule(which=ANY, pick=ANY, drops=st.booleans())
    def lost_worker_was_only_slow(self, which: int, pick: int, drops: bool) -> None:
        group_id, attempt = self.books.lost[which % len(self.books.lost)]
        if drops:
            self.core.drop(group_id, "score hung", 5, attempt)
            return
        group = self.make(group_id, attempt, pick)
        assert self.core.reserve(group_id, group.nbytes, attempt) and not self.core.put(group)
        self.books.again_tokens += group.trainable

    @rule()
    def take(self) -> None:
        b, batch = self.books, self.core.take(self.core.version)
        assert batch is None or batch is self.core.take(self.core.version)
        if b.taken:
            return
        first = sorted(b.complete)[: self.k]
        allowed = all(self.may_pass(group_id, first) for group_id in (*b.playing, *b.idle))
        assert (batch is not None) == (len(first) == self.k and allowed)
        if batch is None:
            return
        ids = [group.group_id for group in batch.groups]
        assert len(ids) == self.k and ids == sorted(b.complete)[: self.k]
        b.taken = {group_id: b.complete.pop(group_id) for group_id in ids}

    @precondition(lambda self: self.books.taken)
    @rule()
    def train(self) -> None:
        b, version = self.books, self.core.version
        for group in b.taken.values():
            lags = [version - drew for drew in tokens(group)]
            if self.settings.late == "wait" and self.lag is not None:
                assert max(lags) <= self.lag  # by structure, whatever is masked
            self.lags.update(lag for lag in lags if self.limit is None or lag <= self.limit)
        self.core.trained(version + 1)
        for group_id in self.live():
            b.overtaken[group_id] += sum(other > group_id for other in b.taken)
            assert self.window is None or b.overtaken[group_id] <= self.window
        b.unpublished[version + 1] = len(b.taken)
        b.trained += b.taken
        b.taken, b.filtered = {}, 0
        for group_id, group in list(b.complete.items()):
            if (reason := self.reason(group)) is not None:
                del b.complete[group_id]
                b.dropped.append((group_id, reason))

    @rule(which=ANY)
    def publish(self, which: int) -> None:
        span = self.core.version - self.core.published_version + 1
        version = self.core.published_version + which % span
        self.core.published(version)
        self.books.unpublished = {made: n for made, n in self.books.unpublished.items() if made > version}

    @rule()
    def resume(self) -> None:
        """Of all that is outside of the core, nothing is left; every generator serves the newest version."""
        b = self.books
        self.core = BufferCore.restore(self.k, self.settings, self.core.state())
        if self.tight:
            self.core.budget.limit = TIGHT_BYTES
        b.complete, b.taken, b.unpublished = b.complete | b.taken, {}, {}
        b.lost += [(group_id, play.attempt) for group_id, play in b.playing.items()]
        b.idle = {group_id: attempt + 1 for group_id, attempt in b.idle.items()}
        b.idle |= {group_id: play.attempt + 1 for group_id, play in b.playing.items()}
        b.playing = {}

    @rule()
    def fair_workers_feed_the_trainer(self) -> None:
        """Once everybody does what he can, the trainer gets its batch: nothing starves it, not even bytes."""
        if self.books.taken:
            self.train()
        self.publish(self.core.version - self.core.published_version)
        for _ in range(100):
            self.admit(0)
            for group_id in self.live():  # the first ones always have room
                play = self.books.playing.get(group_id)
                if play is None:
                    continue
                group = read_group(group_id, play.attempt, (self.core.version,), 0, False)
                if self.core.reserve(group_id, group.nbytes, play.attempt):
                    self.hand_in(group)
            self.take()
            if self.books.taken:
                return
        raise AssertionError(f"no batch: {self.core.counts()}")

    # -- what always holds ------------------------------------------------------------------------------------

    @invariant()
    def slots_in_are_slots_out(self) -> None:
        assert self.core.slots_free == self.free()

    @invariant()
    def each_group_ends_once(self) -> None:
        b, counts = self.books, self.core.counts()
        everywhere = [*b.playing, *b.idle, *b.complete, *b.taken, *b.trained, *(group_id for group_id, _ in b.dropped)]
        assert sorted(everywhere) == list(range(counts.admitted))
        assert counts.playing == len(b.playing) + len(b.idle)
        assert (counts.complete, counts.taken, counts.trained) == (len(b.complete), len(b.taken), len(b.trained))
        assert counts.dropped == Counter(reason for _, reason in b.dropped)

    @invariant()
    def the_bound_holds_without_the_guard(self) -> None:
        assert STALE not in self.core.counts().dropped

    @invariant()
    def trained_tokens_are_counted_by_lag(self) -> None:
        counts = self.core.counts()
        assert {lag: n for lag, n in enumerate(counts.lag_counts) if n} == dict(self.lags)
        assert self.limit is None or max(self.lags, default=0) <= self.limit
        assert self.lag != 0 or set(self.lags) <= {0}  # depth 0: each batch is drawn by the version it updates
        assert counts.wasted_tokens.get(PLAYED_AGAIN, 0) == self.books.again_tokens

    @invariant()
    def bytes_are_bounded(self) -> None:
        b = self.books
        held = [group.nbytes for group in (*b.complete.values(), *b.taken.values())]
        assert self.core.counts().nbytes == sum(held) + sum(play.reserved for play in b.playing.values())
        largest = sorted([*held, *(play.reserved for play in b.playing.values())])[-2 * self.k :]
        assert self.core.counts().nbytes <= self.core.budget.limit + sum(largest)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.close()
        counts, live = self.core.counts(), len(self.live())
        assert counts.playing == counts.complete == 0 and self.core.admit() is None
        assert counts.dropped.get(RUN_ENDED, 0) == live
        assert counts.admitted == counts.trained + sum(counts.dropped.values()) + counts.taken
        for group_id, play in self.books.playing.items():
            assert not self.core.put(read_group(group_id, play.attempt, (self.core.version,), 0, False))


@pytest.mark.parametrize("run", range(RUNS))
def test_any_order(run: int) -> None:
    print(f"BUFFER_SEED={SEED}, run {run}: {ORDERS} orders of up to {STEPS} events")
    machine = seed(SEED + run)(type(f"AnyOrder{run}", (AnyOrder,), {}))
    chosen = settings(
        max_examples=ORDERS,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(machine, settings=chosen)
