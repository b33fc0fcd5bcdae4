"""The data contract: what one policy produced, token by token, and under which version.

Shapes: ``n`` is the number of tokens of a turn. Tokens are stored as arrays per turn, never as objects per
token. Token-in, token-out: ``token_ids`` are the ids the engine was given and the ids it drew; text is never
tokenised a second time.

A :class:`Group` (all episodes of one prompt) crosses processes and disks as bytes, without pickle
(``packed.py``): a JSON header with what deciding about a group needs, then each episode by itself, so that it can be
handed on without being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NO_VERSION = -1
"""``policy_versions`` of a token that no policy drew (prompt and environment tokens)."""


class GenerationError(RuntimeError):
    """A request was refused or aborted; the message is the engine's."""


class DrawLost(GenerationError):
    """The engine drew a token and cannot tell from which set: it costs the episode, and no other."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine draws tokens."""

    max_new_tokens: int = 64
    """Tokens a turn may have; the engine stops there with finish reason ``length``."""
    temperature: float = 1.0
    """0 is greedy. Log-probs are those of the tempered distribution."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a turn. The stop token is part of the turn and is trained."""
    seed: int | None = None
    """Makes one request's draws repeatable under the same weights; ``None`` draws freely."""
    top_k: int = 0
    """Draw from the k most likely tokens only; 0 from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens that have this probability together (arXiv:1904.09751)."""
    min_p: float = 0.0
    """Draw from tokens that have this share of the most likely one's probability (arXiv:2407.01082)."""
    routes_from: int | None = None
    """Tell the experts of each token from this position on; ``None`` of none."""

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn: then the engine tells from which ones each was."""
        return bool(self.temperature) and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(slots=True)
class KeptSets:
    """From which token ids each of n tokens was drawn, where the sampler cut the rest off: n sets of ids, ragged."""

    counts: np.ndarray
    """int32[n]: the size of each set; 0 for a token that was not drawn."""
    ids: np.ndarray
    """int32[sum of counts], set after set."""

    def __post_init__(self) -> None:
        if int(self.counts.sum()) != len(self.ids):
            raise ValueError(f"kept sets of {self.counts.sum()} ids in all have {len(self.ids)}")

    def __getitem__(self, tokens: slice | np.ndarray) -> KeptSets:
        """The sets of some of the tokens: a slice of them, or bool[n]."""
        mask = np.zeros(len(self.counts), bool)
        mask[tokens] = True
        return KeptSets(self.counts[mask], self.ids[np.repeat(mask, self.counts)])

    def split(self, sizes: Sequence[int]) -> list[KeptSets]:
        """The sets of the first ``sizes[0]`` tokens, of the next ``sizes[1]``, and so on: what :meth:`join` joined."""
        counts = np.split(self.counts, np.cumsum(sizes)[:-1])
        ids = np.split(self.ids, np.cumsum([part.sum() for part in counts])[:-1])
        return [KeptSets(*part) for part in zip(counts, ids, strict=True)]

    @classmethod
    def join(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """The sets of tokens that follow each other."""
        counts, ids = zip(*((part.counts, part.ids) for part in parts), strict=True)
        return cls(np.concatenate(counts), np.concatenate(ids))

    @classmethod
    def none(cls, tokens: int) -> KeptSets:
        """Of tokens that were not drawn."""
        return cls(np.zeros(tokens, np.int32), np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine drew for one request: arrays of length n."""

    token_ids: np.ndarray
    """int32."""
    logprobs: np.ndarray
    """float32, natural log, of the distribution that drew each token."""
    policy_versions: np.ndarray
    """int32, the version whose weights drew each token; non-decreasing, except where another replica went on for one
    that was lost."""
    finish_reason: str
    """``stop`` or ``length``."""
    kept: KeptSets | None = None
    """From which ids each token was drawn, with truncated sampling."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [tokens, layers, k], where asked for: the experts by which each token was read, from
    ``routes_from`` to the last but one of the sequence; the last one drawn was not read."""


@dataclass(slots=True)
class Turn:
    """One call of the engine: the tokens put before it (prompt, environment) and the tokens it drew."""

    token_ids: np.ndarray
    """int32[n]."""
    logprobs: np.ndarray
    """float32[n]; 0 where not trainable."""
    policy_versions: np.ndarray
    """int32[n]; ``NO_VERSION`` where not trainable."""
    trainable: np.ndarray
    """bool[n]; True for tokens that the policy drew."""
    kept: KeptSets | None = None
    """n sets; empty where not trainable. None if the sampler cut nothing off."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.policy_versions), len(self.trainable)}
        if self.kept is not None:
            lengths.add(len(self.kept.counts))
        if len(lengths) != 1:
            raise ValueError(f"the arrays of a turn must have one length, got {sorted(lengths)}")

    @property
    def runs(self) -> list[tuple[int, int, bool]]:
        """The turn cut into runs of one version and trainability: ``(tokens, policy version, trainable)``."""
        if not len(self.token_ids):
            return []
        changes = (np.diff(self.policy_versions) != 0) | (self.trainable[1:] != self.trainable[:-1])
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
        ends = [*starts[1:], len(self.token_ids)]
        return [
            (end - start, int(self.policy_versions[start]), bool(self.trainable[start]))
            for start, end in zip(starts, ends, strict=True)
        ]

    @classmethod
    def from_runs(
        cls, runs: list[tuple[int, int, bool]], token_ids: np.ndarray, drawn: np.ndarray, kept: KeptSets | None = None
    ) -> Turn:
        """The inverse of :attr:`runs`; ``drawn`` are the log-probs of the trainable tokens, float32, ``kept`` are
        their kept sets."""
        lengths, versions, trainable = zip(*runs, strict=True) if runs else ((), (), ())
        mask = np.repeat(np.asarray(trainable, bool), lengths)
        logprobs = np.zeros(len(token_ids), np.float32)
        logprobs[mask] = drawn
        if kept is not None:
            counts = np.zeros(len(token_ids), np.int32)
            counts[mask] = kept.counts
            kept = KeptSets(counts, kept.ids)
        return cls(token_ids, logprobs, np.repeat(np.asarray(versions, np.int32), lengths), mask, kept)

    @classmethod
    def from_completion(cls, context_ids: list[int], completion: Completion) -> Turn:
        """Join the tokens that were put before the engine (untrained) with those it drew."""
        before, drawn = len(context_ids), len(completion.token_ids)
        return cls(
            token_ids=np.concatenate([np.asarray(context_ids, np.int32), completion.token_ids.astype(np.int32)]),
            logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs.astype(np.float32)]),
            policy_versions=np.concatenate(
                [np.full(before, NO_VERSION, np.int32), completion.policy_versions.astype(np.int32)]
            ),
            trainable=np.arange(before + drawn) >= before,
            kept=None if completion.kept is None else KeptSets.join([KeptSets.none(before), completion.kept]),
        )


@dataclass(slots=True)
class Episode:
    """One play of one prompt."""

    turns: list[Turn]
    reward: float
    finish_reason: str
    """Why it ended: ``stop``, ``length``."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values to look at later (texts, the scorer's details); never read by training."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [n - 1, layers, k], where kept: the experts by which the engine read each token but the last,
    in each layer that has experts."""

    def _joined(self, name: str) -> np.ndarray:
        return np.concatenate([getattr(turn, name) for turn in self.turns])

    @property
    def token_ids(self) -> np.ndarray:
        """int32[n] over all turns."""
        return self._joined("token_ids")

    @property
    def logprobs(self) -> np.ndarray:
        """float32[n] over all turns."""
        return self._joined("logprobs")

    @property
    def policy_versions(self) -> np.ndarray:
        """int32[n] over all turns."""
        return self._joined("policy_versions")

    @property
    def trainable(self) -> np.ndarray:
        """bool[n] over all turns."""
        return self._joined("trainable")

    @property
    def kept(self) -> KeptSets | None:
        """Over all turns, of which all or none must have them."""
        parts = [turn.kept for turn in self.turns if turn.kept is not None]
        if len(parts) not in (0, len(self.turns)):
            raise ValueError(f"{len(parts)} of the {len(self.turns)} turns of an episode have kept sets")
        return KeptSets.join(parts) if parts else None

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_trainable(self) -> int:
        return int(sum(turn.trainable.sum() for turn in self.turns))

    @property
    def oldest_version(self) -> int | None:
        """The smallest version that drew a trainable token; ``None`` if there is no such token."""
        drawn = self.policy_versions[self.trainable]
        return int(drawn.min()) if len(drawn) else None


@dataclass(slots=True)
class Group:
    """The episodes of one prompt, which are compared with each other."""

    group_id: int
    """Order of admission, unique in a run."""
    task_index: int
    """Which item of the training set the prompt is."""
    episodes: list[Episode]
    failed: int = 0
    """Episodes that were begun, failed and are not here."""
    attempt: int = 0
    """How often the group was begun anew because its worker was lost; with ``group_id`` it names a lease."""

    @property
    def rewards(self) -> np.ndarray:
        """float32[G]."""
        return np.asarray([episode.reward for episode in self.episodes], np.float32)

    @property
    def oldest_version(self) -> int | None:
        """The smallest version that drew a trainable token of any episode."""
        versions = [v for v in (episode.oldest_version for episode in self.episodes) if v is not None]
        return min(versions, default=None)

    def to_bytes(self) -> bytes:
        """The flat, versioned form (:mod:`monarch_rl.packed`). Raises ValueError if a log-prob is not 0 where not
        trainable: it would be lost."""
        from monarch_rl.packed import pack_group  # needs the types of this module

        return pack_group(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Group:
        """Read :meth:`to_bytes`. Raises ValueError on another format version, or if bytes are missing."""
        from monarch_rl.packed import PackedGroup  # needs the types of this module

        return PackedGroup.read(data).unpack()


@dataclass(slots=True)
class BatchShard:
    """What one trainer rank takes from a batch of groups: its micro-batches, and the rewards of all groups."""

    version: int
    """The version that the update starts from; lag is counted against it."""
    rewards: list[np.ndarray]
    """One float32[G] per group of the batch, for the advantages."""
    microbatches: list[list[tuple[int, int, Episode]]]
    """``(group position in the batch, episode position in the group, episode)``; all ranks have as many."""
    trainable_tokens: int
    """Trainable tokens of the whole batch, all ranks."""
    lag_counts: np.ndarray
    """int64[L]: trainable tokens of the whole batch by lag 0, 1, ..."""

    @property
    def num_episodes(self) -> int:
        """Episodes of the whole batch."""
        return sum(len(rewards) for rewards in self.rewards)
