"""Results of evaluations: how they are joined, counted and sampled."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.estimates import wilson_interval
from monarch_rl.episode.episode import Episode
from monarch_rl.episode.sampling import Sampling
from monarch_rl.observe.registry import check_names
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.evaluation import EpisodeResult, Evaluation, EvaluationPlan, EvaluationSettings, run_held_out
from monarch_rl.tasks.task import Task
from tests import patience
from tests.rollout.test_statistics import failed
from tests.rollout.test_statistics import sampled as sequence


def rollout(reward: float) -> list[Episode]:
    return [sequence(reward)]


def named(episodes: Sequence[Sequence[EpisodeResult]]) -> list[tuple[str, Sequence[EpisodeResult]]]:
    return [("sums", of_item) for of_item in episodes]


MARKS = dict.fromkeys(("sums", "words"), 1.0)


def evaluated(
    plan: EvaluationPlan,
    indices: Sequence[int],
    by_item: Sequence[tuple[str, Sequence[EpisodeResult]]],
    marks: Mapping[str, float | None] = MARKS,
) -> Evaluation:
    return Evaluation.of(plan, indices, by_item, marks)


async def rewarded(item: Any, policy: Any) -> float:
    return 1.0


def test_failed_items_of_an_evaluation_count_as_0() -> None:
    episodes: list[list[EpisodeResult]] = [
        [rollout(1.0)],
        [failed("score hung", 2)],
        [rollout(0.5)],
        [rollout(1.0)],
    ]
    evaluation = evaluated(EvaluationPlan(), range(4), named(episodes))
    np.testing.assert_array_equal(evaluation.rewards, np.asarray([[1], [0], [0.5], [1]], np.float32))
    low, high = wilson_interval(0.5, 4)
    assert evaluation.metrics() == {
        "held_out/accuracy": 0.5,
        "held_out/reward": 0.625,
        "held_out/failed": 1.0,
        "held_out/left_out": 0.0,
        "held_out/without_turn": 0.0,
        "held_out/score": 2.5 / 3,
        "held_out/accuracy_low": low,
        "held_out/accuracy_high": high,
        "held_out/oldest_version": 5.0,
        "held_out/newest_version": 6.0,
    }
    assert str(evaluation) == (
        "versions 5 to 6: held-out accuracy 50.0% [15.0%, 85.0%], mean reward 0.625, 1 failed: score hung"
    )


def test_several_episodes_of_an_item_give_pass_at_k() -> None:
    plan = EvaluationPlan("hard", 4, 1.0)
    right = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    episodes = named([[rollout(float(x)) for x in of_item] for of_item in right])
    evaluation = evaluated(plan, range(3), episodes)
    values = evaluation.metrics()
    assert values["held_out/hard/accuracy"] == pytest.approx(5 / 12)
    assert values["held_out/hard/pass_at_4"] == pytest.approx(2 / 3)
    assert values["held_out/hard/pass_at_4_low"] < 2 / 3 < values["held_out/hard/pass_at_4_high"]
    other = evaluated(EvaluationPlan("", 4, 1.0, (2,)), range(3), episodes)
    assert other.metrics()["held_out/pass_at_2"] == pytest.approx((0.5 + 0 + 1) / 3)


def test_a_task_without_a_success_reward_has_no_accuracy() -> None:
    """Its failures are never better than its worst episode."""
    episodes = named([[rollout(-3.0), rollout(-1.0)], [failed("score raised KeyError", 2), rollout(-2.0)]])
    evaluation = evaluated(EvaluationPlan("", 2, 1.0), range(2), episodes, {"sums": None})
    values = evaluation.metrics()
    assert not any("accuracy" in name or "pass_at" in name for name in values) and evaluation.accuracy is None
    assert values["held_out/reward"] == pytest.approx((-3 - 1 - 3 - 2) / 4) and values["held_out/failed"] == 1
    assert "accuracy" not in str(evaluation) and "mean reward -2.250" in str(evaluation)


@pytest.mark.parametrize("mark", [-2.0, 0.0, 0.8])
def test_a_success_is_a_reward_of_at_least_the_tasks_mark(mark: float) -> None:
    episodes = named([[rollout(mark)], [rollout(np.nextafter(np.float32(mark), np.float32(-9)).item())]])
    episodes += named([[failed("score raised KeyError", 2)]])
    evaluation = evaluated(EvaluationPlan(), range(3), episodes, {"sums": mark})
    assert evaluation.metrics()["held_out/accuracy"] == pytest.approx(1 / 3), "a failure is a success, or a mark wrong"


def test_each_task_of_a_mixture_has_its_own_mark() -> None:
    items = [("sums", [rollout(0.5)]), ("words", [rollout(0.5)]), ("words", [rollout(0.9)])]

    def accuracies(**marks: float | None) -> dict[str, float]:
        values = evaluated(EvaluationPlan(), range(3), items, marks).metrics()
        return {name: value for name, value in values.items() if name.endswith("accuracy")}

    both = {"held_out/accuracy": pytest.approx(2 / 3), "held_out/sums/accuracy": 1.0, "held_out/words/accuracy": 0.5}
    assert accuracies(sums=0.5, words=0.9) == both
    assert accuracies(sums=0.5, words=None) == {"held_out/sums/accuracy": 1.0}
    text = str(evaluated(EvaluationPlan(), range(3), items, {"sums": 0.5, "words": None}))
    assert "sums 100.0%" in text and "words 0.700" in text


def test_failures_of_infrastructure_are_left_out() -> None:
    away = EpisodeFailed("remote judge could not be reached", infrastructure=True)
    plan = EvaluationPlan("", 3, 1.0, (2,))
    episodes = named(
        [[rollout(1.0), away, rollout(0.0)], [away, away, rollout(1.0)], [away] * 3, [rollout(0.0), away, rollout(0.0)]]
    )
    joined = Evaluation.joined([evaluated(plan, [i], [of_item]) for i, of_item in enumerate(episodes)])
    values = joined.metrics()
    assert (values["held_out/left_out"], values["held_out/failed"]) == (7, 0)
    assert values["held_out/accuracy"] == pytest.approx((0.5 + 1 + 0) / 3)  # of the items that have an episode
    assert values["held_out/reward"] == pytest.approx(2 / 5)
    assert values["held_out/pass_at_2"] == pytest.approx((1 + 0) / 2)  # of those that have two
    assert "7 of these left out" in str(joined)
    nothing = evaluated(plan, [0], named([[away] * 3]))
    assert not {"held_out/accuracy", "held_out/reward", "held_out/pass_at_2"} & nothing.metrics().keys()
    assert "nan" not in str(nothing)


def test_results_of_several_workers_are_reported_per_task() -> None:
    plan = EvaluationPlan("easy")
    first = evaluated(
        plan, [0, 2, 4], [("sums", [rollout(1.0)]), ("words", [failed("score hung", 2)]), ("sums", [rollout(0.5)])]
    )
    second = evaluated(plan, [3, 1], [("words", [failed("score raised KeyError", 2)]), ("words", [rollout(0.25)])])
    values = Evaluation.joined([first, second]).metrics()
    expected = {
        "held_out/easy/accuracy": 0.2,
        "held_out/easy/reward": pytest.approx(0.35),
        "held_out/easy/failed": 2.0,
        "held_out/easy/sums/accuracy": 0.5,
        "held_out/easy/sums/reward": 0.75,
        "held_out/easy/sums/failed": 0.0,
        "held_out/easy/sums/score": 0.75,
        "held_out/easy/words/accuracy": 0.0,
        "held_out/easy/words/reward": pytest.approx(0.25 / 3),
        "held_out/easy/words/failed": 2.0,
        "held_out/easy/words/score": 0.25,
    }
    assert {name: values[name] for name in expected} == expected
    rest = values.keys() - expected.keys()
    endings = ("_low", "_high", "_version", "left_out", "without_turn")
    assert all(name.endswith(endings) for name in rest) and "held_out/easy/score" not in values


def test_seats_are_reported_separately_and_their_mean_is_the_episodes_reward() -> None:
    def game(white: float, black: float) -> list[Episode]:
        return [replace(sequence(white), seat="white"), replace(sequence(black), seat="black")]

    parts = [evaluated(EvaluationPlan(), [i], named([[game(*of)]])) for i, of in enumerate([(1, -1), (0.5, 0.25)])]
    joined = Evaluation.joined([*parts, evaluated(EvaluationPlan(), [2], named([[failed("score hung", 2)]]))])
    np.testing.assert_array_equal(joined.rewards, np.asarray([[0], [0.375], [0]], np.float32))
    values = joined.metrics()
    assert (values["held_out/seat/white"], values["held_out/seat/black"]) == (0.75, -0.375)
    assert (values["held_out/seat/white/score"], values["held_out/seat/black/score"]) == (0.75, -0.375)
    assert (values["held_out/score"], values["held_out/failed"]) == (0.1875, 1.0)


def test_seats_with_the_same_name_are_reported_per_task() -> None:
    def game(first: float, second: float) -> list[Episode]:
        return [replace(sequence(first), seat="first"), replace(sequence(second), seat="second")]

    plan = EvaluationPlan("even")
    halves = [
        evaluated(plan, [0, 1], [("nim", [game(1, -1)]), ("chess", [game(0, 0)])]),
        evaluated(plan, [2, 3], [("chess", [game(-0.5, 0.5)]), ("sums", [rollout(1.0)])]),
    ]
    values = Evaluation.joined(halves).metrics()
    check_names(list(values))
    assert {name: value for name, value in values.items() if "/seat/" in name} == {
        "held_out/even/nim/seat/first": 1.0,
        "held_out/even/nim/seat/first/score": 1.0,
        "held_out/even/nim/seat/second": -1.0,
        "held_out/even/nim/seat/second/score": -1.0,
        "held_out/even/chess/seat/first": -0.25,
        "held_out/even/chess/seat/first/score": -0.25,
        "held_out/even/chess/seat/second": 0.25,
        "held_out/even/chess/seat/second/score": 0.25,
    }


@given(st.permutations(range(6)), st.integers(1, 5))
def test_results_do_not_depend_on_which_worker_ran_which_items(order: list[int], split: int) -> None:
    """Whichever items a worker ran, in whatever order."""
    plan = EvaluationPlan("", 2, 1.0)

    def result(indices: list[int]) -> Evaluation:
        return evaluated(plan, indices, named([[rollout(i / 10), rollout(i / 20)] for i in indices]))

    joined, whole = Evaluation.joined([result(order[:split]), result(order[split:])]), result(list(range(6)))
    assert joined.items == whole.items
    np.testing.assert_array_equal(joined.rewards, whole.rewards)
    assert joined.metrics() == whole.metrics() and joined.versions == (5, 6)


def test_each_episode_has_its_own_seed_and_the_same_one_each_time() -> None:
    requested: list[tuple[int, Sampling]] = []
    task = Task(int, rewarded, {"held_out": [0, 10, 20]})

    async def run_episode(task: Task, item: Any, index: int, sampling: Sampling, group: int) -> EpisodeResult:
        assert item == 10 * index and group == -1 - index
        requested.append((index, sampling))
        return rollout(1.0)

    def seeds(plan: EvaluationPlan) -> list[tuple[int, int | None]]:
        requested.clear()
        evaluating = run_held_out(
            plan, task, [2, 0], run_episode, max_new_tokens=8, stops=(1,), item_deadline_s=60, max_concurrent=2
        )
        assert [item.index for item in asyncio.run(evaluating).items] == [0, 2]
        assert {sampling.temperature for _, sampling in requested} == {plan.temperature}
        return sorted((index, sampling.seed) for index, sampling in requested if sampling.seed is not None)

    first = seeds(EvaluationPlan("", 3, 0.7, seed=4))
    assert len({seed for _, seed in first}) == 6 and seeds(EvaluationPlan("", 3, 0.7, seed=4)) == first
    assert not {seed for _, seed in seeds(EvaluationPlan("", 3, 0.7, seed=5))} & {seed for _, seed in first}
    assert seeds(EvaluationPlan()) == []


def test_items_that_raise_or_are_late_fail_only_their_episodes() -> None:
    let_go = threading.Event()

    class Items(list[int]):
        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            if index == 1:
                patience.happened(let_go, "the episode of the last item")
            return [0, 10, 20, 30][index]

    async def run_episode(task: Task, item: Any, index: int, sampling: Sampling, group: int) -> EpisodeResult:
        if index == 3:
            let_go.set()
        return rollout(1.0)

    task = Task(int, rewarded, {"held_out": Items(range(5))})
    evaluating = run_held_out(
        EvaluationPlan(),
        task,
        [0, 1, 2, 3, 4],
        run_episode,
        max_new_tokens=8,
        stops=(1,),
        item_deadline_s=1.0,
        max_concurrent=1,
    )
    result = asyncio.run(evaluating)
    assert result.rewards.tolist() == [[1], [0], [1], [1], [0]]
    assert result.failed == {"item took over 1 s to be made": 1, "item raised IndexError when it was made": 1}
    report = result.first["item took over 1 s to be made"].report
    assert "item 1 " in report and "--rollout.episode-deadline-s" in report


def test_each_result_is_reported_with_its_sample_also_if_the_item_cannot_be_made() -> None:
    calls = Counter[int]()

    class Items(list[int]):
        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            calls[index] += 1
            if calls[index] == 1 or index == 1:
                raise OSError("the file server is away")
            return 10 * index

    plan, seeds = EvaluationPlan("", 3, 1.0, seed=4), dict[tuple[int, int], Any]()
    reported: dict[tuple[int, int], tuple[Any, EpisodeResult]] = {}

    async def run_episode(task: Task, item: Any, index: int, sampling: Sampling, group: int) -> EpisodeResult:
        result = rollout(1.0)
        seeds[id(result), index] = sampling.seed
        return result

    async def ended(result: EpisodeResult, task: Task, item: Any, index: int, sample: int) -> None:
        assert task.name == "sums" and (index, sample) not in reported
        reported[index, sample] = item, result

    task = Task(int, rewarded, {"held_out": Items(range(3))}, "sums")
    evaluating = run_held_out(
        plan,
        task,
        [0, 1, 2],
        run_episode,
        max_new_tokens=8,
        stops=(1,),
        item_deadline_s=60,
        max_concurrent=1,
        ended=ended,
    )
    evaluation = asyncio.run(evaluating)
    assert set(reported) == {(index, sample) for index in range(3) for sample in range(3)}
    for (index, sample), (item, result) in reported.items():
        if isinstance(result, EpisodeFailed):
            assert item is None and (index == 1 or sample == 0)
        else:
            assert item == 10 * index and index != 1 and sample > 0
            assert seeds[id(result), index] == plan.sampling(index, sample, 8, (1,)).seed
    assert evaluation.failed == {"item raised OSError when it was made": 5}


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="greedy"):
        EvaluationSettings(samples=2)
    with pytest.raises(ValueError, match=r"evaluation\.pass-at 3 .*evaluation\.samples 2"):
        EvaluationSettings(samples=2, temperature=1.0, pass_at=(2, 3))
    assert [EvaluationSettings(share=0.25).max_concurrent(64, workers) for workers in (1, 2, 100)] == [16, 8, 1]
