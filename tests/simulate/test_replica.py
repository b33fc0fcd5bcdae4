"""The model of a replica against hand-computed times, and under arbitrary arrivals and commits."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.generator.settings import InFlight
from monarch_rl.runtime.deadlines import now
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.costs import Costs, DecodeCosts, Distribution
from monarch_rl.simulate.replica import SimulatedReplica

NO_TENSORS = np.zeros(0, np.int64)
"""Checksums."""


def replica(
    decode: DecodeCosts, lengths: float = 10, in_flight: InFlight = "continue", **more: Any
) -> SimulatedReplica:
    return SimulatedReplica(Costs(Distribution(lengths), decode=decode, **more), 1, in_flight, 1)


async def sample(one: SimulatedReplica, group: int = 0, seed: int = 0, limit: int = 10**6) -> tuple[Completion, float]:
    found = await one.begin([group, 0, 0], Sampling(limit, seed=seed))
    return found, now()


def test_the_cost_of_a_step_depends_on_its_running_sequences() -> None:
    async def go() -> None:
        one = replica(DecodeCosts(1.0, 0.5, max_running=2))
        first = asyncio.ensure_future(sample(one))
        await asyncio.sleep(7.5)  # 5 steps alone
        second = asyncio.ensure_future(sample(one))
        third = asyncio.ensure_future(sample(one))  # waits for the first
        assert (await first)[1] == pytest.approx(7.5 + 5 * 2)
        assert (await second)[1] == pytest.approx(7.5 + 10 * 2)
        assert (await third)[1] == pytest.approx(7.5 + 10 * 2 + 5 * 1.5)
        stats = await one.stats()
        assert stats["generated_tokens"] == 30
        assert stats["busy_seconds"] == pytest.approx(35.0)
        assert stats["request_seconds"] == pytest.approx(7.5 + 10 * 3 + 10 * 2 + 7.5)

    run_virtual(go())


def test_a_groups_prompt_is_computed_once_per_version_and_decoding_waits_for_it() -> None:
    async def go() -> None:
        one = replica(DecodeCosts(1.0, 0.0, 1.0), prompt_tokens=3, commit_s=4.0)
        first, second = (asyncio.ensure_future(sample(one, group=0)) for _ in range(2))
        await asyncio.sleep(5)
        other = asyncio.ensure_future(sample(one, group=1))
        assert (await first)[1] == (await second)[1] == pytest.approx(3 + 10 + 3)
        assert (await other)[1] == pytest.approx(5 + 3 + 10)
        await one.commit(1, 0, NO_TENSORS)
        assert (await sample(one, group=1))[1] == pytest.approx(18 + 4 + 3 + 10)

    run_virtual(go())


def test_a_request_waits_until_the_kv_cache_has_room() -> None:
    async def go() -> None:
        one = replica(DecodeCosts(1.0, 0.0, kv_tokens=24), prompt_tokens=2)
        ends = [when for _, when in await asyncio.gather(*(sample(one, group) for group in range(3)))]
        assert ends == pytest.approx([10, 10, 20])

    run_virtual(go())


@pytest.mark.parametrize(
    ("in_flight", "old", "end"),
    [
        ("continue", 4, 3 + 10 + 2 + 3),  # prompt, tokens, commit, the other request's prompt
        ("recompute", 4, 3 + 10 + 2 + 7 + 3),
        ("resume", 4, 3 + 10 + 2 + 7 + 3),
        ("drain", 10, 3 + 10),
    ],
)
def test_a_commit_separates_tokens_of_two_versions(in_flight: InFlight, old: int, end: float) -> None:
    async def go() -> None:
        one = replica(DecodeCosts(1.0, 0.0, 1.0), 10, in_flight, prompt_tokens=3, commit_s=2.0)
        sampling = asyncio.ensure_future(sample(one))
        await asyncio.sleep(3 + 4)
        commit = asyncio.ensure_future(one.commit(1, 0, NO_TENSORS))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(sample(one, seed=1))
        found, when = await sampling
        assert found.policy_versions.tolist() == [0] * old + [1] * (10 - old)
        assert when == pytest.approx(end)
        assert (await commit).version == 1
        assert set((await late)[0].policy_versions.tolist()) == {1}

    run_virtual(go())


def test_a_commit_is_not_busy_time() -> None:
    async def go() -> None:
        one = replica(DecodeCosts(1.0, 0.0), commit_s=4.0)
        sampling = asyncio.ensure_future(sample(one))
        await asyncio.sleep(3)
        await one.commit(1, 0, NO_TENSORS)
        assert (await sampling)[1] == pytest.approx(14)
        assert (await one.stats())["busy_seconds"] == pytest.approx(10)

    run_virtual(go())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=12),
    st.lists(st.integers(1, 60), max_size=3),
    st.integers(1, 4),
)
def test_no_token_is_lost_under_any_arrivals_and_commits(
    requests: list[tuple[int, int]], commits: list[int], max_running: int
) -> None:
    async def go() -> None:
        one = replica(DecodeCosts(0.3, 0.1, max_running=max_running), 1e6, commit_s=0.7)

        async def request(at: int, tokens: int) -> np.ndarray:
            await asyncio.sleep(at)
            return (await sample(one, limit=tokens))[0].policy_versions

        async def publish() -> None:
            for version, at in enumerate(sorted(commits), 1):
                await asyncio.sleep(max(0.0, at - now()))
                await one.commit(version, 0, NO_TENSORS)

        publishing = asyncio.ensure_future(publish())
        completions = await asyncio.gather(*(request(at, tokens) for at, tokens in requests))
        await publishing
        for versions, (_, tokens) in zip(completions, requests, strict=True):
            assert len(versions) == tokens
            assert np.all(np.diff(versions) >= 0) and versions[-1] <= len(commits)
        assert (await one.stats())["generated_tokens"] == sum(tokens for _, tokens in requests)

    run_virtual(go())
