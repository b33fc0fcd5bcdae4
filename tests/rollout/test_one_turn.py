"""A group that runs as a unit gives what the task's coroutine gives with the same samples."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.episode.admission_steps import AdmissionSteps
from monarch_rl.episode.episode import Ticket
from monarch_rl.episode.failure import Failure
from monarch_rl.episode.group_bound import GroupBound
from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.episode.sampling import Completion, Sampling, SamplingMasks
from monarch_rl.errors import SamplingMaskMissing
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.rollout import scoring
from monarch_rl.rollout.scoring import Scorer
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.worker import Resources, RolloutWorker
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.deadlines import now
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.handles import LocalMesh
from monarch_rl.tasks.questions import Questions
from monarch_rl.tasks.task import Outcome, Policy, Task
from tests.patience import patiently
from tests.rollout.helpers import CHARACTERS, write_tokenizer

DIGITS = [CHARACTERS.index(digit) for digit in "0123456789"]


def reward(row: dict[str, str], answer: str) -> Any:
    """Of each kind that a reward may be, and failures of each kind that cost an episode."""
    match answer[:1]:
        case "0":
            raise KeyError(answer)
        case "1":
            return "no reward"
        case "2":
            return {"length": len(answer), "first": 2.0}
        case "3":
            return Outcome(1.0, {}, {"row": row["question"]})
    return len(answer) / 10


async def reward_in_worker(row: dict[str, str], answer: str) -> Any:
    return reward(row, answer)


@dataclass
class Rows:
    """Rows that a worker makes; they may hold what cannot be sent to a scoring process."""

    prompts: list[str]
    sendable: bool

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = {"question": self.prompts[index]}
        return row if self.sendable else row | {"held": (number for number in range(3))}


def closest(row: dict[str, str], outcomes: Sequence[Outcome]) -> list[float]:
    return [len(outcome.answer) + outcome.rollout / 100 for outcome in outcomes]


class Generators:
    """Samples from the seed alone: digits, and mostly the end token. Counts the calls of each kind."""

    def __init__(self, end: int, missing: float) -> None:
        self._end, self._missing = end, missing
        self.single, self.groups = 0, 0

    def _sample(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        noise = random.Random(f"{prompt_ids}/{sampling.seed}")
        if noise.random() < self._missing:
            raise SamplingMaskMissing("a token has none")
        n = noise.randint(1, sampling.max_new_tokens)
        ids = [noise.choice(DIGITS) for _ in range(n)]
        if ended := noise.random() < 0.7:
            ids[-1] = self._end
        masks = (
            SamplingMasks(np.full(n, 2, np.int32), np.repeat(ids, 2).astype(np.int32)) if sampling.truncated else None
        )
        routes = None
        if sampling.expert_routes_from is not None:
            rows = len(prompt_ids) + n - 1 - sampling.expert_routes_from
            routes = np.asarray([[[noise.randint(0, 7)]] for _ in range(rows)], np.uint8).reshape(rows, 1, 1)
        logprobs = np.asarray([-noise.random() for _ in range(n)], np.float32)
        versions = np.sort(np.asarray([noise.randint(3, 5) for _ in range(n)], np.int32))
        return Completion(np.asarray(ids, np.int32), logprobs, versions, "stop" if ended else "length", masks, routes)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, group: int) -> Completion:
        self.single += 1
        await asyncio.sleep(0)
        return self._sample(prompt_ids, sampling)

    async def generate_group(
        self, prompt_ids: list[int], samplings: Sequence[Sampling], group: int
    ) -> list[Completion | Exception]:
        self.groups += 1
        await asyncio.sleep(0)
        answers: list[Completion | Exception] = []
        for sampling in samplings:
            try:
                answers.append(self._sample(prompt_ids, sampling))
            except SamplingMaskMissing as error:
                answers.append(error)
        return answers


@dataclass
class Buffer:
    """Admits the tickets, and notes what becomes of them."""

    tickets: list[Ticket]
    submitted: list[bytes] = field(default_factory=list)
    dropped: list[tuple[Any, ...]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    async def admit_many(self, worker: str, limit: int, timeout_s: float) -> list[Ticket]:
        granted, self.tickets = self.tickets[:limit], self.tickets[limit:]
        return granted

    async def submit_if_room(self, *groups: bytes) -> list[bool]:
        self.submitted += groups
        return [True] * len(groups)

    async def drop(self, *dropped: Any) -> None:
        self.dropped.append(dropped)

    async def note_failure(self, failure: Failure) -> None:
        self.failures.append(failure)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all examples, because they share scoring processes."""
    with asyncio.Runner() as made:
        yield made


class CountedScorer(Scorer):
    """Counts the calls of the pool that compute several scores."""

    together = 0

    async def _together(self, calls: Any) -> tuple[list[Any], float]:
        self.together += 1
        return await super()._together(calls)


@pytest.fixture(scope="module")
def scorer() -> Iterator[CountedScorer]:
    made = CountedScorer(1, 600.0)
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("FAST_S", "TOGETHER_S", "TOGETHER_DEADLINE_S"):
            patch.setattr(scoring, limit, 600.0)
        yield made
    made.close()


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, ChatTemplate]:
    """Without and with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {chat: ChatTemplate(write_tokenizer(folder / str(chat), chat)) for chat in (False, True)}


def by_coroutine(task: Task) -> Task:
    """The same task, whose episodes a worker cannot see through."""
    one_turn: Any = task.episode

    async def episode(item: Any, policy: Policy) -> Outcome:
        outcome: Outcome = await one_turn(item, policy)
        return outcome

    return task.with_episode(episode, task.success_reward)


async def rolled_out(
    task: Task,
    tickets: list[Ticket],
    s: RolloutSettings,
    resources: Resources,
    limit: int | None,
    routes: bool,
    lost: float,
) -> tuple[Any, Generators]:
    """All that a worker sends, counts and records; and the generators."""
    generators, buffer = Generators(resources.template.stop_token_ids[0], lost), Buffer(list(tickets))
    worker: Any = RolloutWorker(s, ByValue(task), "", "worker", keep_expert_routes=routes, logged=LoggedGroups(1, 1))
    worker.connect(LocalMesh([buffer]), generators, replace(resources, task=task), limit)
    worker._scorer = resources.scorer
    for ticket in tickets:
        item, group = await worker._run_group(ticket)
        if group is not None:
            await worker._submitter.submit(ticket, item, group)
    stats = worker._statistics.stats()
    recorded = [json.loads(line) for line in worker._record.take().lines]
    for row in recorded:
        del row["began"], row["ended"], row["score_s"]
        row["item"] = "item" in row  # a generator in it is shown with its address
        if row["kind"] == "failed":  # the place is one of another coroutine, as below
            row["failure"] = row["failure"]["reason"]
    # The first failure of a kind may be another episode's, and the place is one of another coroutine.
    failures = {failure.reason for failure in buffer.failures}
    return (buffer.submitted, buffer.dropped, failures, stats, recorded), generators


@settings(max_examples=40)
@given(
    prompts=st.lists(st.text("ab{}<|end|>", max_size=6), min_size=1, max_size=3),
    system=st.sampled_from(["", "Be brief."]),
    chat=st.booleans(),
    size=st.integers(2, 5),
    sampling=st.fixed_dictionaries({"temperature": st.sampled_from([0.7, 1.0]), "top_k": st.sampled_from([0, 3])}),
    routes=st.booleans(),
    lost=st.sampled_from([0.0, 0.3]),
    limit=st.sampled_from([None, 8, 40]),
    bound=st.sampled_from([None, 100]),
    compared=st.booleans(),
    kind=st.sampled_from(["scorer", "scorer", "worker", "unpicklable"]),
    gathered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_unit_gives_the_groups_of_the_coroutine(
    runner: asyncio.Runner,
    scorer: CountedScorer,
    templates: dict[bool, ChatTemplate],
    prompts: list[str],
    system: str,
    chat: bool,
    size: int,
    sampling: dict[str, Any],
    routes: bool,
    lost: float,
    limit: int | None,
    bound: int | None,
    compared: bool,
    kind: str,
    gathered: bool,
    seed: int,
) -> None:
    """Bytes, failures, counters and rows; and the unit is used unless the coroutine is needed. The scores of
    coroutines are the same whether they are gathered or not."""
    rows: Any = Rows(prompts, kind != "unpicklable")
    rewarded = reward_in_worker if kind == "worker" else reward
    task = Questions(rows, rewarded, system=system, group_rewards=closest if compared else None)
    s = RolloutSettings(
        max_new_tokens=6, group_size=size, seed=seed, logged_groups=1, keep_sampling_mask=True, **sampling
    )
    bounds = GroupBound(None, None if bound is None else size * bound)
    tickets = [Ticket(i, i, AdmissionSteps(1), bound=bounds) for i in range(len(rows))]

    async def both() -> tuple[Any, Any]:
        resources = Resources(templates[chat], task, scorer)
        unit, generators = await rolled_out(task, tickets, s, resources, limit, routes, lost)
        known = scorer._known(reward)
        known.fast_scores, scorer.together = scoring.APART if gathered else 0, 0
        coroutine, others = await rolled_out(by_coroutine(task), tickets, s, resources, limit, routes, lost)
        assert others.groups == 0
        if kind != "scorer" or not gathered:
            assert scorer.together == 0
        elif limit is None and bound is None and not lost:
            assert scorer.together == sum(map(bool, prompts))
        if limit is None and bound is None:
            with_tokens = sum(map(bool, prompts))  # an empty prompt fails where it is made
            assert (generators.groups, generators.single) == (
                (0, size * with_tokens) if kind == "worker" else (with_tokens, 0)
            )
        return unit, coroutine

    unit, coroutine = runner.run(patiently(both()))
    for found, expected in zip(unit, coroutine, strict=True):
        assert found == expected


class Stuck:
    """Takes the place of the scoring processes: no score ever ends."""

    def __init__(self, queue: str) -> None:
        self.queue = queue

    async def score(self, *_: object) -> Outcome:
        return await asyncio.get_running_loop().create_future()

    score_each: Any = score


@pytest.mark.parametrize("queue", ["", "5 calls wait for the 2 scoring processes of the worker"])
def test_scores_that_do_not_end_fail_their_episodes_in_time(templates: dict[bool, ChatTemplate], queue: str) -> None:
    """In virtual time; with the reason that the coroutine has, which blames the processes if calls wait for them."""
    task = Questions([{"question": "a"}], reward)
    s = RolloutSettings(max_new_tokens=6, group_size=3, seed=1, logged_groups=1, episode_deadline_s=50.0)
    stuck: Any = Stuck(queue)

    async def both() -> list[Any]:
        resources, tickets = Resources(templates[True], task, stuck), [Ticket(0, 0, AdmissionSteps(1))]
        began = now()
        found = [
            (await rolled_out(one, tickets, s, resources, None, False, 0.0))[0] for one in (task, by_coroutine(task))
        ]
        assert 100.0 <= now() - began < 102.0
        return found

    unit, coroutine = run_virtual(both())
    assert unit == coroutine
    _, _, (reason,), stats, _ = unit
    assert stats.failed == {reason: 3} and ("process" in reason) == bool(queue)
    assert stats.infrastructure == (3 if queue else 0)
