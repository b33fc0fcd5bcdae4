"""Episodes of a batch that was trained, to look at: which groups are drawn, and what is known of their episodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_rl.episode.episode import Fork
from monarch_rl.episode.shard import PackedShard


@dataclass(frozen=True, slots=True)
class TrainedEpisode:
    """An episode as a trainer rank got it, still packed."""

    step: int
    """The optimiser step that trained it."""
    group_id: int
    attempt: int
    """Of the group; with ``group_id`` it identifies who played it."""
    place: int
    """Position in the group."""
    task: str
    task_index: int
    reward: float
    advantage: float | list[float] | None
    """One number, or one for each token that it drew; None is not trained, because a column that it reads is not
    finite."""
    data: bytes
    """See :func:`~monarch_rl.episode.serialization.unpack_episode`."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    seat: str = ""
    play: int = 0
    """Which play of the item it belongs to."""
    fork: Fork | None = None
    """What it shares with an earlier sequence of its play."""
    turn_rewards: list[float | None] = field(default_factory=list)
    """Of each turn: what it alone was given; None is nothing."""


def sample_groups(groups: int, limit: int, seed: str) -> list[int]:
    """``limit`` of the positions 0 to ``groups`` - 1, all equally likely, ascending; all of them if there are fewer."""
    return sorted(random.Random(seed).sample(range(groups), min(limit, groups)))


def trained_episodes(shard: PackedShard, advantages: Sequence[Any], groups: int, seed: int) -> list[TrainedEpisode]:
    """A rank's episodes of groups that are drawn at random from the whole batch; all ranks draw the same groups.

    Args:
        advantages: for each group of the batch and each of its episodes a tensor or array: a scalar, or one for each
            token that it drew.
        groups: how many are drawn.
    """
    drawn = set(sample_groups(len(shard.rewards), groups, f"rollouts {seed}/{shard.version}"))
    view, start, episodes = memoryview(shard.data), 0, []
    for group, place, nbytes in (place for places in shard.places for place in places):
        if group in drawn:
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
                    None if advantage != advantage else advantage,  # NaN, which JSON has not
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
