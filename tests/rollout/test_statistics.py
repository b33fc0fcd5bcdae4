from __future__ import annotations

import json

import numpy as np

from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.episode.sampling import Completion
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.evaluation import Evaluation
from monarch_rl.rollout.statistics import MAX_SAMPLES, Statistics

ITEM = {"question": "1 + 2 =", "answer": "3", "scorer": len}


def played(reward: float) -> Episode:
    """One turn of three tokens, of versions 5 and 6."""
    completion = Completion(np.asarray([7, 8, 9]), np.full(3, -0.5), np.asarray([5, 6, 6]), "stop")
    return Episode([Turn.from_completion([1, 2], completion)], reward, "stop", parts={"score": reward})


def failed(reason: str, tokens: int) -> EpisodeFailed:
    failure = EpisodeFailed(reason)
    failure.tokens = tokens
    return failure


def test_groups_and_episodes_are_counted() -> None:
    statistics = Statistics("rollout worker 3")
    with statistics.group_waiting(), statistics.group_playing(), statistics.group_playing():
        during = statistics.stats()
    statistics.add_episodes(0, 4, ITEM, [played(1.0), failed("score hung", 2), played(0.0), failed("score hung", 3)])
    statistics.add_put()
    statistics.add_dropped()
    after = statistics.stats()
    assert (during.groups_waiting, during.groups_playing, during.failed) == (1, 2, {})  # a copy
    assert (after.worker, after.groups_waiting, after.groups_playing) == ("rollout worker 3", 0, 0)
    assert (after.groups_put, after.groups_dropped) == (1, 1)
    assert (after.episodes, after.tokens) == (2, 6)
    assert (after.failed, after.failed_tokens) == ({"score hung": 2}, 5)


def test_samples_are_the_newest_episodes_once() -> None:
    statistics = Statistics("rollout worker 0")
    statistics.add_episodes(0, 4, ITEM, [played(0.0)] * MAX_SAMPLES)
    statistics.add_episodes(1, 4, ITEM, [failed("score hung", 1), played(0.25)])
    rows = [sample.row(str, repr) for sample in statistics.take_samples(2)]
    assert [row["group"] for row in rows] == [0, 1]
    assert json.loads(json.dumps(rows[1])) == {
        "group": 1,
        "task_index": 4,
        "item": {"question": "1 + 2 =", "answer": "3", "scorer": "<built-in function len>"},
        "prompt": "[1, 2]",
        "turns": ["[7, 8, 9]"],
        "reward": 0.25,
        "parts": {"score": 0.25},
        "info": {},
        "finish_reason": "stop",
        "tokens": 3,
        "versions": [5, 6],
    }
    assert statistics.take_samples(2) == []


def test_failed_items_of_an_evaluation_count_as_0() -> None:
    evaluation = Evaluation.of([played(1.0), failed("score hung", 2), played(0.5), played(1.0)])
    np.testing.assert_array_equal(evaluation.rewards, np.asarray([1, 0, 0.5, 1], np.float32))
    assert evaluation.metrics() == {"held_out/accuracy": 0.5, "held_out/reward": 0.625, "held_out/failed": 1.0}
    assert str(evaluation) == "held-out accuracy 50.0%, mean reward 0.625, 1 failed: score hung"
