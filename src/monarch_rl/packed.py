"""Groups and batches as bytes: what crosses processes and disks. No pickle of objects from outside.

A packed group is

    4 bytes "GRP2", 4 bytes length of the header, the header (JSON), then the episodes one after the other

and a packed episode is

    4 bytes length of its JSON, the JSON, token ids (int32), log-probs of the trainable tokens (float32)

all little-endian, every part padded to 4 bytes. The header has what the buffer decides by (rewards, tokens by policy
version, bytes), so it hands episodes on without reading them. Versions and trainability are stored as runs: a token
takes 8 bytes, or 4 if it was not drawn.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from monarch_rl.episode import BatchShard, Episode, Group, Turn

FORMAT = b"GRP2"
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
    """A group of which only the header was read: the fields of :class:`monarch_rl.episode.Group`."""

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


def unpack_episode(data: bytes | memoryview) -> Episode:
    """Read one packed episode, but for its reward, which stands in the group's header (0 here)."""
    start = 4 + _LENGTH.unpack_from(data)[0]
    head = json.loads(bytes(data[4:start]))
    turns = []
    ids_at, tokens = start, sum(length for runs in head["turns"] for length, _, _ in runs)
    ids = np.frombuffer(data, "<i4", tokens, ids_at).astype(np.int32)
    logprobs = np.frombuffer(data, "<f4", -1, ids_at + 4 * tokens).astype(np.float32)
    at = drawn_at = 0
    for runs in head["turns"]:
        length, drawn = sum(run[0] for run in runs), sum(run[0] for run in runs if run[2])
        turns.append(Turn.from_runs(runs, ids[at : at + length], logprobs[drawn_at : drawn_at + drawn]))
        at, drawn_at = at + length, drawn_at + drawn
    return Episode(turns, 0.0, head["finish_reason"], head["info"])


def _pack_episode(episode: Episode) -> list[bytes]:
    ids, logprobs, trainable = episode.token_ids, episode.logprobs, episode.trainable
    if np.any(logprobs[~trainable]):
        raise ValueError("an episode has a log-prob that is not 0 on a token that is not trainable")
    head = {
        "turns": [turn.runs for turn in episode.turns],
        "finish_reason": episode.finish_reason,
        "info": episode.info,
    }
    text = _padded(head)
    return [_LENGTH.pack(len(text)), text, ids.astype("<i4").tobytes(), logprobs[trainable].astype("<f4").tobytes()]


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
