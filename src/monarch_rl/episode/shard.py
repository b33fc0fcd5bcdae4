"""A trainer rank's shard of a batch: the outcomes of all groups, and the episodes of the rank's own micro-batches."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from monarch_rl.episode.episode import Episode, Fork
from monarch_rl.episode.serialization import deserialize_episode


class MiniBatch(NamedTuple):
    """Size of a mini-batch, the groups of a batch that make one optimiser step; token weights are divided by it."""

    microbatches: int
    """Micro-batches of each rank."""
    trainable_tokens: int
    """Trainable tokens of all ranks."""
    episodes: int
    """Episodes of all ranks."""


@dataclass(slots=True, kw_only=True)
class PackedShard:
    """One trainer rank's shard of a batch: the outcomes of all groups, from which every rank computes all advantages,
    and the serialized episodes of the rank's own micro-batches. Lists have one entry per group, unless stated
    otherwise. ``G`` is the number of a group's episodes.

    It is what a rank gets from the buffer, what the journal records, and what a replay trains on.
    """

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
    success_rewards: list[float | None] = field(default_factory=list)
    """The task's ``success_reward``; empty in journals of 0.1."""
    items: list[int] = field(default_factory=list)
    """Position of the prompt in the stream of tasks (``Group.task_index``)."""
    group_ids: list[tuple[int, int]] = field(default_factory=list)
    """Group id and attempt."""
    parts: list[list[dict[str, float]]] = field(default_factory=list)
    """For each episode: named components of its reward."""
    seats: list[list[str]] = field(default_factory=list)
    """For each episode: its seat."""
    plays: list[np.ndarray] = field(default_factory=list)
    """int32[G]: index of the rollout that each episode belongs to. Named as in earlier versions' journals."""
    forks: list[list[Fork | None]] = field(default_factory=list)
    """For each episode: where it branches off an earlier one of its rollout."""
    turn_lengths: list[list[list[int]]] = field(default_factory=list)
    """For each episode and turn: number of sampled tokens; their sum is the episode's entry in ``lengths``."""
    turn_rewards: list[list[list[float | None]]] = field(default_factory=list)
    """For each episode and turn: the turn's own reward, or None."""
    uses: list[int] = field(default_factory=list)
    """How often the group was trained before; empty if ``buffer.replay`` is 1."""
    minibatches: list[MiniBatch] = field(default_factory=list)
    """Mini-batches in order."""
    column_names: tuple[str, ...] = ()
    """Names of the columns that the turns of all groups have."""
    columns: dict[str, list[list[np.ndarray]]] = field(default_factory=dict)
    """Requested columns, by name: for each group and episode float32[sampled tokens]."""
    places: list[list[tuple[int, int, int]]]
    """By micro-batch, one mini-batch after the other: for each episode ``(group position in the batch, episode position
    in the group, bytes)``. In each mini-batch all ranks have the same number of micro-batches."""
    data: bytes
    """Serialized episodes of all micro-batches, one after the other."""
    oldest: int | None = None
    """Oldest version whose tokens are trained; earlier tokens are masked. None trains all."""
    supervised: SupervisedShard | None = None
    """Supervised rows that are trained alongside the groups, or in a step without groups."""

    @property
    def num_episodes(self) -> int:
        """Episodes of the whole batch."""
        return sum(len(rewards) for rewards in self.rewards)

    @classmethod
    def of_rows(cls, version: int, rows: SupervisedShard) -> PackedShard:
        """The shard of a step without groups."""
        none = np.zeros(0, np.int64)
        return cls(
            version=version, trainable_tokens=0, lag_counts=none, rewards=[], places=[], data=b"", supervised=rows
        )

    def episodes(self) -> Iterator[tuple[int, int, memoryview]]:
        """The rank's episodes: group position in the batch, episode position in the group, serialized episode."""
        view, start = memoryview(self.data), 0
        for group, place, nbytes in chain.from_iterable(self.places):
            yield group, place, view[start : start + nbytes]
            start += nbytes

    def deserialize(self) -> list[list[Episode]]:
        """The rank's episodes by micro-batch, like :attr:`places`, with their outcomes, and without training tokens
        that are too old."""
        episodes = (self._deserialized(*episode) for episode in self.episodes())
        return [list(islice(episodes, len(places))) for places in self.places]

    def _deserialized(self, group: int, place: int, data: memoryview) -> Episode:
        episode = deserialize_episode(data)
        episode.reward, episode.parts = float(self.rewards[group][place]), self.parts[group][place]
        episode.seat, episode.rollout = self.seats[group][place], int(self.plays[group][place])
        episode.fork = self.forks[group][place]
        for turn, reward in zip(episode.turns, self.turn_rewards[group][place], strict=True):
            turn.reward = reward
        mask_older(episode, self.oldest)
        return episode


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


def mask_older(episode: Episode, oldest: int | None) -> None:
    """Mask tokens sampled by versions before ``oldest`` out of the loss; they stay as context."""
    if oldest is None:
        return
    for turn in episode.turns:
        turn.trainable &= turn.policy_versions >= oldest


# -- values of the tokens of logged groups, for the record of the run -------------------------------------------------


class TokenFlag(enum.IntFlag):
    """What the loss did with a token: bits of ``TokenRecord.arrays["flags"]``."""

    CLIPPED = 1
    """The objective clipped or dropped it."""
    CORRECTED = 2
    """The importance weight of the corrections differs from 1 by more than rounding."""
    TRUNCATED = 4
    """That weight was beyond its bound, and was capped or set to 0."""
    MASKED = 8
    """Its weight in the loss is 0: it is too old, its sequence has a value that is not finite, or a correction dropped
    it."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What the trainer computed of one sequence of a logged group."""

    step: int
    """The step that trained it."""
    group_id: int
    attempt: int
    """Attempt of the group."""
    place: int
    """Position in the group."""
    advantage: float | None
    """The mean over its sampled tokens; None if it is not finite, or there are no such tokens."""
    arrays: dict[str, np.ndarray]
    """By name, a value for each of the sequence's n sampled tokens, in order, including masked ones. Tokens of turns
    that a forked sequence shares belong to the earlier sequence, and turns sampled at another temperature than
    training's have none.

    - ``trainer_logprobs``, ``new_logprobs``: float32[n], log-probs under the policy at the start of the step, and in
      the last pass over the token, before an optimiser step. NaN for tokens that were too old to be trained.
    - ``entropies``: float32[n], nats, in the last pass. NaN for the same tokens.
    - ``advantages``: float32[n], as the advantage function returned them.
    - ``weights``: float32[n], factor of the token's loss: aggregation x importance weight x discount for its lag.
    - ``flags``: uint8[n], bits of :class:`TokenFlag`.
    """


# -- which groups are logged -------------------------------------------------------------------------------------------


def sample_groups(groups: int, limit: int, seed: str) -> list[int]:
    """``limit`` positions sampled uniformly from 0 to ``groups`` - 1, ascending; all positions if there are fewer."""
    return sorted(random.Random(seed).sample(range(groups), min(limit, groups)))
