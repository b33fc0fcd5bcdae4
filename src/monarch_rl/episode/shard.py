"""A trainer rank's shard of a batch: the outcomes of all groups, and the episodes of the rank's own micro-batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from monarch_rl.episode.episode import Episode, Fork
from monarch_rl.episode.serialization import BEHAVIOUR, PackedGroup, unpack_episode

T = TypeVar("T")


class MiniBatch(NamedTuple):
    """Size of a mini-batch, the groups of a batch that make one optimiser step; token weights are divided by it."""

    microbatches: int
    """Micro-batches of each rank."""
    trainable_tokens: int
    """Trainable tokens of all ranks."""
    episodes: int
    """Episodes of all ranks."""


@dataclass(slots=True, kw_only=True)
class BatchOutcomes:
    """The fields of all groups of a batch that every trainer rank gets. Lists have one entry per group. ``G`` is the
    number of a group's episodes."""

    version: int
    """Version from which the update starts; lag is counted against it."""
    trainable_tokens: int
    """Trainable tokens of the whole batch, over all ranks, without tokens that are masked for their lag."""
    lag_counts: np.ndarray
    """int64[L]: these tokens by lag 0, 1, ..."""
    rewards: list[np.ndarray]
    """float32[G]."""
    lengths: list[np.ndarray] = field(default_factory=list)
    """int32[G]: number of sampled tokens of each episode, including those masked for their lag."""
    cut: list[np.ndarray] = field(default_factory=list)
    """bool[G]: whether the episode was truncated by a token limit."""
    tasks: list[str] = field(default_factory=list)
    """Name of the task."""
    items: list[int] = field(default_factory=list)
    """Position of the prompt in the stream of tasks (``Group.task_index``)."""
    group_ids: list[tuple[int, int]] = field(default_factory=list)
    """Group id and attempt."""
    parts: list[list[dict[str, float]]] = field(default_factory=list)
    """For each episode: named components of its reward."""
    seats: list[list[str]] = field(default_factory=list)
    """For each episode: its seat."""
    plays: list[np.ndarray] = field(default_factory=list)
    """int32[G]: index of the rollout that each episode belongs to."""
    forks: list[list[Fork | None]] = field(default_factory=list)
    """For each episode: where it branches off an earlier one of its rollout."""
    turn_lengths: list[list[list[int]]] = field(default_factory=list)
    """For each episode and turn: number of sampled tokens; their sum is the episode's entry in ``lengths``."""
    turn_rewards: list[list[list[float | None]]] = field(default_factory=list)
    """For each episode and turn: the turn's own reward, or None."""
    uses: list[int] = field(default_factory=list)
    """How often the group was trained before; empty if ``buffer.replay`` is 1."""
    minibatches: list[MiniBatch] = field(default_factory=list)
    """Mini-batches in order; empty means one mini-batch of all groups."""
    column_names: tuple[str, ...] = ()
    """Names of the columns that the turns of all groups have."""
    columns: dict[str, list[list[np.ndarray]]] = field(default_factory=dict)
    """Requested columns, by name: for each group and episode float32[sampled tokens]."""

    @property
    def num_episodes(self) -> int:
        """Episodes of the whole batch."""
        return sum(len(rewards) for rewards in self.rewards)


@dataclass(slots=True, kw_only=True)
class BatchShard(BatchOutcomes):
    """One trainer rank's shard of a batch."""

    microbatches: list[list[tuple[int, int, Episode]]]
    """``(group position in the batch, episode position in the group, episode)``, one mini-batch after the other. In
    each mini-batch all ranks have the same number of micro-batches."""

    def by_minibatch(self, of_microbatches: Sequence[T]) -> list[tuple[MiniBatch, list[T]]]:
        """Split a list with one value per micro-batch by mini-batch."""
        whole = MiniBatch(len(self.microbatches), self.trainable_tokens, self.num_episodes)
        values = iter(of_microbatches)
        return [(minibatch, list(islice(values, minibatch.microbatches))) for minibatch in self.minibatches or [whole]]


@dataclass(slots=True, kw_only=True)
class SupervisedShard:
    """Supervised rows (prompt and answer) that one trainer rank trains in a step."""

    share: float
    """Weight of the rows in the step's loss; 1 for a step without groups."""
    lr_factor: float
    """Factor on the step's learning rate."""
    minibatches: list[MiniBatch]
    """Mini-batches in order; ``episodes`` counts rows, ``trainable_tokens`` counts answer tokens."""
    lengths: list[list[tuple[int, int]]]
    """By micro-batch, one mini-batch after the other: for each row its number of tokens, and of prompt tokens."""
    rows: list[list[int]]
    """By micro-batch: indices of its rows among all rows of the recipe."""
    token_ids: np.ndarray
    """int32: tokens of all rows, one row after the other."""


@dataclass(slots=True, kw_only=True)
class PackedShard(BatchOutcomes):
    """One trainer rank's shard of a batch, still packed; :meth:`unpack` returns the :class:`BatchShard`."""

    places: list[list[tuple[int, int, int]]]
    """By micro-batch: ``(group position in the batch, episode position in the group, bytes)``."""
    data: bytes
    """Packed episodes of all micro-batches, one after the other."""
    oldest: int | None = None
    """Oldest version whose tokens are trained; earlier tokens are masked. None trains all."""
    supervised: SupervisedShard | None = None
    """Supervised rows that are trained alongside the groups, or in a step without groups."""

    @classmethod
    def of_rows(cls, version: int, rows: SupervisedShard) -> PackedShard:
        """The shard of a step without groups."""
        none = np.zeros(0, np.int64)
        return cls(
            version=version, trainable_tokens=0, lag_counts=none, rewards=[], places=[], data=b"", supervised=rows
        )

    def unpack(self) -> BatchShard:
        view, start, microbatches = memoryview(self.data), 0, []
        for places in self.places:
            microbatch = []
            for group, place, nbytes in places:
                episode = unpack_episode(view[start : start + nbytes])
                self._give_outcome(episode, group, place)
                mask_older(episode, self.oldest)
                microbatch.append((group, place, episode))
                start += nbytes
            microbatches.append(microbatch)
        shared = {outcome.name: getattr(self, outcome.name) for outcome in fields(BatchOutcomes)}
        return BatchShard(**shared, microbatches=microbatches)

    def _give_outcome(self, episode: Episode, group: int, place: int) -> None:
        episode.reward, episode.parts = float(self.rewards[group][place]), self.parts[group][place]
        episode.seat, episode.play = self.seats[group][place], int(self.plays[group][place])
        episode.fork = self.forks[group][place]
        for turn, reward in zip(episode.turns, self.turn_rewards[group][place], strict=True):
            turn.reward = reward


def outcomes(groups: Sequence[PackedGroup], columns: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of :class:`BatchOutcomes` that follow from the groups alone.

    Args:
        groups: groups of the batch, in order.
        columns: names of the columns to read.

    Raises:
        ValueError: groups have different columns, or lack a column to read.
    """
    names = _column_names(groups, columns)
    return {
        "rewards": [group.rewards for group in groups],
        "lengths": [group.lengths for group in groups],
        "cut": [group.cut for group in groups],
        "tasks": [group.task for group in groups],
        "items": [group.task_index for group in groups],
        "group_ids": [(group.group_id, group.attempt) for group in groups],
        "parts": [[episode.parts for episode in group.episodes] for group in groups],
        "seats": [[episode.seat for episode in group.episodes] for group in groups],
        "plays": [group.plays for group in groups],
        "forks": [[episode.fork for episode in group.episodes] for group in groups],
        "turn_lengths": [[[tokens for tokens, _ in episode.turns] for episode in group.episodes] for group in groups],
        "turn_rewards": [[[reward for _, reward in episode.turns] for episode in group.episodes] for group in groups],
        "column_names": names,
        "columns": {name: [group.column(name) for group in groups] for name in columns},
    }


def _column_names(groups: Sequence[PackedGroup], needed: Sequence[str]) -> tuple[str, ...]:
    """Names of the columns that all groups have; see :func:`outcomes`."""
    names = groups[0].columns if groups else ()
    for group in groups:
        missing = [name for name in needed if name not in (*group.columns, BEHAVIOUR)]
        if missing or group.columns != names:
            wanted = f"training reads column {missing[0]}" if missing else f"another group has {list(names)}"
            raise ValueError(
                f"group {group.group_id} of task {group.task!r} has columns {list(group.columns)}, but {wanted}: a "
                "stage must fill the same columns in every group"
            )
    return names


def mask_older(episode: Episode, oldest: int | None) -> None:
    """Mask tokens sampled by versions before ``oldest`` out of the loss; they stay as context."""
    if oldest is None:
        return
    for turn in episode.turns:
        turn.trainable &= turn.policy_versions >= oldest


# -- trained episodes, for inspection (pipeline/rollout_log.py) --------------------------------------------------------


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
