"""Groups and batches as bytes, to cross processes and disks. No pickle of objects from outside.

A packed group is

    4 bytes "GRP5", 4 bytes length of the header, the header (JSON), then the episodes one after the other

and a packed episode is

    4 bytes length of its JSON, the JSON, token ids (int32), log-probs of the trainable tokens (float32),
    if the sampler cut tokens off: sizes (int32) and ids (int32) of the sets they were drawn from,
    if expert routes were recorded: the experts of each token but the last (uint8 or uint16)

all little-endian, every part padded to 4 bytes. The header has what the buffer decides by and what each trainer rank
gets of all episodes of a batch (reward and its parts, tokens by policy version, finish reason, bytes), and which of
their first tokens episodes share (``prefixes.py``), so the buffer hands episodes on without reading them. Versions and
trainability are stored as runs: a token takes 8 bytes, or 4 if it was not drawn. A kept set takes 4 bytes and 4 for
each id, routes one or two bytes for each layer and expert.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from monarch_rl.episode.episode import BatchShard, Episode, Group, Turn, VersionRun
from monarch_rl.episode.prefixes import PrefixTree, prefix_tree
from monarch_rl.episode.sampling import KeptSets

FORMAT = b"GRP5"
"""The last character is the version of the format."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PackedEpisode:
    """The bytes of an episode that nobody has read, and what the group's header says about it."""

    reward: float
    tokens: int
    """All of them, prompts included."""
    tokens_by_version: dict[int, int]
    """Trainable tokens by the policy version that drew them."""
    data: bytes | memoryview
    finish_reason: str = "stop"
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward."""

    @property
    def trainable(self) -> int:
        return sum(self.tokens_by_version.values())


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A group of which only the header was read. Fields as in :class:`monarch_rl.episode.episode.Group`."""

    group_id: int
    task_index: int
    episodes: list[PackedEpisode]
    tree: PrefixTree
    """What the episodes share."""
    failed: int = 0
    attempt: int = 0
    data: bytes = b""
    """The whole group, as it arrived."""
    task: str = ""

    @property
    def rewards(self) -> np.ndarray:
        """float32[G]."""
        return np.asarray([episode.reward for episode in self.episodes], np.float32)

    @property
    def lengths(self) -> np.ndarray:
        """int32[G]: trainable tokens of each episode."""
        return np.asarray([episode.trainable for episode in self.episodes], np.int32)

    @property
    def cut(self) -> np.ndarray:
        """bool[G]: whether the episode ended because it reached a limit of tokens."""
        return np.asarray([episode.finish_reason in ("length", "context") for episode in self.episodes], bool)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def trainable(self) -> int:
        """Trainable tokens of all episodes."""
        return sum(episode.trainable for episode in self.episodes)

    @property
    def oldest_version(self) -> int | None:
        """The smallest version that drew a trainable token of any episode."""
        return min((version for episode in self.episodes for version in episode.tokens_by_version), default=None)

    @property
    def newest_version(self) -> int | None:
        """The largest version that drew a trainable token of any episode."""
        return max((version for episode in self.episodes for version in episode.tokens_by_version), default=None)

    @classmethod
    def read(cls, data: bytes) -> PackedGroup:
        """Read the header. Raises ValueError on another format, or if there are too few or too many bytes."""
        if data[:4] != FORMAT:
            raise ValueError(f"group format {data[:4]!r} cannot be read here, only {FORMAT!r}")
        start = 8 + _LENGTH.unpack_from(data, 4)[0]
        try:
            header = json.loads(data[8:start])
        except ValueError as error:
            raise ValueError(f"the header of a group of {len(data)} bytes cannot be read: {error}") from error
        expected = start + sum(nbytes for _, _, _, nbytes, _, _ in header["episodes"])
        if expected != len(data):
            raise ValueError(f"group {header['group_id']} has {len(data)} bytes, its header says {expected}")
        view, episodes = memoryview(data), []
        for reward, tokens, by_version, nbytes, finish_reason, parts in header["episodes"]:
            part = view[start : start + nbytes]
            episodes.append(PackedEpisode(reward, tokens, dict(by_version), part, finish_reason, parts))
            start += nbytes
        return cls(
            header["group_id"],
            header["task_index"],
            episodes,
            PrefixTree(*header["tree"]),
            header["failed"],
            header["attempt"],
            data,
            header["task"],
        )

    def unpack(self) -> Group:
        episodes = [unpack_episode(episode.data) for episode in self.episodes]
        for known, episode in zip(self.episodes, episodes, strict=True):
            episode.reward, episode.parts = known.reward, known.parts
        return Group(self.group_id, self.task_index, episodes, self.failed, self.attempt, self.task)


@dataclass(slots=True)
class PackedShard:
    """What one trainer rank takes from a batch, still packed: :meth:`unpack` gives the :class:`BatchShard`."""

    version: int
    """The version that the update starts from; lag is counted against it."""
    rewards: list[np.ndarray]
    """One float32[G] per group of the batch, for the advantages."""
    places: list[list[tuple[int, int, int]]]
    """By micro-batch: ``(group position in the batch, episode position in the group, bytes)``."""
    data: bytes
    """The episodes of all micro-batches, one after the other."""
    trainable_tokens: int
    """Trainable tokens of the whole batch, all ranks, without those that ``oldest`` leaves out."""
    lag_counts: np.ndarray
    """int64[L]: those tokens by lag 0, 1, ..."""
    oldest: int | None
    """Tokens that earlier versions drew are not trained; None trains all."""
    lengths: list[np.ndarray]
    """One int32[G] per group of the batch: tokens that each episode drew, also those that ``oldest`` leaves out."""
    cut: list[np.ndarray]
    """One bool[G] per group: whether the episode ended because it reached a limit of tokens."""
    tasks: list[str]
    """The task of each group."""
    parts: list[list[dict[str, float]]]
    """Per group, for each episode: the named parts of its reward."""

    def unpack(self) -> BatchShard:
        view, start, microbatches = memoryview(self.data), 0, []
        for places in self.places:
            microbatch = []
            for group, place, nbytes in places:
                episode = unpack_episode(view[start : start + nbytes])
                episode.reward = float(self.rewards[group][place])
                episode.parts = self.parts[group][place]
                mask_older(episode, self.oldest)
                microbatch.append((group, place, episode))
                start += nbytes
            microbatches.append(microbatch)
        return BatchShard(
            self.version,
            self.rewards,
            microbatches,
            self.trainable_tokens,
            self.lag_counts,
            self.lengths,
            self.cut,
            self.tasks,
            self.parts,
        )


def mask_older(episode: Episode, oldest: int | None) -> None:
    """Take the tokens that versions before ``oldest`` drew out of the loss; they stay as context."""
    if oldest is None:
        return
    for turn in episode.turns:
        turn.trainable &= turn.policy_versions >= oldest


def pack_group(group: Group) -> bytes:
    """The bytes of a group: see the top of this file."""
    runs = [[turn.runs for turn in episode.turns] for episode in group.episodes]
    packed = [_pack_episode(episode, by_turn) for episode, by_turn in zip(group.episodes, runs, strict=True)]
    header: dict[str, Any] = {
        "group_id": group.group_id,
        "task_index": group.task_index,
        "failed": group.failed,
        "attempt": group.attempt,
        "task": group.task,
        "tree": prefix_tree(group.episodes),
        "episodes": [
            (
                episode.reward,
                episode.num_tokens,
                list(_tokens_by_version(by_turn).items()),
                sum(map(len, arrays)),
                episode.finish_reason,
                episode.parts,
            )
            for episode, by_turn, arrays in zip(group.episodes, runs, packed, strict=True)
        ],
    }
    text = _padded(header)
    return b"".join([FORMAT, _LENGTH.pack(len(text)), text, *(array for arrays in packed for array in arrays)])


def unpack_group(data: bytes) -> Group:
    """The inverse of :func:`pack_group`. Raises ValueError on another format version, or if bytes are missing."""
    return PackedGroup.read(data).unpack()


def unpack_episode(data: bytes | memoryview) -> Episode:
    """Read one packed episode, without its reward and the parts of it, which are in the group's header (here 0 and
    none)."""
    start = 4 + _LENGTH.unpack_from(data)[0]
    head = json.loads(bytes(data[4:start]))

    def take(dtype: str, count: int) -> np.ndarray:
        nonlocal start
        array = np.frombuffer(data, "<" + dtype, count, start)
        start += array.nbytes
        return array.astype(dtype)  # of this machine's byte order, and not of the buffer's memory

    lengths = [sum(length for length, _, _ in runs) for runs in head["turns"]]
    trainable_lengths = [sum(length for length, _, trainable in runs if trainable) for runs in head["turns"]]
    tokens, trainable = sum(lengths), sum(trainable_lengths)
    ids, logprobs, kept_sets, expert_routes = take("i4", tokens), take("f4", trainable), None, None
    if "kept" in head:
        kept_sets = KeptSets(take("i4", trainable), take("i4", head["kept"]))
    if "routes" in head:
        *shape, dtype = head["routes"]
        expert_routes = take(dtype, math.prod(shape)).reshape(shape)
    ids_by_turn = np.split(ids, np.cumsum(lengths)[:-1])
    logprobs_by_turn = np.split(logprobs, np.cumsum(trainable_lengths)[:-1])
    kept_by_turn = [None] * len(lengths) if kept_sets is None else kept_sets.split(trainable_lengths)
    by_turn = zip(head["turns"], ids_by_turn, logprobs_by_turn, kept_by_turn, strict=True)
    turns = [Turn.from_runs(*of_turn) for of_turn in by_turn]
    return Episode(turns, 0.0, head["finish_reason"], head["info"], expert_routes)


def _pack_episode(episode: Episode, runs: list[list[VersionRun]]) -> list[bytes]:
    """``runs``: those of each turn."""
    ids, logprobs, trainable = episode.token_ids, episode.logprobs, episode.trainable
    kept_sets, expert_routes = episode.kept_sets, episode.expert_routes
    if np.any(logprobs[~trainable]):
        raise ValueError("an episode has a log-prob that is not 0 on a token that is not trainable")
    if kept_sets is not None and np.any(kept_sets.counts[~trainable]):
        raise ValueError("an episode has a kept set on a token that is not trainable")
    head: dict[str, Any] = {
        "turns": runs,
        "finish_reason": episode.finish_reason,
        "info": episode.info,
    }
    if kept_sets is not None:
        head["kept"] = len(kept_sets.ids)
    if expert_routes is not None:
        head["routes"] = [*expert_routes.shape, expert_routes.dtype.str[1:]]
    text = _padded(head)
    arrays = [_LENGTH.pack(len(text)), text, ids.astype("<i4").tobytes(), logprobs[trainable].astype("<f4").tobytes()]
    if kept_sets is not None:
        arrays += [kept_sets.counts[trainable].astype("<i4").tobytes(), kept_sets.ids.astype("<i4").tobytes()]
    if expert_routes is not None:
        data = expert_routes.astype(expert_routes.dtype.newbyteorder("<")).tobytes()
        arrays.append(data + bytes(-len(data) % 4))
    return arrays


def _tokens_by_version(runs: list[list[VersionRun]]) -> Counter[int]:
    """Trainable tokens of an episode by the version that drew them. ``runs``: those of each turn."""
    counts: Counter[int] = Counter()
    for tokens, version, trainable in chain.from_iterable(runs):
        if trainable:
            counts[version] += tokens
    return counts


def _padded(value: Any) -> bytes:
    """JSON, padded with spaces to a multiple of 4 bytes, so that the arrays behind it are aligned."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 4)
