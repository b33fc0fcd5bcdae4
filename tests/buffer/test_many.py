"""Many workers and many trainer ranks at one buffer, each in a process of its own."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from monarch.actor import Actor, current_rank, this_host

from monarch_rl.algorithms.packing import SLOWER
from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.buffer.shards import ShardPlan
from monarch_rl.episode.episode import Group
from monarch_rl.episode.serialization import serialize_group
from monarch_rl.rollout.submit import SubmitQueue, TicketQueue
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint
from tests.buffer.helpers import episode
from tests.episode.trees import distinct_inputs
from tests.patience import LIMIT_S as WAIT_S

WORKERS, RANKS, GROUPS, SIZE, STEPS = 3, 3, 4, 5, 12
TOKEN_BUDGET, LONGEST = 90, 40


def make(group_id: int, version: int, attempt: int) -> Group:
    """Episodes of lengths that only the group decides, with prompts and a few tokens in common; the reward names the
    episode."""
    rng = random.Random(group_id)
    lengths = [rng.randint(1, LONGEST - 2) for _ in range(SIZE)]
    episodes = [episode([version] * n, reward=float(SIZE * group_id + i)) for i, n in enumerate(lengths)]
    for i, one in enumerate(episodes):
        one.turns[0].token_ids[rng.randint(2, 9) :] += LONGEST * (i + 1)
    return Group(group_id, group_id, episodes, attempt=attempt)


class Worker(Actor):
    @concurrent_endpoint
    async def work(self, buffer: Any) -> int:
        """Runs until the buffer is closed; some groups are dropped. Returns how many were submitted."""
        name, submitted = f"worker {current_rank().rank}", 0
        tickets, submissions = TicketQueue(buffer, name, WAIT_S), SubmitQueue(buffer, name, WAIT_S)

        async def run_episodes() -> None:
            nonlocal submitted
            while (ticket := await tickets.ticket()) is not None:
                version = (await buffer.counts.call_one()).published
                if ticket.group_id % 7 == 3:
                    await buffer.drop.call_one(ticket.group_id, "score hung")
                    continue
                await submissions.submit(ticket.group_id, 0, serialize_group(make(ticket.group_id, version, 0)))
                submitted += 1

        await asyncio.gather(*(run_episodes() for _ in range(3)))
        return submitted


class Rank(Actor):
    @concurrent_endpoint
    async def take(self, buffer: Any, version: int) -> Any:
        rank = current_rank().rank
        shard = await buffer.take.call_one(version, rank, ShardPlan(RANKS, TOKEN_BUDGET), WAIT_S)
        return shard.rewards, [
            [(g, e, one) for (g, e, _), one in zip(places, episodes, strict=True)]
            for places, episodes in zip(shard.places, shard.deserialize(), strict=True)
        ]


async def system() -> None:
    host = this_host()
    meshes = [host.spawn_procs(per_host={"p": n}, name=name) for name, n in (("b", 1), ("w", WORKERS), ("t", RANKS))]
    try:
        buffer = meshes[0].spawn("buffer", Buffer, GROUPS, BufferSettings(2))
        workers, ranks = meshes[1].spawn("workers", Worker), meshes[2].spawn("ranks", Rank)
        working = asyncio.ensure_future(workers.work.call(buffer))
        trained: list[float] = []
        for version in range(STEPS):
            shards = list((await within(WAIT_S, ranks.take.call(buffer, version), "all ranks' shards")).values())
            check(shards, trained)
            await buffer.trained.call_one(version + 1)
            await buffer.published.call_one(version + 1)
        counts = await buffer.close.call_one()
        await within(WAIT_S, working, "the workers to end")
        assert counts.trained == STEPS * GROUPS and counts.dropped["score hung"] >= 1
        assert counts.admitted == counts.trained + sum(counts.dropped.values())
        assert len(trained) == len(set(trained)) == STEPS * GROUPS * SIZE
    finally:
        for mesh in meshes:
            await within(WAIT_S, mesh.stop(), "processes to stop")


def check(shards: list[Any], trained: list[float]) -> None:
    """All ranks have one batch, each episode in it once; their compute is within the budget and balanced."""
    rewards, places, tokens, inputs = shards[0][0], [], [], 0
    assert len({len(microbatches) for _, microbatches in shards}) == 1
    for of_batch, microbatches in shards:
        assert [one.tolist() for one in of_batch] == [one.tolist() for one in rewards]
        computed = 0
        for microbatch in microbatches:
            places += [(g, e) for g, e, _ in microbatch]
            trained += [one.reward for _, _, one in microbatch]
            assert all(one.reward == rewards[g][e] for g, e, one in microbatch)
            by_group = [[one for g, _, one in microbatch if g == group] for group in range(GROUPS)]
            assert sum(map(distinct_inputs, by_group)) <= TOKEN_BUDGET
            computed += sum(map(distinct_inputs, by_group))
            inputs += sum(one.num_tokens - 1 for _, _, one in microbatch)
        tokens.append(computed)
    assert sorted(places) == [(g, e) for g in range(GROUPS) for e in range(SIZE)]
    assert max(tokens) <= (1 + SLOWER) * (inputs / RANKS + LONGEST)


def test_all_ranks_agree_and_every_episode_is_trained_once() -> None:
    asyncio.run(system())
