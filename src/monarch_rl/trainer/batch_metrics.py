"""What a batch says about learning: rewards, lengths, lags and advantages of all its groups, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from monarch_rl.episode.episode import means_of_parts
from monarch_rl.episode.shard import BatchOutcomes

FULL_REWARD, NO_REWARD = 1.0, 0.0
"""From the first one up an answer is right, from the second one down it is wrong."""


def batch_metrics(shard: BatchOutcomes, advantages: Sequence[np.ndarray]) -> dict[str, float]:
    """The metrics of a batch by the names of ``observe/registry.py``; equal on all ranks.

    Args:
        shard: of any rank: its ``rewards``, ``lengths``, ``cut``, ``tasks`` and ``parts`` are of the whole batch.
        advantages: one float array per group of the batch: of its episodes, or of their drawn tokens; NaN is left
            out.
    """
    lags, computed = shard.lag_counts, np.concatenate(advantages)
    trained = computed[np.isfinite(computed)]
    rewards, lengths = np.concatenate(shard.rewards), np.concatenate(shard.lengths)
    return {
        "lag/mean": float((lags * range(len(lags))).sum() / max(int(lags.sum()), 1)),
        "lag/max": float(max((lag for lag, count in enumerate(lags) if count), default=0)),
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "reward/equal_groups_share": float(np.mean([np.ptp(of_group) == 0 for of_group in shard.rewards])),
        "reward/all_right_share": float(np.mean([np.all(of_group >= FULL_REWARD) for of_group in shard.rewards])),
        "reward/all_wrong_share": float(np.mean([np.all(of_group <= NO_REWARD) for of_group in shard.rewards])),
        "advantage/std": float(np.std(trained)) if len(trained) else 0.0,
        "length/mean": float(np.mean(lengths)),
        "length/max": float(np.max(lengths)),
        "length/cut_share": float(np.mean(np.concatenate(shard.cut))),
    } | (_task_metrics(shard) | _turn_metrics(shard) | _replay_metrics(shard))


def _replay_metrics(shard: BatchOutcomes) -> dict[str, float]:
    """Only where groups may be trained again."""
    return {"buffer/replayed_share": float(np.mean([uses > 0 for uses in shard.uses]))} if shard.uses else {}


def _task_metrics(shard: BatchOutcomes) -> dict[str, float]:
    """Mean reward and length of each task, and mean of each part of its reward over the episodes that have it; of each
    of its seats, too."""
    episodes: dict[str, list[tuple[float, dict[str, float], int]]] = {}
    """Reward, parts and length, by task, and by task and seat."""
    of_groups = zip(shard.tasks, shard.seats, shard.rewards, shard.parts, shard.lengths, strict=True)
    for task, seats, rewards, parts, lengths in of_groups:
        for seat, reward, of_episode, length in zip(seats, rewards, parts, lengths, strict=True):
            for name in _names(task, seat):
                episodes.setdefault(name, []).append((float(reward), of_episode, int(length)))
    values: dict[str, float] = {}
    for name, of_name in episodes.items():
        values |= {f"reward/{name}/{part}": mean for part, mean in means_of_parts([p for _, p, _ in of_name]).items()}
        values[f"reward/{name}/mean"] = float(np.mean([reward for reward, _, _ in of_name]))
        values[f"length/{name}/mean"] = float(np.mean([length for *_, length in of_name]))
    return values


def _names(task: str, seat: str) -> tuple[str, ...]:
    """Under which an episode is counted."""
    return () if not task else (task, f"{task}/{seat}") if seat else (task,)


def _turn_metrics(shard: BatchOutcomes) -> dict[str, float]:
    """Mean of what turns alone were given, by task, and by task and seat. A turn that several branches have counts
    once."""
    given: dict[str, list[float]] = {}
    for task, seats, forks, turns in zip(shard.tasks, shard.seats, shard.forks, shard.turn_rewards, strict=True):
        for seat, fork, of_episode in zip(seats, forks, turns, strict=True):
            own = of_episode[0 if fork is None else fork.turns :]
            rewards = [reward for reward in own if reward is not None]
            for name in _names(task, seat) if rewards else ():
                given.setdefault(name, []).extend(rewards)
    return {f"turn_reward/{name}": float(np.mean(rewards)) for name, rewards in given.items()}
