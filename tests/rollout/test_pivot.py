"""Resampling where values diverge: the decisive turn is found, and shared tokens are sampled once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.tasks.pivot import Resampled, resampled
from monarch_rl.tasks.task import Policy
from tests.rollout.helpers import CHARACTERS
from tests.rollout.test_branches import Engine, run_episode


@pytest.fixture
def template(model: str) -> ChatTemplate:
    return ChatTemplate(model)


@given(turns=st.integers(1, 7), decisive=st.integers(0, 6), seed=st.integers(0, 10**6), room=st.integers(1, 40))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_decisive_turn_is_found_and_shared_tokens_are_sampled_once(
    template: ChatTemplate, turns: int, decisive: int, seed: int, room: int
) -> None:
    """The parity of the first token of one turn decides; the others change nothing."""
    decisive %= turns
    found: list[Resampled] = []

    async def to_the_end(policy: Policy) -> float:
        while policy.turns < turns:
            reply = await policy.reply("go on")
            if policy.turns == decisive + 1:
                values[id(policy)] = float(reply.token_ids[0] % 2)
        return values.get(id(policy), decided(policy))

    def decided(policy: Any) -> float:
        turn = policy._line.turns[decisive]
        return float(turn.token_ids[turn.trainable][0] % 2)

    values: dict[int, float] = {}

    async def episode(item: Any, policy: Policy) -> Any:
        policy.read("begin")
        found.append(await resampled(policy, to_the_end, width=4, probes=12))
        return found[-1].values

    engine = Engine(random.Random(seed))
    sequences = run_episode(engine, template, episode, share=GroupBound(room * 4))
    (result,) = found
    assert result.sampled_tokens == sum(len(completion.token_ids) for completion in engine.completions)
    assert len(sequences) == len(result.values) <= room * 4
    prompts = len("begin") + turns * len("go on")
    assert result.whole == sum(sequence.num_tokens - prompts for sequence in sequences)
    assert result.saved >= 0 and (result.turn or 0) <= turns
    if result.turn is not None and room * 4 > 60:  # with room for all probes, one search in 4,096 finds nothing
        assert result.turn == decisive


@given(decisive=st.integers(0, 5), turns=st.integers(1, 3), seed=st.integers(0, 10**6))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_decisive_token_is_found(template: ChatTemplate, decisive: int, turns: int, seed: int) -> None:
    """The parity of one token of the last turn decides; turns have six tokens."""
    found: list[Resampled] = []

    class Six(Engine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
            await asyncio.sleep(0)  # all probes are at the same turn
            n, odd = sampling.max_new_tokens, len(self.completions) % 2  # so that probes differ, whatever the seed
            ids = np.asarray([2 * self.rng.randrange(len(CHARACTERS) // 2) + odd for _ in range(n)])
            self.completions.append(Completion(ids, np.zeros(n, np.float32), np.zeros(n, int), "length"))
            return self.completions[-1]

    async def to_the_end(policy: Policy) -> float:
        while policy.turns < turns:
            reply = await policy.reply("go on")
        return float(reply.token_ids[decisive] % 2)

    async def episode(item: Any, policy: Policy) -> Any:
        found.append(await resampled(policy, to_the_end, probes=12, tokens=True))
        return found[-1].values

    engine = Six(random.Random(seed))
    sequences = run_episode(engine, template, episode)
    (result,) = found
    assert (result.turn, result.token) == (turns - 1, decisive)
    sampled = sum(len(completion.token_ids) for completion in engine.completions)
    assert sampled == result.sampled_tokens == sum(sequence.num_trainable for sequence in sequences)


def test_equal_values_are_not_resampled(template: ChatTemplate) -> None:
    found: list[Resampled] = []

    async def one_turn(policy: Policy) -> float:
        await policy.reply("x")
        return 1.0

    async def episode(item: Any, policy: Policy) -> Any:
        await policy.reply("begin")
        found.append(await resampled(policy, one_turn, width=3))
        return found[-1].values

    engine = Engine()
    assert len(run_episode(engine, template, episode)) == 3 and len(engine.completions) == 4
    (result,) = found
    first = len(engine.completions[0].token_ids)
    assert (result.turn, result.saved) == (None, 2 * first)


@pytest.mark.parametrize("tokens", [False, True])
def test_a_branch_that_ends_by_a_full_context_has_its_reward_so_far(template: ChatTemplate, tokens: bool) -> None:
    """Also the branch that is followed, and one that cannot begin; the others run to their ends."""
    found: list[Resampled] = []
    begun = list[Policy]()

    async def first_is_long(policy: Policy) -> float:
        begun.append(policy)
        policy.reward_so_far = -3.0
        if len(begun) == 2:
            await policy.reply("x" * 400)
        for _ in range(50 if len(begun) == 1 else 3):
            await policy.reply("go on")
        return 1.0

    async def episode(item: Any, policy: Policy) -> Any:
        policy.read("begin")
        found.append(await resampled(policy, first_is_long, width=4, tokens=tokens))
        return found[-1].values

    sequences = run_episode(Engine(), template, episode, limit=200)
    (result,) = found
    assert list(result.values.values())[:4] == [-3.0, -3.0, 1.0, 1.0]
    assert [sequence.finish_reason == "context" for sequence in sequences[:2]] == [True, False]
