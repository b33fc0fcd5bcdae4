from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from monarch_rl.buffer.actor import SavedBuffer
from monarch_rl.buffer.core import BufferCore, token_lags
from monarch_rl.buffer.groups import ATTEMPTS
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
)
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.serialization import SerializedGroup, serialize_group
from tests.buffer.helpers import core, group, mean_lag, packed


def complete_groups(buffer: BufferCore, groups: int) -> None:
    for _ in range(groups):
        ticket = buffer.admit()
        assert ticket is not None
        buffer.submit(packed(ticket.group_id, [buffer.published_version]))


def step(buffer: BufferCore) -> list[SerializedGroup]:
    batch = buffer.take(buffer.version)
    assert batch is not None
    buffer.trained(buffer.version + 1)
    return batch.groups


def test_depth_zero_is_synchronous() -> None:
    buffer = core(3, 0)
    for version in range(4):
        complete_groups(buffer, 3)
        assert buffer.admit() is None
        batch = step(buffer)
        assert {int(v) for g in batch for e in g.episodes for v in e.tokens_by_version} == {version}
        assert buffer.admit() is None  # trained, but not published
        buffer.published(version + 1)
    assert buffer.counts().lag_counts == [4 * 3]


def test_the_trainer_may_be_ahead_of_the_published_version() -> None:
    buffer = core(2, 2)
    complete_groups(buffer, 6)
    for _ in range(3):
        step(buffer)
    assert (buffer.version, buffer.published_version) == (3, 0)
    assert buffer.admit() is None  # a token of version 0 would be three versions behind
    assert buffer.counts().lag_counts == [2, 2, 2]
    buffer.published(1)
    assert buffer.slots_free == 2
    buffer.published(3)
    assert buffer.slots_free == 6
    assert mean_lag(buffer.counts()) == 1.0


def test_a_replayed_group_queues_behind_new_ones_and_keeps_its_slot() -> None:
    buffer = core(1, 2, replay=2)
    complete_groups(buffer, 2)
    assert buffer.slots == 2 and buffer.admit() is None
    assert [step(buffer)[0].group_id for _ in range(2)] == [0, 1]
    buffer.published(2)
    counts = buffer.counts()
    assert (counts.trained, counts.complete, counts.again, counts.slots_free) == (2, 0, 2, 0)
    assert step(buffer)[0].group_id == 0
    # Group 1 would be three versions behind: it is retired, and its last version is published already.
    counts = buffer.counts()
    assert (counts.trained, counts.again, counts.unpublished, counts.slots_free) == (2, 0, 1, 1)
    assert not counts.dropped and not counts.wasted_tokens and counts.lag_counts == [1, 1, 1]
    buffer.published(3)
    assert buffer.slots_free == 2


def test_groups_that_wait_for_replay_make_room_for_new_ones() -> None:
    buffer = core(2, 3, replay=2)
    buffer.budget.limit = 100
    for group_id in range(4):
        assert buffer.admit() is not None
        buffer.submit(packed(group_id, [0], nbytes=40)) if group_id < 2 else None
    step(buffer)
    assert (buffer.counts().again, buffer.counts().nbytes) == (2, 80)
    for group_id in (2, 3):  # they are first in the queue, so they always have room
        buffer.submit(packed(group_id, [0], nbytes=40))
    assert [group.group_id for group in step(buffer)] == [2, 3]
    assert buffer.counts().again == 2 and buffer.counts().nbytes <= 100, "the older ones were retired"
    buffer.published(2)
    assert buffer.admit() is not None and buffer.slots_free == 1
    assert not buffer.reserve(4, 101) and buffer.counts().again == 2, "nothing is retired in vain"
    assert buffer.reserve(4, 60) and (buffer.counts().again, buffer.counts().nbytes) == (1, 100)
    assert buffer.reserve(4, 60) and (buffer.counts().again, buffer.slots_free) == (1, 2)


def test_batches_wait_for_the_oldest_group() -> None:
    buffer = core(1, 1)
    first, second = buffer.admit(), buffer.admit()
    assert first is not None and second is not None
    buffer.submit(packed(second.group_id, [0]))
    assert buffer.take(0) is None
    assert buffer.missing() == [first.group_id]
    buffer.drop(first.group_id, "score hung")
    batch = buffer.take(0)
    assert batch is not None and [g.group_id for g in batch.groups] == [second.group_id]


def test_stale_groups_are_never_trained_even_if_a_generator_breaks_the_premise() -> None:
    buffer = core(1, 1, version=5)
    for _ in range(2):
        ticket = buffer.admit()
        assert ticket is not None
        assert not buffer.submit(packed(ticket.group_id, [5], [3, 5]))
    assert buffer.take(5) is None
    counts = buffer.counts()
    assert (counts.dropped, counts.wasted_tokens, counts.slots_free) == ({STALE: 2}, {STALE: 6}, 2)


def test_impossible_calls_are_refused_with_group_and_state() -> None:
    buffer = core(1, 1)
    with pytest.raises(ValueError, match="group 0 .*not admitted"):
        buffer.submit(packed(0, [0]))
    ticket = buffer.admit()
    assert ticket is not None
    with pytest.raises(ValueError, match="group 0 .*no token"):
        buffer.submit(packed(0))
    with pytest.raises(ValueError, match="sampled by version 1"):
        buffer.submit(packed(0, [1]))
    buffer.submit(packed(0, [0]))
    with pytest.raises(ValueError, match="group 0 .*complete"):
        buffer.submit(packed(0, [0]))
    with pytest.raises(ValueError, match="version 1 .*trained.* 0 groups"):
        buffer.trained(1)
    with pytest.raises(ValueError, match="version 1 was requested"):
        buffer.take(1)
    buffer.take(0)
    with pytest.raises(ValueError, match=r"group 0 .*dropped \(late\)"):
        buffer.drop(0, "late")
    with pytest.raises(ValueError, match="version 1 .*published"):
        buffer.published(1)
    buffer.trained(1)
    with pytest.raises(ValueError, match="version 1 .*trained"):
        buffer.trained(1)
    with pytest.raises(ValueError, match="group 0 .*trained or dropped"):
        buffer.submit(packed(0, [0]))
    buffer.published(1)
    with pytest.raises(ValueError, match="version 0 .*published"):
        buffer.published(0)


def test_close_accounts_for_every_group() -> None:
    buffer = core(1, 3)
    complete_groups(buffer, 2)
    late = buffer.admit()
    assert late is not None and buffer.take(0) is not None
    buffer.close()
    assert buffer.admit() is None
    buffer.submit(packed(late.group_id, [0]))  # its worker is not notified of the end yet
    buffer.drop(1, "score hung")
    buffer.trained(1)
    assert buffer.take(1) is None
    counts = buffer.counts()
    assert (counts.admitted, counts.trained, counts.dropped) == (3, 1, {RUN_ENDED: 2})


def test_a_resumed_run_continues_its_tasks_and_versions() -> None:
    buffer = BufferCore(1, BufferSettings(0), version=9, task_cursor=40)
    ticket = buffer.admit()
    assert ticket is not None and (ticket.group_id, ticket.task_cursor) == (0, 40)
    buffer.submit(packed(0, [9]))
    assert buffer.take(9) is not None


def test_token_lags() -> None:
    groups = [packed(0, [3, 5], [4]), packed(1, [5, 5])]
    assert token_lags(groups, 5, None, 2).tolist() == [3, 1, 1]
    assert token_lags(groups, 5, 4, 1).tolist() == [3, 1]
    assert token_lags(groups, 7, None, None).tolist() == [0, 0, 3, 1, 1]
    assert token_lags([], 5, None, 1).tolist() == [0, 0] and token_lags([], 5, None, 1).dtype == np.int64
    with pytest.raises(ValueError, match="group 0 .*version 3 .*version 7"):
        token_lags(groups, 7, None, 3)
    with pytest.raises(ValueError, match="group 0 .*version 5 .*version 4"):
        token_lags(groups, 4, None, 3)


def test_mean_lag_before_the_first_step() -> None:
    assert math.isnan(mean_lag(core(1, 0).counts()))


def admit(buffer: BufferCore, groups: int) -> list[int]:
    tickets = [buffer.admit() for _ in range(groups)]
    return [ticket.group_id for ticket in tickets if ticket is not None]


def ids(buffer: BufferCore) -> list[int] | None:
    batch = buffer.take(buffer.version)
    return [g.group_id for g in batch.groups] if batch is not None else None


def test_a_window_lets_n_groups_overtake_and_costs_n_slots() -> None:
    buffer = core(2, 2, window=3)
    assert (buffer.slots, buffer.window) == (3, 3)
    slow, *others = admit(buffer, 3)
    for group_id in others:
        buffer.submit(packed(group_id, [0]))
    assert ids(buffer) == others  # two of three
    buffer.trained(1)
    buffer.published(1)
    for group_id in admit(buffer, 2):
        buffer.submit(packed(group_id, [1]))
    assert ids(buffer) is None and buffer.held_back  # one more would be four
    assert buffer.missing() == [slow]
    buffer.submit(packed(slow, [0, 1]))
    assert ids(buffer) == [slow, 3] and not buffer.held_back


def test_the_example_of_the_docs() -> None:
    buffer = core(2, 2, window=2)
    slow, *others = admit(buffer, 9)
    assert [slow, *others] == [0, 1, 2, 3]
    for group_id in (1, 2):
        buffer.submit(packed(group_id, [0]))
    assert ids(buffer) == [1, 2]
    buffer.trained(1)
    buffer.published(1)
    assert admit(buffer, 9) == [4, 5]
    buffer.submit(packed(3, [0]))
    buffer.submit(packed(4, [1]))
    assert ids(buffer) is None
    buffer.submit(packed(0, [0, 1]))
    assert ids(buffer) == [0, 3]
    buffer.trained(2)
    assert buffer.counts().lag_counts == [3, 2, 0]


def test_the_window_is_counted_per_group() -> None:
    buffer = core(1, 4, window=2)
    admit(buffer, 3)
    for group_id in (2, 1):
        buffer.submit(packed(group_id, [0]))
        assert ids(buffer) == [group_id]
        buffer.trained(buffer.version + 1)
    buffer.published(2)
    (last,) = admit(buffer, 1)
    buffer.submit(packed(last, [2]))
    assert ids(buffer) is None  # 0 was overtaken by 2 and 1
    buffer.drop(0, "score hung")
    assert ids(buffer) == [last]


def test_without_a_lag_bound_only_bytes_hold_groups_back() -> None:
    buffer = core(1, None, window="greedy")
    slow, *others = admit(buffer, 50)
    assert (buffer.slots, buffer.slots_free, buffer.counts().slots) == (None, None, None)
    for group_id in others:
        buffer.submit(packed(group_id, [0]))
        assert ids(buffer) == [group_id]
        buffer.trained(buffer.version + 1)
    buffer.submit(packed(slow, [0]))
    step(buffer)
    assert buffer.counts().lag_counts == [1] * 50


def late(policy: str) -> BufferCore:
    """The trainer made three versions while the first group was in progress; it has tokens of versions 0 to 3."""
    buffer = core(1, 1, late=policy)
    admit(buffer, 1)
    for _ in range(3):
        for group_id in admit(buffer, 1):
            buffer.submit(packed(group_id, [buffer.version]))
        step(buffer)
        buffer.published(buffer.version)
    return buffer


def test_late_drop_drops_the_group() -> None:
    buffer = late("drop")
    assert not buffer.submit(packed(0, [0, 1, 2, 3], [3]))
    counts = buffer.counts()
    assert (counts.dropped, counts.wasted_tokens, counts.slots_free) == ({LATE: 1}, {LATE: 5}, 2)


def test_late_mask_masks_the_tokens_above_the_bound() -> None:
    buffer = late("mask")
    assert buffer.submit(packed(0, [0, 1, 2, 3], [1]))
    batch = buffer.take(3)
    assert batch is not None and batch.oldest == 2
    assert batch.lag_counts.tolist() == [1, 1]
    buffer.trained(4)
    assert buffer.counts().wasted_tokens == {MASKED: 3}
    buffer = late("mask")
    assert not buffer.submit(packed(0, [0, 1], [1]))
    assert buffer.counts().dropped == {LATE: 1}


@pytest.mark.parametrize("reject", ["drop", "mask"])
def test_groups_above_reject_lag_are_dropped_when_they_would_be_trained(reject: str) -> None:
    buffer = core(1, 3, reject_lag=1, reject=reject)
    for group_id, versions in zip(admit(buffer, 4), ([0], [0], [0, 0], [0, 0]), strict=True):
        buffer.submit(packed(group_id, versions))
    step(buffer)
    assert buffer.counts().dropped == {}
    step(buffer)  # lag 1
    counts = buffer.counts()
    assert (counts.dropped, counts.wasted_tokens) == ({REJECTED: 2}, {REJECTED: 4})
    assert counts.slots_free == 2  # two groups are unpublished
    buffer.published(2)
    for group_id in admit(buffer, 1):
        buffer.submit(packed(group_id, [2]))
    step(buffer)


def test_reject_mask_keeps_the_fresh_tokens() -> None:
    buffer = core(1, 3, reject_lag=0)
    for group_id in admit(buffer, 2):
        buffer.submit(packed(group_id, [0]))
    (slow,) = admit(buffer, 1)
    step(buffer)
    buffer.published(1)
    assert buffer.counts().dropped == {REJECTED: 1}
    assert buffer.submit(packed(slow, [0, 0, 1]))
    batch = buffer.take(1)
    assert batch is not None and (batch.oldest, batch.lag_counts.tolist()) == (1, [1, 0, 0, 0])


def test_equal_rewards_are_filtered_and_the_batch_is_refilled_exactly() -> None:
    buffer = core(2, 0, drop_equal_rewards=True)
    for equal in (True, False, True, True, False):
        (group_id,) = admit(buffer, 1)
        assert buffer.submit(packed(group_id, [0], [0], equal=equal)) != equal
    assert ids(buffer) == [1, 4]
    assert buffer.counts().dropped == {EQUAL_REWARDS: 3} and buffer.counts().wasted_tokens == {EQUAL_REWARDS: 6}


def test_filtering_ends_at_its_limit() -> None:
    buffer = core(2, 0, drop_equal_rewards=True, max_filtered=3)
    for version in range(2):
        submitted = 0
        while ids(buffer) is None:
            (group_id,) = admit(buffer, 1)
            buffer.submit(packed(group_id, [version], [version], equal=True))
            submitted += 1
        assert submitted == 3 * 2 + 2
        buffer.trained(version + 1)
        buffer.published(version + 1)


def test_partial_groups_are_trained_or_dropped() -> None:
    for policy, accepted in (("train", True), ("drop", False)):
        buffer = core(1, 0, partial=policy)
        admit(buffer, 1)
        assert buffer.submit(packed(0, [0], [0], failed=1)) == accepted
        assert buffer.counts().dropped == ({} if accepted else {PARTIAL: 1})


def test_groups_of_a_lost_worker_restart_in_their_places() -> None:
    buffer = core(2, 1, version=0)
    admit(buffer, 4)
    buffer.submit(packed(2, [0]))
    buffer.reserve(3, 100)
    assert buffer.requeue([0, 2, 3]) == [0, 3]
    assert buffer.counts().nbytes == 0 and buffer.slots_free == 0
    with pytest.raises(ValueError, match="group 0 .*waiting for a worker"):
        buffer.submit(packed(0, [0], attempt=1))
    assert not buffer.submit(packed(0, [0, 0]))  # its first worker was only slow
    buffer.drop(3, "score hung")  # the same
    restarted = [buffer.admit(), buffer.admit()]
    assert [(t.group_id, t.task_cursor, t.attempt) for t in restarted if t] == [(0, 0, 1), (3, 3, 1)]
    buffer.submit(packed(1, [0]))
    assert ids(buffer) is None
    assert buffer.submit(packed(0, [0], attempt=1))
    assert ids(buffer) == [0, 1]
    buffer.trained(1)
    assert not buffer.submit(packed(0, [0, 0]))  # later still
    assert buffer.counts().wasted_tokens == {PLAYED_AGAIN: 4}


MIB = 2**20


def test_groups_that_do_not_fit_wait_unless_the_next_batch_needs_them() -> None:
    buffer = core(2, 2, max_mib=1)
    admit(buffer, 6)
    for group_id in (2, 3):
        assert buffer.reserve(group_id, MIB // 2)
        buffer.submit(packed(group_id, [0], nbytes=MIB // 2))
    assert not buffer.reserve(4, 1)
    with pytest.raises(ValueError, match="group 4 .*buffer.max_mib 1"):
        buffer.submit(packed(4, [0], nbytes=1))
    for group_id in (0, 1):
        assert buffer.reserve(group_id, MIB)
        buffer.submit(packed(group_id, [0], nbytes=MIB))
    assert buffer.counts().nbytes == 3 * MIB
    assert ids(buffer) == [0, 1] and not buffer.reserve(5, 1)
    buffer.trained(1)
    assert buffer.counts().nbytes == MIB
    assert ids(buffer) == [2, 3] and buffer.reserve(4, 1)  # now it is among the first two
    buffer.trained(2)
    assert buffer.counts().nbytes == 1


def test_columns_count_in_the_bytes_of_their_group() -> None:
    buffer = core(1, 1)
    sizes = []
    for columns in range(2):
        ticket = buffer.admit()
        assert ticket is not None
        made = group(ticket.group_id, [0] * 1000)
        for number in range(columns):
            made.episodes[0].fill_column(f"column {number}", np.ones(made.episodes[0].num_tokens))
        data = serialize_group(made)
        before = buffer.budget.used
        buffer.submit(SerializedGroup.read(data))
        assert buffer.budget.used - before == len(data)
        sizes.append(len(data))
    assert sizes[1] - sizes[0] == pytest.approx(4 * 1000, abs=64)
    assert buffer.admit() is None


def test_a_core_resumes_from_its_state() -> None:
    from monarch_rl.episode.serialization import SerializedGroup as Read
    from tests.buffer.helpers import group

    settings = BufferSettings(2, window=1)
    buffer = BufferCore(2, settings, task_cursor=7)
    admit(buffer, 5)
    for group_id in (1, 2, 3):
        buffer.submit(Read.read(serialize_group(group(group_id, [0], [0]))))
    assert ids(buffer) is None
    buffer.submit(Read.read(serialize_group(group(0, [0], [0]))))
    step(buffer)
    assert ids(buffer) == [2, 3]
    resumed = BufferCore.restore(2, settings, buffer.state())
    assert (resumed.version, resumed.published_version) == (1, 1)
    assert ids(resumed) == [2, 3]  # it was not trained
    restarted, new = resumed.admit(), resumed.admit()
    assert restarted is not None
    assert (restarted.group_id, restarted.task_cursor, restarted.attempt) == (4, 11, 1)
    assert new is not None and (new.group_id, new.task_cursor) == (5, 12)
    resumed.trained(2)
    assert resumed.counts().trained == 4 and resumed.counts().lag_counts == [4, 4, 0]
    with pytest.raises(ValueError, match="slots was 5 .* 6"):
        BufferCore.restore(2, BufferSettings(2, window=0), buffer.state())


def test_batches_of_a_journal_are_replayed_after_a_restore() -> None:
    """At the checkpoint group 0 is in progress. Then 0 is dropped, and 1, 3 and 4 are trained, of which 3 and 4 were
    admitted after the checkpoint. Group 2 was admitted, too, but not trained: it is admitted again before all others.
    Group 0 restarts; it has been overtaken as often as the window allows."""
    settings = BufferSettings(3, window=1)
    buffer = BufferCore(1, settings)
    admit(buffer, 2)
    buffer.submit(SerializedGroup.read(serialize_group(group(1, [0], [0]))))
    resumed = BufferCore.restore(1, settings, buffer.state(), generation=1)
    for version, group_id in ((1, 1), (2, 3), (3, 4)):
        resumed.note_replayed(version, [group_id], np.asarray([1, 2]))
    counts = resumed.counts()
    assert (counts.version, counts.published, counts.trained, counts.lag_counts) == (3, 3, 3, [3, 6])
    assert (counts.admitted, counts.playing, counts.complete, counts.slots_free) == (4, 1, 0, 2)
    for buffer, attempt in ((resumed, ATTEMPTS), (BufferCore.restore(1, settings, resumed.state(), 2), 2 * ATTEMPTS)):
        tickets = [buffer.admit(), buffer.admit(), buffer.admit()]
        assert [(ticket.group_id, ticket.attempt) for ticket in tickets if ticket] == [
            (0, attempt),
            (2, attempt),
            (5, attempt),
        ]
    for group_id in (5, 2):
        assert resumed.submit(packed(group_id, [3], attempt=ATTEMPTS))
    assert ids(resumed) is None, "0 is due first"
    assert resumed.submit(packed(0, [3], attempt=ATTEMPTS)) and ids(resumed) == [0]
    with pytest.raises(ValueError, match="version 4 .*replayed"):
        resumed.note_replayed(4, [2], np.zeros(0, np.int64))


def test_tokens_of_rolled_back_versions_are_dropped_and_counted() -> None:
    """A buffer's state that is newer than the trainer's: its groups restart in their places."""
    settings = BufferSettings(2, window=1)
    buffer = BufferCore(2, settings)
    admit(buffer, 4)
    for group_id in (0, 1):
        buffer.submit(SerializedGroup.read(serialize_group(group(group_id, [0], [0]))))
    assert ids(buffer) == [0, 1]
    step(buffer)
    buffer.submit(SerializedGroup.read(serialize_group(group(2, [0, 1], [1]))))
    buffer.submit(SerializedGroup.read(serialize_group(group(3, [0], [0]))))
    rolled_back = BufferCore.restore(2, settings, buffer.state() | {"version": 0}, generation=1)
    assert rolled_back.counts().wasted_tokens == {ROLLED_BACK: 3}
    assert (rolled_back.counts().complete, rolled_back.counts().playing) == (1, 1)
    restarted = rolled_back.admit()
    assert restarted is not None and (restarted.group_id, restarted.attempt) == (2, ATTEMPTS)
    assert not rolled_back.submit(SerializedGroup.read(serialize_group(group(2, [0], [0])))), "an earlier generation's"


def test_complete_groups_that_a_resumed_run_cannot_train_are_sampled_anew() -> None:
    """Their log-probs are of another temperature, for example, or the run's stages fill other columns."""
    buffer = BufferCore(2, BufferSettings(2))
    admit(buffer, 2)
    buffer.submit(SerializedGroup.read(serialize_group(group(0, [0], [0]))))
    for saved, complete in (
        (SavedBuffer(Path(), 1), 1),
        (SavedBuffer(Path(), 1, columns=frozenset()), 1),
        (SavedBuffer(Path(), 1, resample=True), 0),
        (SavedBuffer(Path(), 1, columns=frozenset({"teacher"})), 0),
    ):
        resumed = BufferCore.restore(2, BufferSettings(2), buffer.state(), 1, usable=saved.usable)
        assert (resumed.counts().complete, resumed.counts().playing) == (complete, 2 - complete)
        restarted = resumed.admit()
        assert restarted is not None and (restarted.group_id, restarted.attempt) == (complete, ATTEMPTS)
