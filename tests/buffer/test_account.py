"""What the buffer waits for, as its process's monitor reports it: leases by holder, and whoever brings the rest."""

from __future__ import annotations

import asyncio

from monarch.actor import this_host

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.packed import pack_group
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.monitor import ProcessMonitor
from tests.buffer.helpers import group

WAIT_S = 30.0


async def account() -> list[list[tuple[str, str]]]:
    """(on, what) at each stage of two steps without lag."""
    procs = this_host().spawn_procs(per_host={"buffer": 1}, name="buffer")
    try:
        buffer, monitor = procs.spawn("buffer", Buffer, 2, BufferSettings(0)), procs.spawn("monitor", ProcessMonitor)
        stages = []

        async def look() -> None:
            seen = await monitor.report.call_one()
            assert {wait.waiter for wait in seen.waits} <= {"buffer"} and seen.name in ("buffer", None)
            assert all(0 <= seen.now - wait.since < WAIT_S for wait in seen.waits)
            stages.append([(wait.on, wait.what) for wait in seen.waits])

        await buffer.counts.call_one()
        await look()
        first = await buffer.admit.call_one("rollout worker 1", WAIT_S)
        second = await buffer.admit.call_one("rollout worker 2", WAIT_S)
        await buffer.put.call_one(pack_group(group(first.group_id, [0], [0])))
        await look()
        await buffer.put.call_one(pack_group(group(second.group_id, [0], [0])))
        await look()
        await buffer.take.call_one(0, 0, 1, 64, WAIT_S)
        await buffer.trained.call_one(1)
        await look()
        return stages
    finally:
        await within(20, procs.stop(), "the buffer's process to stop")


def test_leases_are_waits_on_their_holders() -> None:
    empty, playing, full, trained = asyncio.run(asyncio.wait_for(account(), 60))
    assert empty == [("rollout workers", "workers to start groups (0 of 2 groups of the batch are in)")]
    held = "group 1, held by rollout worker 2 (1 of 2 groups of the batch are in)"
    assert playing == [("rollout worker 2", held)]
    assert full == []
    here = "(0 of 2 groups of the batch are in)"
    assert sorted(trained) == [
        ("controller", f"version 1 to be served, which frees slots {here}"),
        ("rollout workers", f"workers to start groups {here}"),
    ]
