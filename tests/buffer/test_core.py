from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monarch_rl.buffer.core import RUN_ENDED, STALE, BufferCore, token_lags
from monarch_rl.episode import Group
from tests.buffer.helpers import group


class AnyOrder(RuleBasedStateMachine):
    """Admissions, puts, drops, takes, training and publication in any order.

    The generators are modelled as the buffer's premise states: a token of a group is drawn by any version from the
    one published when the group was admitted up to the newest trained one (a replica may commit a version before all
    did, that is, before it is published).
    """

    @initialize(k=st.integers(1, 4), lag=st.integers(0, 3), version=st.sampled_from([0, 7]))
    def start(self, k: int, lag: int, version: int) -> None:
        self.core = BufferCore(k, lag, version=version)
        self.k, self.lag, self.first = k, lag, version
        self.playing: dict[int, int] = {}  # group id -> version published at its admission
        self.taken: list[int] = []
        self.order: list[int] = []  # of training
        self.dropped: list[int] = []
        self.tokens = [0] * (lag + 1)

    @rule()
    def admit(self) -> None:
        free = self.core.slots_free
        ticket = self.core.admit()
        assert (ticket is not None) == (free > 0)
        if ticket is not None:
            self.playing[ticket.group_id] = self.core.published_version

    def _versions(self, data: st.DataObject, group_id: int) -> list[int]:
        span = st.integers(self.playing[group_id], self.core.version)
        return sorted(data.draw(st.lists(span, min_size=1, max_size=3)))

    @precondition(lambda self: self.playing)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.playing)))
        self.core.put(group(group_id, self._versions(data, group_id), self._versions(data, group_id)))
        del self.playing[group_id]

    @precondition(lambda self: self.playing)
    @rule(data=st.data(), reason=st.sampled_from(["score hung", "score raised"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.playing)))
        self.core.drop(group_id, reason)
        del self.playing[group_id]
        self.dropped.append(group_id)

    @rule()
    def take(self) -> None:
        batch = self.core.take(self.core.version)
        assert batch is None or batch is self.core.take(self.core.version)
        self.taken = [g.group_id for g in batch or []]

    @precondition(lambda self: self.taken)
    @rule()
    def train(self) -> None:
        batch = self.core.take(self.core.version)
        assert batch is not None and [g.group_id for g in batch] == self.taken and len(batch) == self.k
        for g in batch:
            for e in g.episodes:
                for version in e.policy_versions[e.trainable]:
                    lag = self.core.version - int(version)
                    assert 0 <= lag <= self.lag
                    self.tokens[lag] += 1
        self.core.trained(self.core.version + 1)
        self.order += self.taken
        self.taken = []

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.core.published(data.draw(st.integers(self.core.published_version, self.core.version)))

    @rule(data=st.data())
    def everything_that_can_complete_completes(self, data: st.DataObject) -> None:
        """Then the trainer gets its batch: nothing starves it."""
        for group_id in sorted(self.playing):
            self.core.put(group(group_id, self._versions(data, group_id)))
        self.playing = {}
        if self.taken:
            self.train()
        self.core.published(self.core.version)
        while (ticket := self.core.admit()) is not None:
            self.core.put(group(ticket.group_id, [self.core.version]))
        self.take()
        assert self.taken

    @invariant()
    def slots_in_are_slots_out(self) -> None:
        counts = self.core.counts()
        held = counts.playing + counts.complete + counts.taken + counts.unpublished
        assert counts.slots == (self.lag + 1) * self.k == counts.slots_free + held

    @invariant()
    def each_group_ends_once(self) -> None:
        counts = self.core.counts()
        assert counts.admitted == (
            counts.trained + sum(counts.dropped.values()) + counts.playing + counts.complete + counts.taken
        )
        assert counts.playing == len(self.playing)
        ended = self.order + self.taken + self.dropped
        assert len(set(ended)) == len(ended)
        assert sum(counts.dropped.values()) == len(self.dropped)

    @invariant()
    def training_is_in_admission_order(self) -> None:
        assert self.order == sorted(self.order)

    @invariant()
    def the_bound_holds_without_the_guard(self) -> None:
        assert STALE not in self.core.counts().dropped

    @invariant()
    def lag_is_counted(self) -> None:
        counts = self.core.counts()
        assert counts.lag_counts == self.tokens
        assert counts.trained == len(self.order) == self.k * (counts.version - self.first)

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.core.close()
            counts = self.core.counts()
            assert counts.playing == counts.complete == 0
            assert counts.admitted == counts.trained + sum(counts.dropped.values()) + counts.taken


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60)


def play(core: BufferCore, groups: int) -> None:
    for _ in range(groups):
        ticket = core.admit()
        assert ticket is not None
        core.put(group(ticket.group_id, [core.published_version]))


def step(core: BufferCore) -> list[Group]:
    batch = core.take(core.version)
    assert batch is not None
    core.trained(core.version + 1)
    return batch


def test_depth_zero_is_synchronous() -> None:
    core = BufferCore(3, 0)
    for version in range(4):
        play(core, 3)
        assert core.admit() is None
        batch = step(core)
        assert {int(v) for g in batch for e in g.episodes for v in e.policy_versions[e.trainable]} == {version}
        assert core.admit() is None  # trained is not served
        core.published(version + 1)
    assert core.counts().lag_counts == [4 * 3]


def test_trainer_may_be_ahead_of_what_is_served() -> None:
    core = BufferCore(2, 2)
    play(core, 6)
    for _ in range(3):
        step(core)
    assert (core.version, core.published_version) == (3, 0)
    assert core.admit() is None  # a token of version 0 would be three versions behind
    assert core.counts().lag_counts == [2, 2, 2]
    core.published(1)
    assert core.slots_free == 2
    core.published(3)
    assert core.slots_free == 6
    assert core.counts().mean_lag == 1.0


def test_batches_wait_for_the_oldest_group() -> None:
    core = BufferCore(1, 1)
    first, second = core.admit(), core.admit()
    assert first is not None and second is not None
    core.put(group(second.group_id, [0]))
    assert core.take(0) is None
    assert core.missing() == [first.group_id]
    core.drop(first.group_id, "score hung")
    batch = core.take(0)
    assert batch is not None and [g.group_id for g in batch] == [second.group_id]


def test_stale_groups_are_dropped_and_never_trained_if_a_generator_breaks_its_promise() -> None:
    core = BufferCore(1, 1, version=5)
    for _ in range(2):
        ticket = core.admit()
        assert ticket is not None
        core.put(group(ticket.group_id, [5], [3, 5]))
    assert core.take(5) is None
    assert core.counts().dropped == {STALE: 2}
    assert core.slots_free == 2


def test_what_cannot_be_is_refused_by_name_and_state() -> None:
    core = BufferCore(1, 1)
    with pytest.raises(ValueError, match="group 0 cannot be put: it is not admitted"):
        core.put(group(0, [0]))
    ticket = core.admit()
    assert ticket is not None
    with pytest.raises(ValueError, match="group 0 cannot be put: it has no token to train"):
        core.put(group(0))
    with pytest.raises(ValueError, match="version 1 drew a token of it, but only 0"):
        core.put(group(0, [1]))
    core.put(group(0, [0]))
    with pytest.raises(ValueError, match="group 0 cannot be put: it is complete already"):
        core.put(group(0, [0]))
    with pytest.raises(ValueError, match="version 1 cannot have been trained: .* 0 groups are taken"):
        core.trained(1)
    with pytest.raises(ValueError, match="version 1 was asked for, but the policy is at 0"):
        core.take(1)
    core.take(0)
    with pytest.raises(ValueError, match=r"group 0 cannot be dropped \(late\): it is in the batch that updates"):
        core.drop(0, "late")
    with pytest.raises(ValueError, match="version 1 cannot be published: 0 is, and 0 is trained"):
        core.published(1)
    core.trained(1)
    with pytest.raises(ValueError, match="version 1 cannot have been trained"):
        core.trained(1)
    with pytest.raises(ValueError, match="group 0 cannot be put: it is trained or dropped already"):
        core.put(group(0, [0]))
    core.published(1)
    with pytest.raises(ValueError, match="version 0 cannot be published"):
        core.published(0)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="groups_per_step must be at least 1"):
        BufferCore(0, 0)
    with pytest.raises(ValueError, match="max_policy_lag must not be negative"):
        BufferCore(1, -1)


def test_close_accounts_for_every_group() -> None:
    core = BufferCore(1, 3)
    play(core, 2)
    late = core.admit()
    assert late is not None and core.take(0) is not None
    core.close()
    assert core.admit() is None
    core.put(group(late.group_id, [0]))  # its worker has not heard of the end
    core.drop(1, "score hung")
    core.trained(1)
    assert core.take(1) is None
    counts = core.counts()
    assert (counts.admitted, counts.trained, counts.dropped) == (3, 1, {RUN_ENDED: 2})


def test_resumed_run_goes_on_with_its_tasks_and_versions() -> None:
    core = BufferCore(1, 0, version=9, task_cursor=40)
    ticket = core.admit()
    assert ticket is not None and (ticket.group_id, ticket.task_cursor) == (0, 40)
    core.put(group(0, [9]))
    assert core.take(9) is not None


def test_token_lags() -> None:
    groups = [group(0, [3, 5], [4]), group(1, [5, 5])]
    assert token_lags(groups, 5, 3).tolist() == [3, 1, 1]
    assert token_lags([], 5, 2).dtype == np.int64
    for version in (7, 4):
        with pytest.raises(ValueError, match="group 0 has token lags"):
            token_lags(groups, version, 4)


def test_mean_lag_before_the_first_step() -> None:
    assert math.isnan(BufferCore(1, 0).counts().mean_lag)
