"""Groups and batches as bytes: what crosses processes and disks. No pickle of objects from outside.

A packed group is

    4 bytes "GRP3", 4 bytes length of the header, the header (JSON), then the episodes one after the other

and a packed episode is

    4 bytes length of its JSON, the JSON, token ids (int32), log-probs of the trainable tokens (float32),
    if the sampler cut tokens off: sizes (int32) and ids (int32) of the sets they were drawn from,
    if routes were kept: the experts of each token but the last (uint8 or uint16)

all little-endian, every part padded to 4 bytes. The header has what the buffer decides by (rewards, tokens by policy
version, bytes), so it hands episodes on without reading them. Versions and trainability are stored as runs: a token
takes 8 bytes, or 4 if it was not drawn. A kept set takes 4 bytes and 4 for each id, routes one or two bytes for each
layer and expert.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from monarch_rl.episode.episode import BatchShard, Episode, Group, Turn
from monarch_rl.episode.sampling import KeptSets

FORMAT = b"GRP3"
"""The last character is the version of the format."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PackedEpisode:
    """An episode that nobody has read, and what its group's header tells of it."""

    reward: float
    tokens: int
    """All of them, prompts included."""
    drawn: dict[int, int]
    """Trainable tokens by the policy version that drew them."""
    data: bytes | memoryview

    @property
    def trainable(self) -> int:
        return sum(self.drawn.values())

    def trainable_since(self, oldest: int | None) -> int:
        """Trainable tokens that version ``oldest`` or a later one drew; all for None."""
        return sum(n for version, n in self.drawn.items() if oldest is None or version >= oldest)


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A group of which only the header was read: the fields of :class:`monarch_rl.episode.episode.Group`."""

    group_id: int
    task_index: int
    episodes: list[PackedEpisode]
    failed: int = 0
    attempt: int = 0
    data: bytes = b""
    """All of it, as it came."""

    @property
    def rewards(self) -> np.ndarray:
        """float32[G]."""
        return np.asarray([episode.reward for episode in self.episodes], np.float32)

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
        return min((version for episode in self.episodes for version in episode.drawn), default=None)

    @property
    def newest_version(self) -> int | None:
        """The largest version that drew a trainable token of any episode."""
        return max((version for episode in self.episodes for version in episode.drawn), default=None)

    @classmethod
    def read(cls, data: bytes) -> PackedGroup:
        """Read the header. Raises ValueError on another format, or if bytes are missing or too many."""
        if data[:4] != FORMAT:
            raise ValueError(f"group format {data[:4]!r} cannot be read here, only {FORMAT!r}")
        start = 8 + _LENGTH.unpack_from(data, 4)[0]
        try:
            header = json.loads(data[8:start])
        except ValueError as error:
            raise ValueError(f"the header of a group of {len(data)} bytes cannot be read: {error}") from error
        expected = start + sum(nbytes for _, _, _, nbytes in header["episodes"])
        if expected != len(data):
            raise ValueError(f"group {header['group_id']} has {len(data)} bytes, its header tells of {expected}")
        view, episodes = memoryview(data), []
        for reward, tokens, drawn, nbytes in header["episodes"]:
            by_version = {int(version): count for version, count in drawn}
            episodes.append(PackedEpisode(reward, tokens, by_version, view[start : start + nbytes]))
            start += nbytes
        return cls(header["group_id"], header["task_index"], episodes, header["failed"], header["attempt"], data)

    def unpack(self) -> Group:
        episodes = [unpack_episode(episode.data) for episode in self.episodes]
        for known, episode in zip(self.episodes, episodes, strict=True):
            episode.reward = known.reward
        return Group(self.group_id, self.task_index, episodes, self.failed, self.attempt)


@dataclass(slots=True)
class PackedShard:
    """What one trainer rank takes from a batch, not read yet: :meth:`unpack` gives the :class:`BatchShard`."""

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

    def unpack(self) -> BatchShard:
        view, start, microbatches = memoryview(self.data), 0, []
        for places in self.places:
            microbatch = []
            for group, place, nbytes in places:
                episode = unpack_episode(view[start : start + nbytes])
                episode.reward = float(self.rewards[group][place])
                mask_older(episode, self.oldest)
                microbatch.append((group, place, episode))
                start += nbytes
            microbatches.append(microbatch)
        return BatchShard(self.version, self.rewards, microbatches, self.trainable_tokens, self.lag_counts)


def mask_older(episode: Episode, oldest: int | None) -> None:
    """Take the tokens that versions before ``oldest`` drew out of the loss; they stay as context."""
    if oldest is None:
        return
    for turn in episode.turns:
        turn.trainable &= turn.policy_versions >= oldest


def pack_group(group: Group) -> bytes:
    """The bytes of a group: see the top of this file."""
    packed = [_pack_episode(episode) for episode in group.episodes]
    header: dict[str, Any] = {
        "group_id": group.group_id,
        "task_index": group.task_index,
        "failed": group.failed,
        "attempt": group.attempt,
        "episodes": [
            (episode.reward, episode.num_tokens, list(_drawn(episode).items()), sum(map(len, parts)))
            for episode, parts in zip(group.episodes, packed, strict=True)
        ],
    }
    text = _padded(header)
    return b"".join([FORMAT, _LENGTH.pack(len(text)), text, *(part for parts in packed for part in parts)])


def unpack_group(data: bytes) -> Group:
    """The inverse of :func:`pack_group`. Raises ValueError on another format version, or if bytes are missing."""
    return PackedGroup.read(data).unpack()


def unpack_episode(data: bytes | memoryview) -> Episode:
    """Read one packed episode, but for its reward, which stands in the group's header (0 here)."""
    start = 4 + _LENGTH.unpack_from(data)[0]
    head = json.loads(bytes(data[4:start]))
    turns = []

    def take(dtype: str, count: int) -> np.ndarray:
        nonlocal start
        array = np.frombuffer(data, "<" + dtype, count, start)
        start += array.nbytes
        return array.astype(dtype)  # of this machine's byte order, and not of the buffer's memory

    tokens = sum(length for runs in head["turns"] for length, _, _ in runs)
    trainable = sum(length for runs in head["turns"] for length, _, drawn in runs if drawn)
    ids, logprobs, kept, expert_routes = take("i4", tokens), take("f4", trainable), None, None
    if head["kept"] is not None:
        kept = KeptSets(take("i4", trainable), take("i4", head["kept"]))
    if head["routes"] is not None:
        *shape, dtype = head["routes"]
        expert_routes = take(dtype, math.prod(shape)).reshape(shape)
    drawn = [sum(length for length, _, of_policy in runs if of_policy) for runs in head["turns"]]
    sets = [None] * len(drawn) if kept is None else kept.split(drawn)
    at = drawn_at = 0
    for runs, count, of_turn in zip(head["turns"], drawn, sets, strict=True):
        length = sum(run[0] for run in runs)
        drawn_logprobs = logprobs[drawn_at : drawn_at + count]
        turns.append(Turn.from_runs(runs, ids[at : at + length], drawn_logprobs, of_turn))
        at, drawn_at = at + length, drawn_at + count
    return Episode(turns, 0.0, head["finish_reason"], head["info"], expert_routes)


def _pack_episode(episode: Episode) -> list[bytes]:
    ids, logprobs, trainable = episode.token_ids, episode.logprobs, episode.trainable
    kept, expert_routes = episode.kept, episode.expert_routes
    if np.any(logprobs[~trainable]):
        raise ValueError("an episode has a log-prob that is not 0 on a token that is not trainable")
    if kept is not None and np.any(kept.counts[~trainable]):
        raise ValueError("an episode has a kept set on a token that is not trainable")
    head = {
        "turns": [turn.runs for turn in episode.turns],
        "finish_reason": episode.finish_reason,
        "info": episode.info,
        "kept": None if kept is None else len(kept.ids),
        "routes": None if expert_routes is None else [*expert_routes.shape, expert_routes.dtype.str[1:]],
    }
    text = _padded(head)
    parts = [_LENGTH.pack(len(text)), text, ids.astype("<i4").tobytes(), logprobs[trainable].astype("<f4").tobytes()]
    if kept is not None:
        parts += [kept.counts[trainable].astype("<i4").tobytes(), kept.ids.astype("<i4").tobytes()]
    if expert_routes is not None:
        data = expert_routes.astype(expert_routes.dtype.newbyteorder("<")).tobytes()
        parts.append(data + bytes(-len(data) % 4))
    return parts


def _drawn(episode: Episode) -> Counter[int]:
    drawn: Counter[int] = Counter()
    for turn in episode.turns:
        for tokens, version, trainable in turn.runs:
            if trainable:
                drawn[version] += tokens
    return drawn


def _padded(value: Any) -> bytes:
    """JSON, padded with spaces to a multiple of 4 bytes, so that arrays behind it lie where numpy likes them."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 4)
