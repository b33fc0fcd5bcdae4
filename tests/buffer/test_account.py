"""What the buffer's process reports that it waits for: leases by holder, or whoever has to act next."""

from __future__ import annotations

import asyncio

import pytest
from monarch.actor import this_host

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.buffer.shards import ShardPlan
from monarch_rl.episode.serialization import serialize_group
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.monitor import ProcessMonitor
from tests.buffer.helpers import group
from tests.patience import LIMIT_S as WAIT_S
from tests.patience import patiently


async def account() -> list[list[tuple[str, str]]]:
    """(on, what) at each stage of two steps without lag."""
    procs = this_host().spawn_procs(per_host={"buffer": 1}, name="buffer")
    try:
        monitor = procs.spawn("monitor", ProcessMonitor)
        began = (await monitor.report.call_one()).now
        buffer = procs.spawn("buffer", Buffer, 2, BufferSettings(0))
        stages = []

        async def look() -> None:
            seen = await monitor.report.call_one()
            assert {wait.waiter for wait in seen.waits} <= {"buffer"} and seen.name in ("buffer", None)
            assert all(began <= wait.since <= seen.now for wait in seen.waits)
            stages.append([(wait.on, wait.what) for wait in seen.waits])

        await buffer.counts.call_one()
        await look()
        first = await buffer.admit.call_one("rollout worker 1", WAIT_S)
        second = await buffer.admit.call_one("rollout worker 2", WAIT_S)
        await buffer.submit.call_one(serialize_group(group(first.group_id, [0], [0])))
        await look()
        await buffer.submit.call_one(serialize_group(group(second.group_id, [0], [0])))
        await look()
        await buffer.take.call_one(0, 0, ShardPlan(1, 64), WAIT_S)
        await buffer.trained.call_one(1)
        await look()
        return stages
    finally:
        await within(WAIT_S, procs.stop(), "the buffer's process to stop")


@pytest.mark.core
def test_leases_are_waits_on_their_holders() -> None:
    empty, running, full, trained = asyncio.run(patiently(account(), "the account", 300))
    (waits,) = empty
    assert waits[0] == "rollout workers" and "0 of 2 groups" in waits[1]
    (waits,) = running
    assert waits[0] == "rollout worker 2" and "group 1, " in waits[1] and "1 of 2 groups" in waits[1]
    assert full == []
    served, started = sorted(trained)
    assert served[0] == "controller" and "version 1 " in served[1] and "0 of 2 groups" in served[1]
    assert started[0] == "rollout workers" and "0 of 2 groups" in started[1]
