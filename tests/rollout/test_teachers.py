"""Stages over frozen models, on synthetic groups: the requests to the model, and the resulting columns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from monarch_rl.episode.episode import Fork
from monarch_rl.episode.sampling import TopLogprobs
from monarch_rl.episode.serialization import deserialize_group, serialize_group
from monarch_rl.errors import FrozenRefused
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout import frozen
from monarch_rl.rollout.frozen import FrozenModel, connect_frozen_models
from monarch_rl.rollout.stages import Stage, StageFailed, columns_filled, columns_for_training
from monarch_rl.rollout.teachers import reference, teacher
from tests.rollout.test_stages import made, run


class Engine:
    """Its log-prob of a token is minus its place, divided by the temperature; records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, float]] = []
        self.logprobs = SimpleNamespace(call_one=self._logprobs)
        self.top_logprobs = SimpleNamespace(call_one=self._top_logprobs)

    async def call(self, group: int, what: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
        return await call(self)

    async def _logprobs(self, ids: list[int], start: int, temperature: float) -> np.ndarray:
        self.asked.append((ids, start, temperature))
        return -np.arange(start, len(ids), dtype=np.float32) / temperature

    async def _top_logprobs(self, ids: list[int], k: int, start: int, temperature: float) -> TopLogprobs:
        given = await self._logprobs(ids, start, temperature)
        return TopLogprobs(
            np.tile(2**24 - 1 - np.arange(k, dtype=np.int32), (len(given), 1)),
            given[:, None] - np.arange(k, dtype=np.float32),
            given,
        )


@pytest.fixture(autouse=True)
def no_engines() -> Iterator[None]:
    yield
    frozen._connected.clear()


@pytest.fixture
def large(model: str) -> FrozenModel:
    return FrozenModel("large", model, "large-1", 64, request_deadline_s=100.0, temperature=0.5)


def asked(large: FrozenModel, *stages: Stage) -> tuple[Any, list[tuple[list[int], int, float]], StageFailed | None]:
    """A group after the stages, the requests to the engine, and why the group was dropped."""
    engine, group = Engine(), made()
    asyncio.run(connect_frozen_models([(large, engine)]))  # type: ignore[list-item]
    (failed,), times = run(list(stages), group)
    assert [name for name, _, _ in times] == [stage.name for stage in stages][: len(times)]
    return group, engine.asked, failed


def test_every_sampled_token_gets_its_log_prob_given_the_policys_context(large: FrozenModel) -> None:
    """Two episodes of two turns: one request each, from the first sampled token on, at the rollouts' temperature."""
    stages = [reference(large), teacher(large)]
    assert columns_filled(stages) == {"reference": "reference", "teacher": "teacher"}
    assert all(stage.deadline_s > large.request_deadline_s for stage in stages), "the request's own error comes first"
    group, requests, failed = asked(large, *stages)
    assert failed is None
    for episode in group.episodes:
        ids, first = episode.token_ids.tolist(), int(np.flatnonzero(episode.trainable)[0])
        assert requests.count((ids, first, 0.5)) == 2
        expected = np.where(episode.trainable, -2.0 * np.arange(len(ids)), 0.0)
        assert episode.column("teacher").tolist() == episode.column("reference").tolist() == expected.tolist()
        assert not episode.trainable[first:].all(), "the prompt of the second turn is left out"


def test_a_teacher_may_read_another_prompt_and_judges_the_same_tokens(large: FrozenModel, model: str) -> None:
    """Privileged context: the solution of the item, which the policy has not seen."""
    template = ChatTemplate(model)
    group, requests, failed = asked(
        large, teacher(large, lambda item, episode: f"{item} is solved by {episode.reward:g}. ")
    )
    assert failed is None
    for number, episode in enumerate(group.episodes):
        ids, first = episode.token_ids, int(np.flatnonzero(episode.trainable)[0])
        read = template.tokenizer.encode(f"0 is solved by {number}. ", add_special_tokens=False)
        (request,) = [request for request in requests if request[0][: len(read)] == read]
        assert request == ([*read, *ids[first:].tolist()], len(read), 0.5)
        place = len(read) - first + np.arange(len(ids))
        assert episode.column("teacher").tolist() == np.where(episode.trainable, -2.0 * place, 0.0).tolist()


def test_the_most_likely_tokens_fill_their_own_columns(large: FrozenModel) -> None:
    """Ids are exact for any vocabulary; the sampled token's log-prob comes from the same request."""
    stage = teacher(large, top=2)
    assert stage.fills == ("teacher", "teacher_id_0", "teacher_id_1", "teacher_logprob_0", "teacher_logprob_1")
    group, requests, failed = asked(large, stage)
    assert failed is None and len(requests) == len(group.episodes)
    for episode in deserialize_group(serialize_group(group)).episodes:
        sampled = episode.trainable
        for i in range(2):
            assert (episode.column(f"teacher_id_{i}")[sampled] == 2**24 - 1 - i).all()
            assert (episode.column(f"teacher_logprob_{i}") == episode.column("teacher") - i * sampled).all()


def test_a_branch_has_no_other_prompt_and_a_sequence_without_samples_sends_no_request(large: FrozenModel) -> None:
    engine, group = Engine(), made()
    asyncio.run(connect_frozen_models([(large, engine)]))  # type: ignore[list-item]
    for turn in group.episodes[1].turns:
        turn.trainable[:] = False
    (failed,), _ = run([teacher(large)], group)
    assert failed is None and len(engine.asked) == 1 and not group.episodes[1].column("teacher").any()
    group = made()
    group.episodes[1].fork = Fork(0, 1)
    (failed,), _ = run([teacher(large, lambda item, episode: "x")], group)
    assert failed is not None and failed.failure is not None
    assert "cannot be used for a forked branch" in failed.failure.report


def test_top_tokens_of_a_teacher_are_limited_to_the_policys_ids(large: FrozenModel) -> None:
    """The most likely ids of the policy, in order, even if the engine must be asked for more."""
    group, requests, failed = asked(large, teacher(replace(large, policy_ids=2**24 - 3), top=2))
    assert failed is None and len(requests) == 3 * len(group.episodes), "for 2, 4 and 8"
    for episode in group.episodes:
        sampled = episode.trainable
        for i in range(2):
            assert (episode.column(f"teacher_id_{i}")[sampled] == 2**24 - 4 - i).all()
            assert (episode.column(f"teacher_logprob_{i}") == episode.column("teacher") - (3 + i) * sampled).all()


def test_a_model_with_incomparable_log_probs_is_refused_before_the_start(large: FrozenModel) -> None:
    """When the recipe makes the stage, before anything is spawned."""
    with pytest.raises(FrozenRefused, match="3 tokens differ"):
        teacher(replace(large, foreign="3 tokens differ"))
    with pytest.raises(FrozenRefused, match="reward head"):
        teacher(replace(large, labels=1))
    with pytest.raises(FrozenRefused, match=r"rollout\.top-k.*'reference'"):
        reference(replace(large, rollouts_truncated=True))


def test_columns_of_ready_made_stages_are_for_training_unless_another_stage_may_read_them(large: FrozenModel) -> None:
    own = Stage(run, name="own", fills=("mine",))  # type: ignore[arg-type]
    stages = [reference(large), teacher(large, top=1)]
    columns = ["reference", "teacher", "teacher_id_0", "teacher_logprob_0"]
    assert columns_for_training(stages) == columns_for_training([own, *stages]) == columns
    assert columns_for_training([stages[0], own, stages[1]]) == columns[1:]
    assert columns_for_training([*stages, own]) == columns_for_training([]) == []
