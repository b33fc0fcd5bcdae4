"""What a batch says about learning: rewards, lengths, lags and advantages of all its groups, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from monarch_rl.episode.packed import PackedShard

FULL_REWARD, NO_REWARD = 1.0, 0.0
"""From the first one up an answer is right, from the second one down it is wrong."""


def batch_metrics(shard: PackedShard, advantages: Sequence[np.ndarray]) -> dict[str, float]:
    """The metrics of a batch by the names of ``observe/registry.py``; equal on all ranks.

    Args:
        shard: of any rank: its ``rewards``, ``lengths``, ``cut``, ``tasks`` and ``parts`` are of the whole batch.
        advantages: one float[G] per group of the batch.
    """
    lags = shard.lag_counts
    rewards, lengths = np.concatenate(shard.rewards), np.concatenate(shard.lengths)
    return {
        "lag/mean": float((lags * range(len(lags))).sum() / max(int(lags.sum()), 1)),
        "lag/max": float(max((lag for lag, count in enumerate(lags) if count), default=0)),
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "reward/equal_groups_share": float(np.mean([np.ptp(of_group) == 0 for of_group in shard.rewards])),
        "reward/all_right_share": float(np.mean([np.all(of_group >= FULL_REWARD) for of_group in shard.rewards])),
        "reward/all_wrong_share": float(np.mean([np.all(of_group <= NO_REWARD) for of_group in shard.rewards])),
        "advantage/std": float(np.std(np.concatenate(advantages))),
        "length/mean": float(np.mean(lengths)),
        "length/max": float(np.max(lengths)),
        "length/cut_share": float(np.mean(np.concatenate(shard.cut))),
    } | _task_metrics(shard)


def _task_metrics(shard: PackedShard) -> dict[str, float]:
    """Mean reward of each task, and mean of each part of its reward over the episodes that have it."""
    values: dict[str, float] = {}
    for task in dict.fromkeys(task for task in shard.tasks if task):
        groups = [group for group, name in enumerate(shard.tasks) if name == task]
        episodes = [parts for group in groups for parts in shard.parts[group]]
        for part in dict.fromkeys(name for parts in episodes for name in parts):
            values[f"reward/{task}/{part}"] = float(np.mean([parts[part] for parts in episodes if part in parts]))
        values[f"reward/{task}/mean"] = float(np.mean(np.concatenate([shard.rewards[group] for group in groups])))
    return values
