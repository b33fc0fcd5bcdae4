"""Mixtures: the task and the item of each group, and whose episode runs it."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.buffer.core import BufferCore
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.admission_steps import AdmissionSteps
from monarch_rl.tasks.mixture import BLOCK, Mixture, Schedule, apportioned
from monarch_rl.tasks.questions import Questions
from monarch_rl.tasks.task import Policy, Task
from tests.buffer.helpers import packed

WEIGHTS = st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(lambda weights: sum(weights) > 0)


def questions(name: str, size: int, held_out: int = 0) -> Questions:
    rows = [{"question": f"{name} {index}"} for index in range(size)]
    return Questions(rows, lambda row, answer: float(answer == row["question"]), name=name, held_out=held_out)


def named(name: str, **more: Any) -> Task:
    async def episode(item: Any, policy: Policy) -> float:
        return float(f"{name} runs {item}" == policy)  # type: ignore[comparison-overlap]

    return Task(lambda cursor: cursor, episode, name=name, **more)


@given(weights=WEIGHTS, block=st.integers(1, 70), seed=st.integers(0, 3), blocks=st.integers(1, 40))
def test_shares_follow_the_weights(weights: list[float], block: int, seed: int, blocks: int) -> None:
    schedule, steps, total = Schedule(tuple(weights), block, seed), AdmissionSteps(block), sum(weights)
    counts = Counter[int]()
    for number in range(blocks):
        counts.update(schedule.place(cursor, steps)[0] for cursor in range(number * block, (number + 1) * block))
        for task, weight in enumerate(weights):
            due = (number + 1) * block * weight / total
            assert abs(counts[task] - due) <= 1 + math.log(len(weights)) + 1e-6  # a group or two, after any block
            assert weight or not counts[task]


@given(
    weights=WEIGHTS,
    block=st.integers(1, 40),
    seed=st.integers(0, 3),
    varying=st.booleans(),
    behind=st.lists(st.integers(-1, 3), max_size=200),
)
@settings(max_examples=30)
def test_each_task_gets_all_of_its_items_in_order(
    weights: list[float], block: int, seed: int, varying: bool, behind: list[int]
) -> None:
    def changing(weight: float) -> Callable[[int], float]:
        return lambda step: weight * (1.5 + math.sin(step))

    given_weights = tuple(map(changing, weights)) if varying else tuple(weights)
    schedule, steps = Schedule(given_weights, block, seed), AdmissionSteps(block)
    for number, dropped in enumerate(behind):
        steps = steps.admitted(number * block, max(0, number - dropped))
    places = [schedule.place(cursor, steps) for cursor in range(400)]
    for task in range(len(weights)):
        own = [own_cursor for place, own_cursor in places if place == task]
        assert sorted(own) == list(range(len(own)))  # none is skipped or repeated
    again = cloudpickle.loads(cloudpickle.dumps(schedule))
    for cursor in random.Random(seed).sample(range(400), 40):
        assert again.place(cursor, steps) == places[cursor]  # resumed anywhere


@given(quotas=st.lists(st.floats(-1, 20), min_size=1, max_size=8), seats=st.integers(0, 100))
def test_places_are_apportioned_in_whole_numbers(quotas: list[float], seats: int) -> None:
    counts = apportioned(quotas, seats)
    assert sum(counts) == seats and min(counts) >= 0


def test_every_item_of_a_task_is_used_before_any_repeats() -> None:
    small, large = questions("small", 5, held_out=2), questions("large", 40)
    mixture = Mixture({small: 1, large: 3})
    owned = [mixture.owner_of(mixture.items(cursor)) for cursor in range(160)]
    assert Counter(task.name for task, _ in owned) == {"small": 40, "large": 120}
    for task, size in ((small, 3), (large, 40)):
        own = [item["question"] for owner, item in owned if owner is task]
        epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert len(epochs) > 1 and all(len(set(epoch)) == size for epoch in epochs)
    assert len({task.name for task, _ in owned[:BLOCK]}) == 2


def test_a_weight_may_be_a_function_of_the_step() -> None:
    easy, hard = named("easy"), named("hard")
    mixture = Mixture({easy: lambda step: 4 - step, hard: lambda step: step}, groups_per_step=8)
    steps = [Counter(mixture.owner_of(mixture.items(8 * step + i))[0].name for i in range(8)) for step in range(7)]
    assert [step["hard"] for step in steps] == [0, 2, 4, 6, 8, 8, 8]  # below 0 counts as 0
    travelled = cloudpickle.loads(cloudpickle.dumps(mixture))
    assert [travelled.items(cursor) for cursor in range(56)] == [mixture.items(cursor) for cursor in range(56)]


def test_a_curriculum_follows_the_run_where_groups_are_dropped() -> None:
    """Half of all groups are dropped, so the run is at step 4 when 8 x 8 groups were admitted."""
    easy, hard = named("easy"), named("hard")
    curriculum = Mixture({easy: lambda step: 4 - step, hard: lambda step: step}, groups_per_step=8)
    buffer, seen = BufferCore(8, BufferSettings(0, drop_equal_rewards=True)), dict[int, Counter[str]]()
    for version in range(6):
        drawn, kept = seen.setdefault(version, Counter()), 0
        while kept < 8:
            ticket = buffer.admit()
            assert ticket is not None
            travelled = cloudpickle.loads(cloudpickle.dumps(ticket))
            owner, own = curriculum.owner_of(curriculum.item(ticket.task_cursor, travelled.steps))
            drawn[owner.name] += 1
            kept += buffer.submit(packed(ticket.group_id, [version], [version], equal=ticket.group_id % 2 == 0))
        assert buffer.take(version) is not None
        buffer.trained(version + 1)
        buffer.published(version + 1)
    assert [(drawn["easy"], drawn["hard"]) for drawn in seen.values()] == [
        (16, 0),
        (12, 4),
        (8, 8),
        (4, 12),
        (0, 16),
        (0, 16),
    ]


def test_each_item_runs_the_episode_of_its_own_task() -> None:
    inner = Mixture({named("a"): 1, named("b", full_context_reward=0.5): 1}, name="inner")
    mixture = Mixture({inner: 1, named("c"): 1})

    async def run(item: Any) -> tuple[str, Any]:
        task, own = mixture.owner_of(item)
        assert await mixture.episode(item, f"{task.name} runs {own}") == 1.0
        return task.name, task.full_context_reward

    async def run_all() -> set[tuple[str, Any]]:
        return {await run(mixture.items(cursor)) for cursor in range(64)}

    assert asyncio.run(run_all()) == {("a", 0.0), ("b", 0.5), ("c", 0.0)}

    async def other(item: Any, policy: Policy) -> float:
        return 7.0

    task, own = mixture.with_episode(other).owner_of(mixture.items(0))
    assert task.episode is other and own == mixture.owner_of(mixture.items(0))[1]


def test_held_out_sets_of_all_tasks_are_named_and_the_first_one_mixes_them() -> None:
    named_sets = {"easy": [{"question": "e"}], "hard": [{"question": "h"}, {"question": "i"}]}
    sums = Questions([{"question": "s"}], lambda row, answer: 0.0, name="sums", held_out=named_sets)
    mixture = Mixture({sums: 1, questions("words", 12, held_out=4): 1, questions("none", 2): 1})
    assert list(mixture.held_out) == ["held_out", "sums/easy", "sums/hard", "words/held_out"]
    first = mixture.held_out_items()
    tasks = [mixture.owner_of(first[index])[0].name for index in range(len(first))]
    assert Counter(tasks) == {"sums": 1, "words": 4} and tasks.index("sums") == 2
    hard = mixture.held_out_items("sums/hard")
    assert [mixture.owner_of(hard[index])[1]["question"] for index in range(len(hard))] == ["h", "i"]
    with pytest.raises(IndexError):
        first[5]
    with pytest.raises(ValueError, match="held-out"):
        Mixture({questions("none", 2): 1}).held_out_items()


def test_all_tasks_are_checked_and_warmed_up() -> None:
    prepared: list[str] = []
    tasks = {named(name, warm_up=functools.partial(prepared.append, name), check=lambda: ["p"]): 1 for name in "ab"}
    mixture = Mixture(tasks)
    assert mixture.check() == ["p", "p"] and mixture.warm_up is not None
    mixture.warm_up()
    assert prepared == ["a", "b"]
    with pytest.raises(ValueError, match="broken: "):
        Mixture({questions("fine", 2): 1, questions("broken", 0): 1}).check()


@pytest.mark.parametrize(
    ("weights", "more", "message"),
    [
        ({}, {}, "no tasks"),
        ({"a": 1, "b": -1}, {}, "b has -1"),
        ({"a": 1, "b": math.nan}, {}, "b has nan"),
        ({"a": 1, "b": "2"}, {}, "b has '2'"),
        ({"a": None}, {}, "a has None"),
        ({"a": math.inf}, {}, "finite"),
        ({"a": 1, "b": "1"}, {}, "b has '1'"),
        ({"a": 0, "b": 0}, {}, "step 0"),
        ({"a": lambda step: 1.0}, {}, "groups_per_step="),
        ({"a": lambda step: -1.0}, {"groups_per_step": 2}, "step 0"),
        ({"a": lambda step: "x"}, {"groups_per_step": 2}, "'x' in step 0"),
        ({"a": 1}, {"groups_per_step": 0}, "groups_per_step must"),
    ],
)
def test_an_invalid_mixture_is_refused(weights: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture({named(name): weight for name, weight in weights.items()}, **more).check()


def test_a_list_of_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="mapping of tasks"):
        Mixture([named("a")])  # type: ignore[arg-type]


def test_a_curriculum_within_a_mixture_is_refused() -> None:
    inner = Mixture({named("a"): lambda step: 1.0}, groups_per_step=2, name="inner")
    with pytest.raises(ValueError, match="inner.*outer mixture"):
        Mixture({inner: 1, named("b"): 1})


def test_tasks_with_the_same_name_are_refused() -> None:
    with pytest.raises(ValueError, match="a, a: .*name="):
        Mixture({named("a"): 1, named("a"): 2})


def test_success_is_defined_by_the_reward_function_or_the_task_and_for_a_mixture_if_all_tasks_define_it() -> None:
    def marked(row: Any, answer: str) -> float:
        return 0.5

    async def episode(item: Any, policy: Any) -> float:
        return 1.0

    marked.success_reward = 0.5  # type: ignore[attr-defined]
    rows = [{"question": "1"}]
    half, whole = Questions(rows, marked, name="half"), Questions(rows, marked, name="whole", success_reward=1.0)
    assert (half.success_reward, whole.success_reward, questions("none", 3).success_reward) == (0.5, 1.0, None)
    assert (half.with_episode(episode).success_reward, half.with_episode(episode, 0.7).success_reward) == (None, 0.7)
    mixture = Mixture({half: 1, whole: 1})
    assert mixture.success_reward == 1.0 and Mixture({half: 1, questions("none", 3): 1}).success_reward is None
    for cursor in range(4):
        task, _ = mixture.owner_of(mixture.items(cursor))
        assert task.success_reward == {"half": 0.5, "whole": 1.0}[task.name]
        assert mixture.with_episode(episode, 0.7).owner_of(mixture.items(cursor))[0].success_reward == 0.7
    for wrong in (float("nan"), "0.9"):
        with pytest.raises(ValueError, match="success_reward"):
            Questions(rows, marked, success_reward=wrong)  # type: ignore[arg-type]
    # Of NumPy's types one is no JSON, and another would not be equal to the same reward in float32.
    for number in (np.float32(0.9), np.float64(0.9)):
        value: Any = number
        assert type(Questions(rows, marked, success_reward=value).success_reward) is float
