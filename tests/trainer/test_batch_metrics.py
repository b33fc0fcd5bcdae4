"""The metrics of a batch against plain NumPy over its episodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from monarch_rl.algorithms.advantages import dr_grpo, grpo
from monarch_rl.algorithms.functions import Columns
from monarch_rl.algorithms.group_view import GroupView
from monarch_rl.episode.episode import Fork
from monarch_rl.episode.shard import PackedShard
from monarch_rl.observe.registry import check_names, find
from monarch_rl.trainer.advantages import advantages_of, flat, group_views
from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.metrics import batch_metrics, reduced_metrics
from monarch_rl.trainer.objective import common_sums
from monarch_rl.trainer.token_logprobs import TokenLogprobs

EPISODE = st.tuples(
    st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0]),
    st.integers(1, 50),
    st.booleans(),
    st.dictionaries(st.sampled_from(["format", "answer"]), st.floats(-1, 1, width=32), max_size=2),
)
SEATS_AND_TURNS = st.lists(
    st.tuples(
        st.sampled_from(["", "white", "black"]),
        st.lists(st.none() | st.floats(-1, 1, width=32), max_size=3),
        st.none() | st.builds(Fork, st.just(0), st.integers(1, 3)),
    ),
    min_size=4,
    max_size=4,
)
"""Parts of the rewards of each group's episodes."""
GROUP = st.tuples(st.sampled_from(["", "spell", "sums"]), st.lists(EPISODE, min_size=1, max_size=4))
SUCCESS = {"": None, "spell": 1.0, "sums": 0.5}
"""The ``success_reward`` of each task."""
Group = tuple[str, list[tuple[float, int, bool, dict[str, float]]]]


def shard(groups: list[Group], lag_counts: list[int]) -> PackedShard:
    """A rank's shard without any episode: the metrics read only the outcomes of all groups."""
    return PackedShard(
        version=3,
        rewards=[np.asarray([reward for reward, *_ in episodes], np.float32) for _, episodes in groups],
        places=[[]],
        data=b"",
        trainable_tokens=sum(lag_counts),
        lag_counts=np.asarray(lag_counts, np.int64),
        oldest=None,
        lengths=[np.asarray([length for _, length, _, _ in episodes], np.int32) for _, episodes in groups],
        cut=[np.asarray([cut for _, _, cut, _ in episodes], bool) for _, episodes in groups],
        items=list(range(len(groups))),
        seats=[[""] * len(episodes) for _, episodes in groups],
        plays=[np.arange(len(episodes), dtype=np.int32) for _, episodes in groups],
        forks=[[None] * len(episodes) for _, episodes in groups],
        turn_lengths=[[[length] for _, length, _, _ in episodes] for _, episodes in groups],
        turn_rewards=[[[None]] * len(episodes) for _, episodes in groups],
        tasks=[task for task, _ in groups],
        success_rewards=[SUCCESS[task] for task, _ in groups],
        parts=[[parts for *_, parts in episodes] for _, episodes in groups],
    )


def test_the_share_of_replayed_groups_is_reported_only_with_replay() -> None:
    one, advantages = shard([("", [(1.0, 3, False, {})])] * 4, [12]), [np.zeros(1)] * 4
    assert "buffer/replayed_share" not in batch_metrics(one, advantages)
    one.uses = [0, 2, 1, 0]
    assert batch_metrics(one, advantages)["buffer/replayed_share"] == 0.5


@given(st.floats(-(2.0**127), 2.0**127, width=32), st.integers(1, 16))
def test_equal_rewards_have_a_deviation_of_exactly_0(reward: float, size: int) -> None:
    one = shard([("", [(reward, 3, False, {})] * size)], [12])
    values = batch_metrics(one, [np.full(size, reward, np.float32)])
    assert values["reward/mean"] == reward and values["reward/std"] == values["advantage/std"] == 0


@given(st.lists(GROUP, min_size=1, max_size=4), SEATS_AND_TURNS)
def test_seats_and_turns_against_plain_numpy(
    groups: list[Group], seats_and_turns: list[tuple[str, list[float | None], Fork | None]]
) -> None:
    found = shard(groups, [1])
    found.seats = [[seat for seat, _, _ in seats_and_turns[: len(episodes)]] for _, episodes in groups]
    found.turn_rewards = [[turns for _, turns, _ in seats_and_turns[: len(episodes)]] for _, episodes in groups]
    found.forks = [[fork for *_, fork in seats_and_turns[: len(episodes)]] for _, episodes in groups]
    values = batch_metrics(found, [np.zeros(len(episodes)) for _, episodes in groups])
    check_names(list(values))
    sequences = [
        (task, seat, turns[fork.turns :] if fork else turns, reward, length, parts)
        for task, episodes in groups
        for (reward, length, _, parts), (seat, turns, fork) in zip(episodes, seats_and_turns, strict=False)
    ]
    for task, seat in itertools.product(("spell", "sums"), ("", "white", "black")):
        here = [one for one in sequences if one[0] == task and seat in ("", one[1])]
        name = f"{task}/{seat}" if seat else task
        for metric, expected in (
            (f"turn_reward/{name}", [reward for _, _, turns, *_ in here for reward in turns if reward is not None]),
            (f"reward/{name}/mean", [reward for *_, reward, _, _ in here]),
            (f"length/{name}/mean", [length for *_, length, _ in here]),
            (f"reward/{name}/format", [parts["format"] for *_, parts in here if "format" in parts]),
        ):
            assert values.get(metric) == (pytest.approx(np.mean(expected), abs=1e-6) if expected else None)


@given(st.lists(GROUP, min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=3))
def test_against_plain_numpy(groups: list[Group], lag_counts: list[int]) -> None:
    found = shard(groups, lag_counts)
    advantages = flat(advantages_of(group_views(found), grpo))
    values = batch_metrics(found, advantages)
    check_names(list(values))
    assert all(isinstance(value, float) and np.isfinite(value) for value in values.values())
    episodes = [(task, *episode) for task, of_group in groups for episode in of_group]
    lags = [lag for lag, count in enumerate(lag_counts) for _ in range(count)]
    by_group = [[reward for reward, *_ in of_group] for _, of_group in groups]
    expected = {
        "reward/mean": np.mean([reward for _, reward, *_ in episodes]),
        "reward/std": np.std([reward for _, reward, *_ in episodes]),
        "reward/equal_groups_share": np.mean([len(set(rewards)) == 1 for rewards in by_group]),
        "length/mean": np.mean([length for _, _, length, *_ in episodes]),
        "length/max": max(length for _, _, length, *_ in episodes),
        "length/cut_share": np.mean([cut for *_, cut, _ in episodes]),
        "advantage/std": np.std([value for of_group in advantages for value in of_group]),
    }
    if lags:
        expected |= {"lag/mean": np.mean(lags), "lag/max": max(lags)}
    marks = [SUCCESS[task] for task, _ in groups]
    by_mark = [(rewards, mark) for rewards, mark in zip(by_group, marks, strict=True) if mark is not None]
    if by_mark:
        expected["reward/all_right_share"] = np.mean([min(rewards) >= mark for rewards, mark in by_mark])
        expected["reward/all_wrong_share"] = np.mean([max(rewards) < mark for rewards, mark in by_mark])
    for task in {task for task, *_ in episodes} - {""}:
        expected[f"groups/{task}"] = sum(name == task for name, _ in groups)
        expected[f"reward/{task}/mean"] = np.mean([reward for name, reward, *_ in episodes if name == task])
        expected[f"length/{task}/mean"] = np.mean([length for name, _, length, *_ in episodes if name == task])
        for part in ("format", "answer"):
            scores = [parts[part] for name, *_, parts in episodes if name == task and part in parts]
            if scores:
                expected[f"reward/{task}/{part}"] = np.mean(scores)
    assert values == {name: pytest.approx(value, abs=1e-6) for name, value in expected.items()}


def test_a_worked_example() -> None:
    groups: list[Group] = [
        ("spell", [(1.0, 4, False, {"answer": 1.0, "format": 0.0}), (1.0, 8, True, {"answer": 1.0})]),
        ("spell", [(0.0, 2, False, {"answer": 0.0}), (0.0, 2, False, {"answer": 0.0})]),
        ("sums", [(1.0, 4, True, {}), (0.0, 4, False, {})]),
        ("", [(0.0, 4, False, {"answer": 9.0}), (1.0, 4, False, {})]),
    ]
    found = shard(groups, [24, 8])
    values = batch_metrics(found, flat(advantages_of(group_views(found), dr_grpo)))
    assert values == {
        "lag/mean": 0.25,
        "lag/max": 1.0,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/equal_groups_share": 0.5,
        "reward/all_right_share": pytest.approx(1 / 3),  # of the groups whose task has a success_reward
        "reward/all_wrong_share": pytest.approx(1 / 3),
        "advantage/std": pytest.approx(0.5 / np.sqrt(2)),
        "length/mean": 4.0,
        "length/max": 8.0,
        "length/cut_share": 0.25,
        "groups/spell": 2.0,
        "groups/sums": 1.0,
        "reward/spell/answer": 0.5,
        "reward/spell/format": 0.0,
        "reward/spell/mean": 0.5,
        "reward/sums/mean": 0.5,
        "length/spell/mean": 4.0,
        "length/sums/mean": 4.0,
    }
    own = {name for name in values if (metric := find(name)) is not None and metric.name == name}
    assert {name for name in values if name.count("/") == 1 and not name.startswith("groups/")} == own


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A torch.distributed world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.integers(0, 2)), max_size=6))
def test_a_mean_over_no_tokens_is_absent_and_all_others_are_those_of_numpy(
    world: None, tokens: list[tuple[float, float, int]]
) -> None:
    old, behaviour, lags = np.asarray(tokens, np.float32).reshape(-1, 3).T
    ones = torch.ones(len(tokens))
    made: dict[str, Any] = dict.fromkeys(("token_ids", "positions", "attention", "sampled_after", "targets"), ones)
    batch = MicroBatch(
        **made,
        advantages=ones,
        weights=ones,
        rows=None,
        behaviour_logprobs=torch.tensor(behaviour),
        lags=torch.tensor(lags).long(),
        sequences=ones.long(),
        num_sequences=1,
        columns=Columns({"old": torch.tensor(old)}),
    )
    sums = common_sums(TokenLogprobs(torch.tensor(old), ones, ones), batch) | {"tokens": ones.sum(), "loss": ones.sum()}
    metrics = reduced_metrics(sums, [], counts=True)
    k3 = np.expm1(old - behaviour) - (old - behaviour)
    expected = {"tokens": len(tokens), "loss": len(tokens)}
    if tokens:
        outside = np.mean(np.abs(old - behaviour) > np.log(2))
        expected |= {"mismatch_k3_all": k3.mean(), "logprob": old.mean(), "entropy": 1, "kept_mass": 1}
        expected |= {"on_policy_share": np.mean(lags == 0), "ratio_outside": outside}
    if (lags == 0).any():
        expected["mismatch_k3_on_policy"] = k3[lags == 0].mean()
    found = {name: value for name, value in metrics.items() if not name.startswith("logprob_difference")}
    assert found == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in expected.items()}
    assert ("logprob_difference_p50" in metrics) == ("mismatch_k3_on_policy" in metrics)


def test_advantages_are_computed_per_group() -> None:
    first, second = flat(advantages_of([GroupView.of([0, 1]), GroupView.of([2, 2, 5])], dr_grpo))
    assert first.tolist() == [-0.5, 0.5]
    assert second.tolist() == [-1.0, -1.0, 2.0]
