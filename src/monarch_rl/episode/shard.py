"""What a trainer rank takes of a batch: the outcomes of all its groups, and the episodes of its own micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from monarch_rl.episode.episode import Episode, Fork
from monarch_rl.episode.serialization import BEHAVIOUR, PackedGroup, unpack_episode

T = TypeVar("T")


class MiniBatch(NamedTuple):
    """Some groups of a batch, which make one optimiser step: what their tokens' weights are divided by."""

    microbatches: int
    """Of each rank."""
    trainable_tokens: int
    """Of all ranks."""
    episodes: int
    """Of all ranks."""


@dataclass(slots=True, kw_only=True)
class BatchOutcomes:
    """What is known on every trainer rank of all groups of a batch: lists with one entry for each group. ``G`` is the
    number of a group's episodes."""

    version: int
    """The version that the update starts from; lag is counted against it."""
    trainable_tokens: int
    """Trainable tokens of the whole batch, all ranks, without those that are masked for their lag."""
    lag_counts: np.ndarray
    """int64[L]: those tokens by lag 0, 1, ..."""
    rewards: list[np.ndarray]
    """float32[G]."""
    lengths: list[np.ndarray] = field(default_factory=list)
    """int32[G]: tokens that each episode drew, also those masked for their lag."""
    cut: list[np.ndarray] = field(default_factory=list)
    """bool[G]: whether the episode ended because it reached a limit of tokens."""
    tasks: list[str] = field(default_factory=list)
    """Name of the task."""
    items: list[int] = field(default_factory=list)
    """Position of the prompt in the stream of tasks (``Group.task_index``)."""
    group_ids: list[tuple[int, int]] = field(default_factory=list)
    """Id and attempt: which play of which admission."""
    parts: list[list[dict[str, float]]] = field(default_factory=list)
    """For each episode: the named parts of its reward."""
    seats: list[list[str]] = field(default_factory=list)
    """For each episode: its seat."""
    plays: list[np.ndarray] = field(default_factory=list)
    """int32[G]: which play of the prompt each episode belongs to."""
    forks: list[list[Fork | None]] = field(default_factory=list)
    """For each episode: what it shares with an earlier one of its play."""
    turn_lengths: list[list[list[int]]] = field(default_factory=list)
    """For each episode and turn: tokens that it drew; their sum is the episode's ``lengths``."""
    turn_rewards: list[list[list[float | None]]] = field(default_factory=list)
    """For each episode and turn: what the turn alone was given; None is nothing."""
    uses: list[int] = field(default_factory=list)
    """How often the group was trained before; empty where none is trained again."""
    minibatches: list[MiniBatch] = field(default_factory=list)
    """In order; empty is one of all groups."""
    column_names: tuple[str, ...] = ()
    """Columns that the turns of all groups have."""
    columns: dict[str, list[list[np.ndarray]]] = field(default_factory=dict)
    """Of those that were asked for, for each group and episode: float32[tokens that it drew]."""

    @property
    def num_episodes(self) -> int:
        """Episodes of the whole batch."""
        return sum(len(rewards) for rewards in self.rewards)


@dataclass(slots=True, kw_only=True)
class BatchShard(BatchOutcomes):
    """What one trainer rank takes of a batch."""

    microbatches: list[list[tuple[int, int, Episode]]]
    """``(group position in the batch, episode position in the group, episode)``, one mini-batch after the other. All
    ranks have equally many micro-batches in each."""

    def by_minibatch(self, of_microbatches: Sequence[T]) -> list[tuple[MiniBatch, list[T]]]:
        """Divide a list with one value for each micro-batch among the mini-batches."""
        whole = MiniBatch(len(self.microbatches), self.trainable_tokens, self.num_episodes)
        values = iter(of_microbatches)
        return [(part, list(islice(values, part.microbatches))) for part in self.minibatches or [whole]]


@dataclass(slots=True, kw_only=True)
class SupervisedShard:
    """Rows of prompt and answer that one trainer rank computes in a step."""

    share: float
    """Of the step's loss; 1 is a step of rows alone."""
    lr_factor: float
    """What the learning rate of the step is multiplied by."""
    minibatches: list[MiniBatch]
    """In order. An episode stands for a row, a trainable token for one of an answer."""
    lengths: list[list[tuple[int, int]]]
    """By micro-batch, one mini-batch after the other: of each row its tokens, and how many of these are the prompt."""
    rows: list[list[int]]
    """By micro-batch: the places of its rows among all that the recipe gave."""
    token_ids: np.ndarray
    """int32: of all rows, one after the other."""


@dataclass(slots=True, kw_only=True)
class PackedShard(BatchOutcomes):
    """What one trainer rank takes of a batch, still packed: :meth:`unpack` gives the :class:`BatchShard`."""

    places: list[list[tuple[int, int, int]]]
    """By micro-batch: ``(group position in the batch, episode position in the group, bytes)``."""
    data: bytes
    """The episodes of all micro-batches, one after the other."""
    oldest: int | None = None
    """Tokens that earlier versions drew are not trained; None trains all."""
    supervised: SupervisedShard | None = None
    """What is trained beside the groups, or instead of any."""

    @classmethod
    def of_rows(cls, version: int, rows: SupervisedShard) -> PackedShard:
        """A step without groups."""
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
        known = {outcome.name: getattr(self, outcome.name) for outcome in fields(BatchOutcomes)}
        return BatchShard(**known, microbatches=microbatches)

    def _give_outcome(self, episode: Episode, group: int, place: int) -> None:
        episode.reward, episode.parts = float(self.rewards[group][place]), self.parts[group][place]
        episode.seat, episode.play = self.seats[group][place], int(self.plays[group][place])
        episode.fork = self.forks[group][place]
        for turn, reward in zip(episode.turns, self.turn_rewards[group][place], strict=True):
            turn.reward = reward


def outcomes(groups: Sequence[PackedGroup], columns: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of :class:`BatchOutcomes` that groups alone tell.

    Args:
        columns: names of those that are to be read.

    Raises:
        ValueError: groups have different columns, or not those that are to be read.
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
        "turn_lengths": [[[drawn for drawn, _ in episode.turns] for episode in group.episodes] for group in groups],
        "turn_rewards": [[[given for _, given in episode.turns] for episode in group.episodes] for group in groups],
        "column_names": names,
        "columns": {name: [group.column(name) for group in groups] for name in columns},
    }


def _column_names(groups: Sequence[PackedGroup], needed: Sequence[str]) -> tuple[str, ...]:
    """Those that all groups have; see :func:`outcomes`."""
    names = groups[0].columns if groups else ()
    for group in groups:
        missing = [name for name in needed if name not in (*group.columns, BEHAVIOUR)]
        if missing or group.columns != names:
            wanted = f"column {missing[0]} is read" if missing else f"another one has {list(names)}"
            raise ValueError(
                f"group {group.group_id} of task {group.task!r} has columns {list(group.columns)}, and {wanted}: a "
                "stage has to fill the same columns in every group"
            )
    return names


def mask_older(episode: Episode, oldest: int | None) -> None:
    """Take the tokens that versions before ``oldest`` drew out of the loss; they stay as context."""
    if oldest is None:
        return
    for turn in episode.turns:
        turn.trainable &= turn.policy_versions >= oldest
