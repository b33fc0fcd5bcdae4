"""Throughput of the buffer: producers admit and submit groups, trainer ranks take batches, each in its own process.

    python benchmarks/buffer.py

A group has 16 episodes of 1,000 sampled tokens and a prompt of 100. The reference is a bare actor that receives the
same bytes in calls of the same size and returns as many, between the same processes; both sides alternate. The last
line is JSON: rates, which hold for this machine and hour; their ratio, which also holds elsewhere; and the CPU time per
group in all processes and in the buffer's process alone, which depends less on the load of the machine.
"""

from __future__ import annotations

import monarch_rl  # isort: skip  # noqa: F401  its settings for Monarch count only if it is imported first

import asyncio
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tyro
from monarch.actor import Actor

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.buffer.shards import ShardPlan
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.sampling import Completion
from monarch_rl.episode.serialization import serialize_group
from monarch_rl.rollout.submit import MESSAGE_BYTES, SubmitQueue, TicketQueue
from monarch_rl.runtime.cluster import Cluster, launch_cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint

WAIT_S = 120.0


@dataclass(frozen=True)
class Settings:
    """Throughput of the buffer (see the top of this file)."""

    producers: int = 2
    """Processes that submit groups."""
    ranks: int = 2
    """Processes that take shards of batches."""
    groups_per_step: int = 64
    """Groups of a batch."""
    steps: int = 32
    """Batches of a round."""
    places: int = 64
    """Groups in flight per producer."""
    group_size: int = 16
    """Episodes of a group."""
    prompt_tokens: int = 100
    """Tokens of a prompt."""
    new_tokens: int = 1000
    """Sampled tokens of an episode."""
    rounds: int = 5
    """Rounds of both sides; the first does not count."""


GROUP_ID = 10**9
"""Placeholder for the number of the group in a template, with the size of any number."""


def template(s: Settings) -> bytes:
    """Return a serialized group without its number, which is filled in later: serializing must not be measured."""
    rng = np.random.default_rng(0)

    def episode(reward: int) -> Episode:
        ids, logprobs = rng.integers(0, 150_000, s.new_tokens), -rng.exponential(1.0, s.new_tokens)
        completion = Completion(ids, logprobs.astype(np.float32), np.zeros(s.new_tokens, np.int32), "length")
        return Episode([Turn.from_completion(list(range(s.prompt_tokens)), completion)], float(reward), "length")

    return serialize_group(Group(GROUP_ID, 0, [episode(i % 2) for i in range(s.group_size)]))


class Clock(Actor):
    @concurrent_endpoint
    async def cpu_seconds(self) -> float:
        """CPU time of this process so far."""
        return time.process_time()


class Bare(Actor):
    """Receives bytes and returns bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @concurrent_endpoint
    async def put(self, *groups: bytes) -> None:
        pass

    @concurrent_endpoint
    async def take(self) -> bytes:
        return self._data


class Producer(Actor):
    def __init__(self, settings: Settings, data: bytes) -> None:
        self._settings = settings
        self._data = data

    def _group(self, group_id: int) -> bytes:
        return self._data.replace(str(GROUP_ID).encode(), str(group_id).rjust(len(str(GROUP_ID))).encode(), 1)

    @concurrent_endpoint
    async def feed(self, buffer: Any, name: str) -> None:
        """Submit groups until the buffer is closed."""
        admissions, outbox = TicketQueue(buffer, name, WAIT_S), SubmitQueue(buffer, name, WAIT_S)

        async def place() -> None:
            while (ticket := await admissions.ticket()) is not None:
                await outbox.submit(ticket.group_id, ticket.attempt, self._group(ticket.group_id))

        await asyncio.gather(*(place() for _ in range(self._settings.places)))

    @concurrent_endpoint
    async def feed_bare(self, bare: Any, groups: int) -> None:
        """Send as many groups in calls as large as a worker's, two at a time: one is serialized while one is sent."""
        per_call = max(1, MESSAGE_BYTES // len(self._data))
        left = groups

        async def sender() -> None:
            nonlocal left
            while left > 0:
                size, left = min(per_call, left), left - per_call
                await bare.put.call_one(*(self._group(i) for i in range(size)))

        await asyncio.gather(sender(), sender())


class Rank(Actor):
    @concurrent_endpoint
    async def take(self, buffer: Any, version: int, rank: int, ranks: int) -> int:
        return len((await buffer.take.call_one(version, rank, ShardPlan(ranks, 2**20), WAIT_S)).data)

    @concurrent_endpoint
    async def take_bare(self, bare: Any, calls: int) -> None:
        for _ in range(calls):
            await bare.take.call_one()


async def through_buffer(s: Settings, producers: list[Any], ranks: list[Any], mesh: Any) -> float:
    """Return the seconds of a round with the buffer."""
    # All tokens are of version 0, so no lag may be too large. The window leaves as many slots as max-policy-lag 2.
    settings = BufferSettings(s.steps + 2, window=s.steps * s.groups_per_step)
    buffer = mesh.spawn(f"buffer{time.monotonic_ns()}", Buffer, s.groups_per_step, settings)
    feeding = [asyncio.ensure_future(p.feed.call_one(buffer, f"producer {i}")) for i, p in enumerate(producers)]
    started = time.perf_counter()
    for version in range(s.steps):
        takes = [rank.take.call_one(buffer, version, i, s.ranks) for i, rank in enumerate(ranks)]
        await within(WAIT_S, asyncio.gather(*takes), f"the batch of version {version}")
        await within(WAIT_S, buffer.trained.call_one(version + 1), "the buffer to note the step")
        await within(WAIT_S, buffer.published.call_one(version + 1), "the buffer to release slots")
    seconds = time.perf_counter() - started
    await within(WAIT_S, buffer.close.call_one(), "the buffer to close")
    await within(WAIT_S, asyncio.gather(*feeding), "the producers to end")
    return seconds


async def through_bare(s: Settings, producers: list[Any], ranks: list[Any], mesh: Any, nbytes: int) -> float:
    """Return the seconds of a round with the bare actor: in each step, the bytes of a batch in each direction."""
    share = os.urandom(nbytes * s.groups_per_step // s.ranks)
    bare = mesh.spawn(f"bare{time.monotonic_ns()}", Bare, share)
    calls = [p.feed_bare.call_one(bare, s.groups_per_step * s.steps // s.producers) for p in producers]
    calls += [rank.take_bare.call_one(bare, s.steps) for rank in ranks]
    started = time.perf_counter()
    await within(WAIT_S, asyncio.gather(*calls), "the bare calls")
    return time.perf_counter() - started


async def cpu_ms(clocks: list[Any]) -> np.ndarray:
    """Return the CPU time so far of all processes, and of the buffer's process (the last)."""
    seconds = await within(WAIT_S, asyncio.gather(*(c.cpu_seconds.call_one() for c in clocks)), "the clocks")
    return np.asarray([sum(seconds), seconds[-1]]) * 1e3


async def measure(cluster: Cluster, s: Settings) -> dict[str, Any]:
    data = template(s)
    producer_meshes = [cluster.spawn(f"producer{i}", 1) for i in range(s.producers)]
    rank_meshes = [cluster.spawn(f"rank{i}", 1) for i in range(s.ranks)]
    producers = [one.spawn("producer", Producer, s, data) for one in producer_meshes]
    ranks = [one.spawn("rank", Rank) for one in rank_meshes]
    mesh = cluster.spawn("buffer", 1)
    clocks = [actor.spawn("clock", Clock) for actor in (*producer_meshes, *rank_meshes, mesh)]
    groups = s.groups_per_step * s.steps
    ours, bare, cpu = [], [], []
    for number in range(s.rounds):
        before = await cpu_ms(clocks)
        ours.append(groups / await through_buffer(s, producers, ranks, mesh))
        between = await cpu_ms(clocks)
        bare.append(groups / await through_bare(s, producers, ranks, mesh, len(data)))
        after = await cpu_ms(clocks)
        cpu.append([(between - before) / groups, (after - between) / groups])
        print(f"round {number}: {ours[-1]:,.0f} groups/s, bare actor {bare[-1]:,.0f}", flush=True)
    rate, limit = statistics.median(ours[1:]), statistics.median(bare[1:])
    per_group = np.median(cpu[1:], axis=0)
    return {
        "groups_per_s": round(rate),
        "mb_per_s_each_way": round(rate * len(data) / 1e6),
        "bytes_per_group": len(data),
        "bare_groups_per_s": round(limit),
        "share_of_bare": round(statistics.median(a / b for a, b in zip(ours[1:], bare[1:], strict=True)), 3),
        "cpu_ms_per_group": round(per_group[0][0], 3),
        "cpu_ms_per_group_in_buffer": round(per_group[0][1], 3),
        "bare_cpu_ms_per_group": round(per_group[1][0], 3),
        "bare_cpu_ms_per_group_in_actor": round(per_group[1][1], 3),
        "cores": os.cpu_count(),
        **asdict(s),
    }


if __name__ == "__main__":
    settings = tyro.cli(Settings, description=__doc__)
    with launch_cluster() as launched:
        if launched is not None:
            print(json.dumps(asyncio.run(measure(launched, settings))))
