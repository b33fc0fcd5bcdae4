"""Trained episodes for inspection: samples groups of a trained batch and describes their episodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_rl.episode.episode import Fork
from monarch_rl.episode.shard import PackedShard


@dataclass(frozen=True, slots=True)
class TrainedEpisode:
    """A trained episode, still packed as the trainer rank received it."""

    step: int
    """The step that trained it."""
    group_id: int
    attempt: int
    """Attempt of the group; with ``group_id`` it identifies the worker that generated it."""
    place: int
    """Position in the group."""
    task: str
    task_index: int
    reward: float
    advantage: float | list[float] | None
    """One number, or one per sampled token; None if the episode was not trained, because a column that the advantage
    reads is not finite."""
    data: bytes
    """Packed episode, for :func:`~monarch_rl.episode.serialization.unpack_episode`."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named components of the reward."""
    seat: str = ""
    play: int = 0
    """Index of the rollout of the prompt that it belongs to."""
    fork: Fork | None = None
    """Where it branches off an earlier sequence of its rollout."""
    turn_rewards: list[float | None] = field(default_factory=list)
    """Reward of each turn alone, or None."""


def sample_groups(groups: int, limit: int, seed: str) -> list[int]:
    """``limit`` positions sampled uniformly from 0 to ``groups`` - 1, ascending; all positions if there are fewer."""
    return sorted(random.Random(seed).sample(range(groups), min(limit, groups)))


def trained_episodes(shard: PackedShard, advantages: Sequence[Any], groups: int, seed: int) -> list[TrainedEpisode]:
    """A rank's episodes of groups sampled at random from the whole batch; all ranks sample the same groups.

    Args:
        shard: the rank's shard of the batch.
        advantages: for each group of the batch and each of its episodes, a tensor or array: a scalar, or one value per
            sampled token.
        groups: number of groups to sample.
        seed: seed of the sampling; combined with the version, so that each step samples other groups.
    """
    sampled = set(sample_groups(len(shard.rewards), groups, f"rollouts {seed}/{shard.version}"))
    view, start, episodes = memoryview(shard.data), 0, []
    for group, place, nbytes in (place for places in shard.places for place in places):
        if group in sampled:
            group_id, attempt = shard.group_ids[group]
            advantage = advantages[group][place].tolist()
            episodes.append(
                TrainedEpisode(
                    shard.version + 1,
                    group_id,
                    attempt,
                    place,
                    shard.tasks[group],
                    shard.items[group],
                    float(shard.rewards[group][place]),
                    None if advantage != advantage else advantage,  # JSON has no NaN
                    bytes(view[start : start + nbytes]),
                    shard.parts[group][place],
                    shard.seats[group][place],
                    int(shard.plays[group][place]),
                    shard.forks[group][place],
                    shard.turn_rewards[group][place],
                )
            )
        start += nbytes
    return episodes
