from __future__ import annotations

import numpy as np

from monarch_rl.episode.episode import Episode, Turn
from monarch_rl.episode.sampling import Completion
from monarch_rl.rollout.episode_failed import EpisodeFailed
from monarch_rl.rollout.statistics import Statistics


def sampled(reward: float) -> Episode:
    """One turn of three tokens, of versions 5 and 6."""
    completion = Completion(np.asarray([7, 8, 9]), np.full(3, -0.5), np.asarray([5, 6, 6]), "stop")
    return Episode([Turn.from_completion([1, 2], completion)], reward, "stop", parts={"score": reward})


def failed(reason: str, tokens: int) -> EpisodeFailed:
    failure = EpisodeFailed(reason)
    failure.tokens = tokens
    return failure


def test_groups_and_episodes_are_counted() -> None:
    statistics = Statistics("rollout worker 3")
    with statistics.group_waiting(), statistics.group_running(), statistics.group_running():
        during = statistics.stats()
    statistics.add_episodes([[sampled(1.0)], failed("score hung", 2), [sampled(0.0)], failed("score hung", 3)])
    statistics.add_submitted()
    statistics.add_dropped()
    after = statistics.stats()
    assert (during.groups_waiting, during.groups_playing, during.failed) == (1, 2, {})  # a copy
    assert (after.worker, after.groups_waiting, after.groups_playing) == ("rollout worker 3", 0, 0)
    assert (after.groups_put, after.groups_dropped) == (1, 1)
    assert (after.episodes, after.tokens) == (2, 6)
    assert (after.failed, after.failed_tokens) == ({"score hung": 2}, 5)
