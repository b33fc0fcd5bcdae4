"""Groups as bytes, to be sent between processes and stored on disk. Data from outside is never unpickled.

A serialized group is

    4 bytes "GRP6", 4 bytes length of the header, the header (JSON), then the episodes one after the other

and a serialized episode is

    4 bytes length of its JSON, the JSON, token ids (int32), log-probs of the trainable tokens (float32),
    if the sampler truncates: sizes (int32) and ids (int32) of the sampling masks of the trainable tokens,
    if expert routes were recorded: the experts of each token except the last (uint8 or uint16),
    each column, sorted by name: the values of the trainable tokens (float32)

all little-endian, every field padded to 4 bytes. The header has the fields by which the buffer decides and those that
each trainer rank gets of all episodes of a batch (reward and its components, seat, rollout, fork, turns, tokens by
policy version, finish reason, bytes), the names of the columns, and the prefixes that episodes share
(``prefixes.py``). So the buffer forwards episodes without reading them. Versions and trainability are stored as spans.
A token takes 8 bytes, or 4 if it was not sampled. A column takes 4 bytes per trainable token, a sampling mask 4 bytes
plus 4 per id, routes one or two bytes per layer and expert.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from monarch_rl.episode.episode import POSITION, Episode, Fork, Group, Turn, VersionSpan
from monarch_rl.episode.prefixes import PrefixTree, prefix_tree
from monarch_rl.episode.sampling import SamplingMasks

FORMAT = b"GRP6"
"""The last character is the version of the format."""
BEHAVIOUR = "behaviour"
"""Name of a column that every group has: the engine's log-probs under the policy that sampled each token."""
_LENGTH = struct.Struct("<I")
_JSON = json.JSONEncoder(separators=(",", ":"))
"""One encoder for all calls, because ``json.dumps`` makes a new one for each call with custom separators."""


@dataclass(frozen=True, slots=True)
class SerializedEpisode:
    """An episode as unread bytes, with the fields that the group's header has about it."""

    reward: float
    tokens: int
    """Number of all tokens, prompts included."""
    tokens_by_version: dict[int, int]
    """Number of trainable tokens by the policy version that sampled them."""
    data: bytes | memoryview
    finish_reason: str = "stop"
    parts: dict[str, float] = field(default_factory=dict)
    """Named components of the reward."""
    turns: list[tuple[int, float | None]] = field(default_factory=list)
    """For each turn: number of trainable tokens, and the turn's own reward or None."""
    seat: str = ""
    rollout: int = POSITION
    fork: Fork | None = None

    @property
    def trainable(self) -> int:
        return sum(self.tokens_by_version.values())

    def column_bytes(self, place: int, columns: int) -> bytes:
        """Bytes of one column: float32[trainable].

        Args:
            place: position of the column among the group's columns.
            columns: number of columns that the group has.
        """
        width = 4 * self.trainable
        start = len(self.data) - (columns - place) * width
        return bytes(self.data[start : start + width])

    def logprob_bytes(self) -> bytes:
        """The engine's log-probs: float32[trainable]."""
        start = 4 + _LENGTH.unpack_from(self.data)[0] + 4 * self.tokens
        return bytes(self.data[start : start + 4 * self.trainable])

    def give_outcome(self, episode: Episode) -> Episode:
        """Set the fields of ``episode`` that are in the group's header, not in the episode's own bytes."""
        episode.reward, episode.parts, episode.fork = self.reward, self.parts, self.fork
        episode.seat, episode.rollout = self.seat, self.rollout
        for turn, (_, reward) in zip(episode.turns, self.turns, strict=True):
            turn.reward = reward
        return episode


@dataclass(frozen=True, slots=True)
class SerializedGroup:
    """A group of which only the header was read. Fields as in :class:`monarch_rl.episode.episode.Group`."""

    group_id: int
    task_index: int
    episodes: list[SerializedEpisode]
    tree: PrefixTree
    """Prefixes that the episodes share."""
    failed: int = 0
    attempt: int = 0
    data: bytes = b""
    """The whole serialized group, as it arrived."""
    task: str = ""
    columns: tuple[str, ...] = ()
    """Names of the columns that all turns have, in their stored order."""
    success_reward: float | None = None

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
        """bool[G]: whether the episode was truncated by a limit on tokens or turns."""
        return np.asarray([episode.finish_reason in ("length", "context", "turns") for episode in self.episodes], bool)

    @property
    def rollouts(self) -> np.ndarray:
        """int32[G]: index of the rollout that each episode belongs to."""
        return np.asarray([episode.rollout for episode in self.episodes], np.int32)

    def column(self, name: str) -> list[np.ndarray]:
        """A column: for each episode float32[trainable tokens]. Raises ValueError if the group has no such column."""
        if name == BEHAVIOUR:
            data = [episode.logprob_bytes() for episode in self.episodes]
        else:
            place, count = self.columns.index(name), len(self.columns)
            data = [episode.column_bytes(place, count) for episode in self.episodes]
        return [np.frombuffer(of_episode, "<f4").astype(np.float32) for of_episode in data]

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def tokens(self) -> int:
        """Number of tokens of all episodes, prompts included; a shared token counts in every episode that has it."""
        return sum(episode.tokens for episode in self.episodes)

    @property
    def trainable(self) -> int:
        """Number of trainable tokens of all episodes."""
        return sum(episode.trainable for episode in self.episodes)

    @property
    def oldest_version(self) -> int | None:
        """The smallest version that sampled a trainable token of any episode."""
        return min((version for episode in self.episodes for version in episode.tokens_by_version), default=None)

    @property
    def newest_version(self) -> int | None:
        """The largest version that sampled a trainable token of any episode."""
        return max((version for episode in self.episodes for version in episode.tokens_by_version), default=None)

    @classmethod
    def read(cls, data: bytes) -> SerializedGroup:
        """Read the header. Raises ValueError on another format, or if there are too few or too many bytes."""
        if data[:4] != FORMAT:
            raise ValueError(f"group has format {data[:4]!r}, but this program reads {FORMAT!r}")
        start = 8 + _LENGTH.unpack_from(data, 4)[0]
        try:
            header = json.loads(data[8:start])
        except ValueError as error:
            raise ValueError(f"the header of a group of {len(data)} bytes cannot be read: {error}") from error
        expected = start + sum(of_episode[3] for of_episode in header["episodes"])
        if expected != len(data):
            raise ValueError(f"group {header['group_id']} has {len(data)} bytes, but its header declares {expected}")
        view, episodes = memoryview(data), []
        for reward, tokens, by_version, nbytes, finish_reason, parts, turns, seat, rollout, fork in header["episodes"]:
            own, of_turns = view[start : start + nbytes], [(tokens_of, reward_of) for tokens_of, reward_of in turns]
            serialized = SerializedEpisode(
                reward, tokens, dict(by_version), own, finish_reason, parts, of_turns, seat, rollout
            )
            episodes.append(serialized if fork is None else replace(serialized, fork=Fork(*fork)))
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
            tuple(header["columns"]),
            header.get("success_reward"),  # groups in checkpoints of 0.1 have none
        )

    def deserialize(self) -> Group:
        episodes = [serialized.give_outcome(deserialize_episode(serialized.data)) for serialized in self.episodes]
        group = Group(self.group_id, self.task_index, episodes, self.failed, self.attempt)
        group.task, group.success_reward = self.task, self.success_reward
        return group


def serialize_group(group: Group) -> bytes:
    """Serialize a group, in the format described at the top of this file. Raises ValueError if a token that is not
    trainable has values that the format does not store, or if turns have different columns."""
    spans = [[turn.spans for turn in episode.turns] for episode in group.episodes]
    columns = column_names(group)
    serialized = [
        _serialize_episode(episode, by_turn, columns) for episode, by_turn in zip(group.episodes, spans, strict=True)
    ]
    header: dict[str, Any] = {
        "group_id": group.group_id,
        "task_index": group.task_index,
        "failed": group.failed,
        "attempt": group.attempt,
        "task": group.task,
        "success_reward": group.success_reward,
        "tree": prefix_tree(group.episodes),
        "columns": columns,
        "episodes": [
            (
                episode.reward,
                episode.num_tokens,
                list(_tokens_by_version(by_turn).items()),
                sum(map(len, arrays)),
                episode.finish_reason,
                episode.parts,
                [(_trainable(of_turn), turn.reward) for of_turn, turn in zip(by_turn, episode.turns, strict=True)],
                episode.seat,
                rollout,
                episode.fork,
            )
            for episode, by_turn, arrays, rollout in zip(
                group.episodes, spans, serialized, group.rollouts.tolist(), strict=True
            )
        ],
    }
    text = _padded(header)
    return b"".join([FORMAT, _LENGTH.pack(len(text)), text, *(array for arrays in serialized for array in arrays)])


def deserialize_group(data: bytes) -> Group:
    """The inverse of :func:`serialize_group`. Raises ValueError on another format, or if there are too few or too many
    bytes."""
    return SerializedGroup.read(data).deserialize()


def deserialize_episode(data: bytes | memoryview) -> Episode:
    """Read one serialized episode. The fields in the group's header are not set: see
    :meth:`SerializedEpisode.give_outcome`."""
    start = 4 + _LENGTH.unpack_from(data)[0]
    head = json.loads(bytes(data[4:start]))

    def take(dtype: str, count: int) -> np.ndarray:
        nonlocal start
        array = np.frombuffer(data, "<" + dtype, count, start)
        start += array.nbytes
        return array.astype(dtype)  # a copy in this machine's byte order, which does not keep ``data`` alive

    lengths = [sum(length for length, _, _ in spans) for spans in head["turns"]]
    trainable_lengths = [sum(length for length, _, trainable in spans if trainable) for spans in head["turns"]]
    tokens, trainable = sum(lengths), sum(trainable_lengths)
    ids, logprobs, sampling_masks, expert_routes = take("i4", tokens), take("f4", trainable), None, None
    if "kept" in head:
        sampling_masks = SamplingMasks(take("i4", trainable), take("i4", head["kept"]))
    if "routes" in head:
        *shape, dtype = head["routes"]
        expert_routes = take(dtype, math.prod(shape)).reshape(shape)
        start += -expert_routes.nbytes % 4
    columns = {name: take("f4", trainable) for name in head.get("columns", ())}
    ids_by_turn, logprobs_by_turn = _split(ids, lengths), _split(logprobs, trainable_lengths)
    masks_by_turn = [None] * len(lengths) if sampling_masks is None else sampling_masks.split(trainable_lengths)
    split = {name: _split(values, trainable_lengths) for name, values in columns.items()}
    columns_by_turn = [{name: values[i] for name, values in split.items()} for i in range(len(lengths))]
    by_turn = zip(head["turns"], ids_by_turn, logprobs_by_turn, masks_by_turn, columns_by_turn, strict=True)
    turns = [Turn.from_spans(*of_turn) for of_turn in by_turn]
    return Episode(turns, 0.0, head["finish_reason"], head["info"], expert_routes)


def _split(values: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    """Consecutive parts of these lengths, as views. Does the same as ``np.split``, in a tenth of its time."""
    return [values[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def column_names(group: Group) -> list[str]:
    """Names of the columns that every turn of a group has, sorted. Raises ValueError if turns have different columns,
    or a column has the wrong shape or a value on a token that is not trainable."""
    turns = [(e, t, turn) for e, episode in enumerate(group.episodes) for t, turn in enumerate(episode.turns)]
    names = sorted(turns[0][2].columns) if turns else []
    for e, t, turn in turns:
        if sorted(turn.columns) != names:
            raise ValueError(
                f"group {group.group_id}: turn 0 of episode 0 has columns {names}, turn {t} of episode {e} has "
                f"{sorted(turn.columns)}: fill the same columns for every turn of a group (Episode.fill_column)"
            )
        for name, values in turn.columns.items():
            if np.shape(values) != turn.token_ids.shape or np.any(values[~turn.trainable]):
                raise ValueError(
                    f"group {group.group_id}: column {name} of turn {t} of episode {e} must have one value for each "
                    f"of its {len(turn.token_ids)} tokens, and 0 where the token is not trainable"
                )
    return names


def _serialize_episode(episode: Episode, spans: list[list[VersionSpan]], columns: list[str]) -> list[bytes]:
    """The arrays of a serialized episode, in order. ``spans``: the spans of each turn. ``columns``: column names."""
    ids, logprobs, trainable = episode.token_ids, episode.logprobs, episode.trainable
    sampling_masks, expert_routes = episode.sampling_masks, episode.expert_routes
    trainable_logprobs, start = [], 0
    for tokens, _, is_trainable in chain.from_iterable(spans):
        of_span = logprobs[start : start + tokens]
        start += tokens
        if is_trainable:
            trainable_logprobs.append(of_span.astype("<f4").tobytes())
        elif of_span.any():
            raise ValueError("an episode has a log-prob other than 0 on a token that is not trainable")
    if sampling_masks is not None and np.any(sampling_masks.counts[~trainable]):
        raise ValueError("an episode has a sampling mask on a token that is not trainable")
    head: dict[str, Any] = {
        "turns": spans,
        "finish_reason": episode.finish_reason,
        "info": episode.info,
    }
    if sampling_masks is not None:
        head["kept"] = len(sampling_masks.ids)
    if expert_routes is not None:
        head["routes"] = [*expert_routes.shape, expert_routes.dtype.str[1:]]
    if columns:
        head["columns"] = columns
    text = _padded(head)
    arrays = [_LENGTH.pack(len(text)), text, ids.astype("<i4").tobytes(), *trainable_logprobs]
    if sampling_masks is not None:
        arrays += [sampling_masks.counts[trainable].astype("<i4").tobytes(), sampling_masks.ids.astype("<i4").tobytes()]
    if expert_routes is not None:
        data = expert_routes.astype(expert_routes.dtype.newbyteorder("<")).tobytes()
        arrays.append(data + bytes(-len(data) % 4))
    return arrays + [episode.column(name)[trainable].astype("<f4").tobytes() for name in columns]


def _trainable(spans: list[VersionSpan]) -> int:
    """Number of trainable tokens of a turn."""
    return sum(tokens for tokens, _, trainable in spans if trainable)


def _tokens_by_version(spans: list[list[VersionSpan]]) -> Counter[int]:
    """Number of an episode's trainable tokens by the version that sampled them. ``spans``: the spans of each turn."""
    counts: Counter[int] = Counter()
    for tokens, version, trainable in chain.from_iterable(spans):
        if trainable:
            counts[version] += tokens
    return counts


def _padded(value: Any) -> bytes:
    """JSON, padded with spaces to a multiple of 4 bytes, so that the arrays after it are aligned."""
    text = _JSON.encode(value).encode()
    return text + b" " * (-len(text) % 4)
