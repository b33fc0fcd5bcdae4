"""The buffer as an actor: waiting, deadlines that name who holds what, shards, the end of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from monarch.actor import ActorError, this_host

from monarch_rl.algorithms.packing import KEYS_PER_TOKEN
from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.ledger import PLAYED_AGAIN, RUN_ENDED, STALE
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.buffer.shards import ShardPlan
from monarch_rl.episode.episode import Group
from monarch_rl.episode.failure import Failure
from monarch_rl.episode.serialization import serialize_group
from monarch_rl.errors import BufferClosed, DeadlineExceeded
from monarch_rl.rollout.submit import UNASKED_BYTES, SubmitQueue, TicketQueue
from monarch_rl.runtime.deadlines import now, within
from tests.buffer.helpers import episode, group
from tests.episode.trees import distinct_inputs
from tests.patience import LIMIT_S as WAIT_S
from tests.patience import patiently

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def process() -> Iterator[Any]:
    """One for all buffers: starting it takes seconds."""
    process = this_host().spawn_procs(per_host={"buffer": 1}, name="buffer")
    yield process
    process.stop().get(timeout=300)


def buffer_actor(process: Any, groups: int, lag: int, version: int = 0, **settings: Any) -> Any:
    return process.spawn("buffer", Buffer, groups, BufferSettings(lag, **{"window": 0, **settings}), version)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await patiently(test(), "the test", 500)

    asyncio.run(bounded())


async def fill(buffer: Any, groups: int, version: int = 0) -> list[int]:
    tickets = [await buffer.admit.call_one("worker 0", WAIT_S) for _ in range(groups)]
    for ticket in tickets:
        await buffer.submit.call_one(serialize_group(group(ticket.group_id, [version], [version])))
    return [ticket.group_id for ticket in tickets]


def test_steps_through_waiting_calls(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 2, 1)
        waiting_take = asyncio.ensure_future(buffer.take.call_one(0, 0, ShardPlan(1, 64), WAIT_S))
        await fill(buffer, 4)
        shard = await within(WAIT_S, waiting_take, "the first batch")
        waiting_admit = asyncio.ensure_future(buffer.admit.call_one("worker 1", WAIT_S))
        assert shard.version == 0 and shard.num_episodes == 4
        await buffer.trained.call_one(1)
        counts = await buffer.counts.call_one()
        assert (counts.slots_free, counts.unpublished, counts.trained) == (0, 2, 2)
        assert not waiting_admit.done()
        await buffer.published.call_one(1)
        ticket = await within(WAIT_S, waiting_admit, "the slot")
        assert ticket.group_id == 4
        shard = await buffer.take.call_one(1, 0, ShardPlan(1, 64), WAIT_S)
        assert shard.lag_counts.tolist() == [0, 4]

    run(test)


def test_a_batch_is_awaited_until_it_is_complete_and_names_what_it_lacks(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 4, 1)
        assert await buffer.awaited_batch.call_one() is None, "no rank waits"
        (done,) = await fill(buffer, 1)
        await buffer.drop.call_one((await buffer.admit.call_one("worker 0", WAIT_S)).group_id, "before", 0, 0)
        taking = asyncio.ensure_future(buffer.take.call_one(0, 0, ShardPlan(1, 64), WAIT_S))
        for reason in ("meanwhile", ""):
            ticket = await buffer.admit.call_one("worker 0", WAIT_S)
            if reason:
                await buffer.drop.call_one(ticket.group_id, reason, 0, 0)
        batch = await buffer.awaited_batch.call_one()
        assert (batch.groups, batch.missing, batch.unstarted) == (4, [ticket.group_id], 2)
        assert (batch.running, batch.dropped) == (1, {"meanwhile": 1}) and done not in batch.missing
        await buffer.submit.call_one(serialize_group(group(ticket.group_id, [0], [0])))
        await fill(buffer, 2)
        await within(WAIT_S, taking, "the batch")
        assert await buffer.awaited_batch.call_one() is None, "the trainer computes"

    run(test)


def test_a_held_buffer_serves_only_the_batch_in_training(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 2, 1)
        await fill(buffer, 2)
        shard = await buffer.take.call_one(0, 0, ShardPlan(2, 64), WAIT_S)
        assert await buffer.hold.call_one() == 1, "a rank trains what makes version 1"
        late = await buffer.take.call_one(0, 1, ShardPlan(2, 64), WAIT_S)
        assert shard.version == late.version == 0
        await buffer.trained.call_one(1)
        waiting = asyncio.ensure_future(buffer.take.call_one(1, 0, ShardPlan(2, 64), WAIT_S))
        await fill(buffer, 2)
        assert (await buffer.hold.call_one(), await buffer.stage.call_one()) == (1, 1)
        counts = await buffer.counts.call_one()
        assert not waiting.done() and (counts.complete, counts.dropped) == (2, {}), "its groups stay"
        await buffer.close.call_one()
        with pytest.raises(ActorError, match="ended"):
            await waiting

    run(test)


def test_deadlines_name_who_holds_what(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 3, 0)
        await fill(buffer, 1)
        await buffer.admit.call_one("rollout worker 7", WAIT_S)
        with pytest.raises(ActorError) as failure:
            await buffer.take.call_one(0, 1, ShardPlan(2, 64), 0.1)
        assert isinstance(failure.value.exception, DeadlineExceeded)
        message = str(failure.value.exception)
        assert "trainer rank 1 waited 0.1 s" in message and "version 0" in message
        assert "groups 1 and 1 that no worker has started" in message
        assert "group 1 by rollout worker 7 for " in message
        await fill(buffer, 1)
        with pytest.raises(ActorError) as failure:
            await buffer.admit.call_one("rollout worker 8", 0.1)
        message = str(failure.value.exception)
        assert "rollout worker 8 waited 0.1 s for a free slot" in message
        assert "--patience" in message
        assert "0 free of 3, 1 in progress, 2 complete" in message
        await buffer.drop.call_one(1, "score hung")  # the call that gave up was given no slot
        assert (await buffer.counts.call_one()).slots_free == 1
        assert "dropped so far: {'score hung': 1}" in await buffer.report.call_one()

    run(test)


def test_close_ends_every_wait(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 2, 0)
        await fill(buffer, 1)
        last = await buffer.admit.call_one("worker 0", WAIT_S)
        take = asyncio.ensure_future(buffer.take.call_one(0, 0, ShardPlan(1, 64), WAIT_S))
        admit = asyncio.ensure_future(buffer.admit.call_one("worker 0", WAIT_S))
        await buffer.counts.call_one()
        counts = await buffer.close.call_one()
        assert counts.dropped == {RUN_ENDED: 2}
        assert await within(WAIT_S, admit, "the end of admit") is None
        with pytest.raises(ActorError) as failure:
            await within(WAIT_S, take, "the end of take")
        assert isinstance(failure.value.exception, BufferClosed)
        await buffer.submit.call_one(serialize_group(group(last.group_id, [0])))
        assert await buffer.admit.call_one("worker 0", WAIT_S) is None

    run(test)


def test_shards_hold_each_episode_once_and_all_rewards(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 2, 2)
        groups = [
            Group(
                i,
                i,
                [episode([0] * (1 + i + j), reward=float(10 * i + j), prompt=3) for j in range(3)],
                task=f"t{i}",
            )
            for i in range(2)
        ]
        groups[1].episodes[2].finish_reason, groups[0].episodes[1].parts = "length", {"format": 0.5}
        groups[0].episodes[1].seat, groups[0].episodes[1].rollout = "black", 0
        groups[1].episodes[2].turns[0].reward = 0.25
        for one in groups:
            for of_group in one.episodes:
                of_group.fill_column("value", np.arange(of_group.num_tokens) + of_group.reward)
                of_group.fill_column("other", np.ones(of_group.num_tokens))
            await buffer.admit.call_one("worker 0", WAIT_S)
            await buffer.submit.call_one(serialize_group(one))
        calls = [buffer.take.call_one(0, rank, ShardPlan(2, 12, ("value",)), WAIT_S) for rank in range(2)]
        shards = await asyncio.gather(*calls)
        repeated = await buffer.take.call_one(0, 1, ShardPlan(2, 12, ("value",)), WAIT_S)
        assert repeated.places == shards[1].places and repeated.data == shards[1].data
        assert len(shards[0].places) == len(shards[1].places)
        places = []
        for shard in shards:
            assert [rewards.tolist() for rewards in shard.rewards] == [[0, 1, 2], [10, 11, 12]]
            assert [lengths.tolist() for lengths in shard.lengths] == [[1, 2, 3], [2, 3, 4]]
            assert [cut.tolist() for cut in shard.cut] == [[False] * 3, [False, False, True]]
            assert (shard.tasks, shard.parts) == (["t0", "t1"], [[{}, {"format": 0.5}, {}], [{}, {}, {}]])
            assert shard.seats == [["", "black", ""], [""] * 3] and shard.items == [0, 1]
            assert [rollouts.tolist() for rollouts in shard.plays] == [[0, 0, 2], [0, 1, 2]]
            assert shard.turn_lengths == [[[1], [2], [3]], [[2], [3], [4]]]
            assert shard.turn_rewards == [[[None]] * 3, [[None], [None], [0.25]]]
            assert shard.column_names == ("other", "value") and shard.columns.keys() == {"value"}
            assert [values.tolist() for values in shard.columns["value"][1]] == [
                [13, 14],
                [14, 15, 16],
                [15, 16, 17, 18],
            ]
            assert shard.trainable_tokens == 1 + 2 + 3 + 2 + 3 + 4
            assert shard.lag_counts.tolist() == [15, 0, 0] and shard.lag_counts.dtype == np.int64
            for microbatch_places, episodes in zip(shard.places, shard.deserialize(), strict=True):
                microbatch = [(g, e, one) for (g, e, _), one in zip(microbatch_places, episodes, strict=True)]
                assert sum(e.num_tokens - 1 for _, _, e in microbatch) <= KEYS_PER_TOKEN * 12
                by_group = [[e for g, _, e in microbatch if g == group] for group in range(2)]
                assert sum(map(distinct_inputs, by_group)) <= 12
                for g, e, one_episode in microbatch:
                    places.append((g, e))
                    assert one_episode.reward == groups[g].episodes[e].reward
                    assert one_episode.token_ids.tolist() == groups[g].episodes[e].token_ids.tolist()
                    for name in ("value", "other"):
                        assert one_episode.column(name).tolist() == groups[g].episodes[e].column(name).tolist()
        assert sorted(places) == [(g, e) for g in range(2) for e in range(3)]
        with pytest.raises(ActorError, match="disagree"):
            await buffer.take.call_one(0, 0, ShardPlan(1, 12), WAIT_S)
        with pytest.raises(ActorError, match="dp_rank 2 .*dp_size 2"):
            await buffer.take.call_one(0, 2, ShardPlan(2, 12), WAIT_S)

    run(test)


def test_slots_of_stale_groups_go_to_waiting_workers(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 1, 0, 3)
        await fill(buffer, 1, version=1)
        admit = asyncio.ensure_future(buffer.admit.call_one("worker 0", WAIT_S))
        take = asyncio.ensure_future(buffer.take.call_one(3, 0, ShardPlan(1, 64), WAIT_S))
        ticket = await within(WAIT_S, admit, "the slot of the stale group")
        await buffer.submit.call_one(serialize_group(group(ticket.group_id, [3])))
        await within(WAIT_S, take, "the batch")
        counts = await buffer.counts.call_one()
        assert counts.dropped == {STALE: 1}

    run(test)


def test_groups_of_a_lost_worker_go_to_another_and_its_late_submissions_are_ignored(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 2, 0)
        tickets = [await buffer.admit.call_one("worker 0", WAIT_S) for _ in range(2)]
        await buffer.submit.call_one(serialize_group(group(0, [0], [0])))
        dead = asyncio.ensure_future(buffer.admit.call_one("worker 0", WAIT_S))
        waiting = asyncio.ensure_future(buffer.admit.call_one("worker 1", WAIT_S))
        await buffer.counts.call_one()
        assert await buffer.requeue.call_one("worker 0") == [1]
        assert await within(WAIT_S, dead, "the end of a wait for which nobody is left") is None
        ticket = await within(WAIT_S, waiting, "the lost worker's group")
        assert (ticket.group_id, ticket.task_cursor, ticket.attempt) == (1, tickets[1].task_cursor, 1)
        assert "held: group 1 by worker 1" in await buffer.report.call_one()
        await buffer.submit.call_one(serialize_group(group(1, [0], [0])))  # worker 0 was only slow
        await buffer.drop.call_one(1, "score hung")
        counts = await buffer.counts.call_one()
        assert (counts.playing, counts.wasted_tokens, counts.dropped) == (1, {PLAYED_AGAIN: 2}, {})
        assert "held: group 1 by worker 1" in await buffer.report.call_one()
        restarted = group(1, [0], [0])
        restarted.attempt = 1
        await buffer.submit.call_one(serialize_group(restarted))
        shard = await buffer.take.call_one(0, 0, ShardPlan(1, 64), WAIT_S)
        assert shard.num_episodes == 4

    run(test)


def test_a_group_that_has_blocked_its_worker_is_dropped_and_the_others_are_restarted(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 3, 0)
        for worker in ("worker 0", "worker 0", "worker 1"):
            await buffer.admit.call_one(worker, WAIT_S)
        failure = Failure("episode blocked its worker", report="mistakes.py:62")
        assert await buffer.requeue.call_one("worker 0", (1, failure)) == [0]
        assert (await buffer.counts.call_one()).dropped == {failure.reason: 1}
        assert (await buffer.failures.call_one(0, 600.0)).failures == [failure]
        assert await buffer.requeue.call_one("worker 0", (2, failure)) == [], "another worker has it"
        assert (await buffer.counts.call_one()).dropped == {failure.reason: 1}

    run(test)


def test_waits_for_a_slow_group_are_counted(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 1, 2)
        began = now()
        await buffer.admit.call_one("worker 0", WAIT_S)
        take = asyncio.ensure_future(buffer.take.call_one(0, 0, ShardPlan(1, 64), WAIT_S))
        await fill(buffer, 2)
        await buffer.submit.call_one(serialize_group(group(0, [0])))
        await within(WAIT_S, take, "the batch")
        counts, passed_s = await buffer.counts.call_one(), now() - began
        assert counts.order_waits == 1 and 0 < counts.order_wait_s <= passed_s
        await buffer.trained.call_one(1)
        await buffer.take.call_one(1, 0, ShardPlan(1, 64), WAIT_S)
        assert (await buffer.counts.call_one()).order_waits == 1

    run(test)


def large(group_id: int) -> bytes:
    """Some 0.6 MiB."""
    return serialize_group(group(group_id, [0] * 75_000))


def test_a_group_without_room_waits_at_its_worker(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 1, 3, max_mib=1)
        queue = SubmitQueue(buffer, "worker 0", WAIT_S)
        for _ in range(4):
            await buffer.admit.call_one("worker 0", WAIT_S)
        await queue.submit(1, 0, large(1))
        waiting = asyncio.ensure_future(queue.submit(2, 0, large(2)))
        with pytest.raises(ActorError) as failure:
            await buffer.reserve.call_one(3, 0, 2**20, "worker 0", 0.1)
        message = str(failure.value.exception)
        assert "worker 0 waited 0.1 s" in message and "1048576 bytes of group 3" in message and "0.6 MiB" in message
        with pytest.raises(ActorError, match="group 3 .*reserve"):
            await buffer.submit.call_one(large(3))
        counts = await buffer.counts.call_one()
        assert counts.complete == 1 and counts.nbytes < 2**20 and not waiting.done()
        await queue.submit(0, 0, large(0))  # it belongs to the next batch: it has room, whoever waits
        await buffer.take.call_one(0, 0, ShardPlan(1, 10**6), WAIT_S)
        assert not waiting.done()
        await buffer.trained.call_one(1)
        await buffer.take.call_one(1, 0, ShardPlan(1, 10**6), WAIT_S)
        await within(WAIT_S, waiting, "room for the group that is due next")

    run(test)


def test_a_ticket_queue_admits_in_batches_and_reports_deadline_and_end(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 3, 0)
        tickets_of = TicketQueue(buffer, "worker 0", WAIT_S)
        tickets = await asyncio.gather(*(tickets_of.ticket() for _ in range(2)))
        assert [ticket and ticket.group_id for ticket in tickets] == [0, 1]
        impatient = TicketQueue(buffer, "worker 1", 0.1)
        ticket = await impatient.ticket()
        assert ticket is not None and ticket.group_id == 2
        waits = await asyncio.gather(*(impatient.ticket() for _ in range(2)), return_exceptions=True)
        assert all("worker 1 waited 0.1 s" in str(error) for error in waits)
        waiting = [asyncio.ensure_future(tickets_of.ticket()) for _ in range(3)]
        await buffer.drop.call_one(1, "score hung")
        ticket = await within(WAIT_S, waiting[0], "the slot")
        assert ticket is not None and ticket.group_id == 3
        await buffer.close.call_one()
        assert await within(WAIT_S, asyncio.gather(*waiting[1:]), "the end") == [None, None]

    run(test)


def test_a_submit_queue_raises_the_buffers_refusals(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 1, 1)
        queue = SubmitQueue(buffer, "worker 0", WAIT_S)
        with pytest.raises(ActorError, match="group 5 .*not admitted"):
            await within(WAIT_S, queue.submit(5, 0, serialize_group(group(5, [0]))), "the refusal")
        await buffer.admit.call_one("worker 0", WAIT_S)
        await within(WAIT_S, queue.submit(0, 0, serialize_group(group(0, [0]))), "a submission after a refusal")

    run(test)


def test_small_groups_are_submitted_without_reserving_and_wait_for_room_like_others(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 1, 3, max_mib=1)
        for _ in range(4):
            await buffer.admit.call_one("worker 0", WAIT_S)
        queue = SubmitQueue(buffer, "worker 0", WAIT_S)
        small = serialize_group(group(2, [0] * 12_000))
        assert len(small) <= UNASKED_BYTES
        await queue.submit(1, 0, large(1))
        await buffer.reserve.call_one(3, 0, 2**20 - len(large(1)) - len(small) + 1, "worker 0", WAIT_S)
        waiting = asyncio.ensure_future(queue.submit(2, 0, small))
        assert await buffer.submit_if_room.call_one(small) == [False]
        assert (await buffer.counts.call_one()).complete == 1 and not waiting.done()
        await buffer.drop.call_one(3, "makes room")
        await within(WAIT_S, waiting, "room for the small group")
        assert (await buffer.counts.call_one()).complete == 2

    run(test)


def test_groups_that_complete_together_are_submitted_in_one_call(process: Any) -> None:
    async def test() -> None:
        buffer = buffer_actor(process, 8, 0)
        counting: Any = CountingBuffer(buffer)
        queue = SubmitQueue(counting, "worker 0", WAIT_S)
        ids = [(await buffer.admit.call_one("worker 0", WAIT_S)).group_id for _ in range(8)]
        await asyncio.gather(*(queue.submit(i, 0, serialize_group(group(i, [0]))) for i in ids))
        assert counting.submissions == [8]
        assert (await buffer.counts.call_one()).complete == 8

    run(test)


class CountingBuffer:
    """The handle, and how many groups each submission carried."""

    def __init__(self, buffer: Any) -> None:
        self.reserve, self.submissions = buffer.reserve, list[int]()
        self._submit_if_room = buffer.submit_if_room
        self.submit_if_room = self

    def call_one(self, *groups: bytes) -> Any:
        self.submissions.append(len(groups))
        return self._submit_if_room.call_one(*groups)
