"""The data contract: what a policy produced, token by token, and under which version.

Shapes: ``n`` is the number of tokens of a turn. Tokens are stored as arrays per turn, never as objects per
token. Token-in, token-out: ``token_ids`` are the ids the engine was given and the ids it drew; text is never
tokenised a second time.

A :class:`Group` (all episodes of one prompt) crosses processes and disks as bytes (``serialization.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound
from monarch_rl.episode.sampling import Completion, SamplingMasks

POSITION = -1
"""``Episode.play`` that nobody has set: the position in the group."""
NO_VERSION = -1
"""``policy_versions`` of a token that no policy drew (prompt and environment tokens)."""
VersionRun = tuple[int, int, bool]
"""Tokens of one version and trainability that follow each other: their number, version, and if they are trainable."""


@dataclass(slots=True)
class Turn:
    """One call of the engine: the tokens it was given (prompt, environment) and the tokens it drew."""

    token_ids: np.ndarray
    """int32[n]."""
    logprobs: np.ndarray
    """float32[n]; 0 where not trainable."""
    policy_versions: np.ndarray
    """int32[n]; ``NO_VERSION`` where not trainable."""
    trainable: np.ndarray
    """bool[n]; True for tokens that the policy drew."""
    sampling_masks: SamplingMasks | None = None
    """n sets; empty where not trainable. None if the sampler cut no tokens off."""
    reward: float | None = None
    """What the turn alone was given (a process reward); None is nothing. The episode's own reward does not depend on
    it."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """float32[n] by name, 0 where not trainable: numbers of each token that objectives and advantages read. All turns
    of a group have the same names."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.policy_versions), len(self.trainable)}
        if self.sampling_masks is not None:
            lengths.add(len(self.sampling_masks.counts))
        if len(lengths) != 1:
            raise ValueError(f"the arrays of a turn must have one length, got {sorted(lengths)}")

    @property
    def runs(self) -> list[VersionRun]:
        """The turn cut into runs of one version and trainability: ``(tokens, policy version, trainable)``."""
        if not len(self.token_ids):
            return []
        versions, trainable = self.policy_versions, self.trainable
        changes = (versions[1:] != versions[:-1]) | (trainable[1:] != trainable[:-1])
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
        ends = [*starts[1:], len(self.token_ids)]
        return [
            (end - start, int(self.policy_versions[start]), bool(self.trainable[start]))
            for start, end in zip(starts, ends, strict=True)
        ]

    @classmethod
    def from_runs(
        cls,
        runs: list[VersionRun],
        token_ids: np.ndarray,
        trainable_logprobs: np.ndarray,
        sampling_masks: SamplingMasks | None = None,
        trainable_columns: Mapping[str, np.ndarray] | None = None,
    ) -> Turn:
        """The inverse of :attr:`runs`; log-probs, columns (float32) and kept sets are those of the trainable tokens
        alone."""
        lengths, versions, trainable = zip(*runs, strict=True) if runs else ((), (), ())
        mask = np.repeat(np.asarray(trainable, bool), lengths)
        logprobs = _spread(mask, trainable_logprobs)
        columns = {name: _spread(mask, values) for name, values in (trainable_columns or {}).items()}
        if sampling_masks is not None:
            counts = np.zeros(len(token_ids), np.int32)
            counts[mask] = sampling_masks.counts
            sampling_masks = SamplingMasks(counts, sampling_masks.ids)
        versions_by_token = np.repeat(np.asarray(versions, np.int32), lengths)
        return cls(token_ids, logprobs, versions_by_token, mask, sampling_masks, columns=columns)

    @classmethod
    def from_completion(cls, context_ids: list[int], completion: Completion) -> Turn:
        """Join the tokens that the engine was given (not trainable) with those it drew.

        Raises ValueError if the completion has not one log-prob and one version for each token.
        """
        context, drawn = len(context_ids), len(completion.token_ids)
        if not drawn == len(completion.logprobs) == len(completion.policy_versions):
            raise ValueError(
                f"a completion of {drawn} tokens has {len(completion.logprobs)} log-probs and "
                f"{len(completion.policy_versions)} versions"
            )
        token_ids = np.empty(context + drawn, np.int32)
        token_ids[:context], token_ids[context:] = context_ids, completion.token_ids
        logprobs = np.zeros(context + drawn, np.float32)
        logprobs[context:] = completion.logprobs
        versions = np.full(context + drawn, NO_VERSION, np.int32)
        versions[context:] = completion.policy_versions
        trainable = np.zeros(context + drawn, bool)
        trainable[context:] = True
        sampling_masks = completion.sampling_masks
        if sampling_masks is not None:
            sampling_masks = SamplingMasks.join([SamplingMasks.none(context), sampling_masks])
        return cls(token_ids, logprobs, versions, trainable, sampling_masks)


def _spread(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float32[n]: ``values`` where ``mask`` (bool[n]) is set, 0 elsewhere."""
    spread = np.zeros(len(mask), np.float32)
    spread[mask] = values
    return spread


class Fork(NamedTuple):
    """Where a sequence parts from an earlier one of its play."""

    sequence: int
    """That one's place among the sequences of the play."""
    turns: int
    """The first turns, which both have. They are trained there, and are context here."""


@dataclass(slots=True)
class Episode:
    """One sequence of one play of a prompt. A play has several where it has seats or branches."""

    turns: list[Turn]
    reward: float
    finish_reason: str
    """Why it ended: ``stop``, ``length`` (of the last turn), ``context`` (no room for more)."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values to look at later (texts, the scorer's details); training never reads them."""
    expert_routes: np.ndarray | None = None
    """uint8 or uint16 [n - 1, layers, k], where recorded: the experts by which the engine read each token but the last,
    in each layer that has experts."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, for the metrics and for advantages that read them."""
    seat: str = ""
    """Whose sequence it is, in a play of several players."""
    play: int = POSITION
    """Which play of the prompt it belongs to, 0, 1, ...; ``POSITION``, until the group is packed, is its own position
    in the group."""
    fork: Fork | None = None
    """What it shares with an earlier sequence of its play, which was forked."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """All that was said, as JSON objects with role and content. They stay with the worker that played the episode."""
    answer: str = ""
    """The text of the last turn, without thoughts and calls. It stays with the worker, too."""

    def _joined(self, name: str) -> np.ndarray:
        if len(self.turns) == 1:
            array: np.ndarray = getattr(self.turns[0], name)
            return array
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
    def sampling_masks(self) -> SamplingMasks | None:
        """Over all turns, of which all or none must have them."""
        sets = [turn.sampling_masks for turn in self.turns if turn.sampling_masks is not None]
        if len(sets) not in (0, len(self.turns)):
            raise ValueError(f"{len(sets)} of the {len(self.turns)} turns of an episode have kept sets")
        return SamplingMasks.join(sets) if sets else None

    def column(self, name: str) -> np.ndarray:
        """float32[n] over all turns. Raises KeyError if a turn has no such column."""
        return np.concatenate([turn.columns[name] for turn in self.turns])

    def fill_column(self, name: str, values: np.ndarray) -> None:
        """Give every turn its part of a column.

        Args:
            values: float[n], one for each token of the episode; those of tokens that are not trainable are left out.

        Raises:
            ValueError: there are more or fewer values than tokens.
        """
        if np.shape(values) != (self.num_tokens,):
            raise ValueError(
                f"column {name} of an episode of {self.num_tokens} tokens has values of shape {list(np.shape(values))}:"
                " give one for each token, prompts included"
            )
        ends = np.cumsum([len(turn.token_ids) for turn in self.turns])
        for turn, part in zip(self.turns, np.split(np.asarray(values), ends[:-1]), strict=True):
            turn.columns[name] = np.where(turn.trainable, part, 0).astype(np.float32)

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_trainable(self) -> int:
        return int(sum(turn.trainable.sum() for turn in self.turns))


@dataclass(slots=True)
class Group:
    """The episodes of one prompt, which advantages compare with each other."""

    group_id: int
    """Order of admission, unique in a run."""
    task_index: int
    """Which item of the training set the prompt is."""
    episodes: list[Episode]
    failed: int = 0
    """Episodes that were begun and failed; they are not in ``episodes``."""
    attempt: int = 0
    """How often the group was started again because its worker was lost; with ``group_id`` it identifies a lease."""
    task: str = ""
    """Name of the task that the prompt is of, for the metrics."""

    @property
    def rewards(self) -> np.ndarray:
        """float32[G]."""
        return np.asarray([episode.reward for episode in self.episodes], np.float32)

    @property
    def plays(self) -> np.ndarray:
        """int32[G]: which play of the prompt each episode belongs to."""
        plays = [i if episode.play == POSITION else episode.play for i, episode in enumerate(self.episodes)]
        return np.asarray(plays, np.int32)


# -- named parts of rewards, for the metrics --------------------------------------------------------------------------


def mean_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part over the episodes that have it; ``parts`` are those of each episode."""
    names = dict.fromkeys(name for of_episode in parts for name in of_episode)
    return {name: float(np.mean([of_episode[name] for of_episode in parts if name in of_episode])) for name in names}


# -- tickets: the buffer lets a rollout worker start one group --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to play one group."""

    group_id: int
    """Counts admissions: 0, 1, 2, ..."""
    task_cursor: int
    """Position in the stream of tasks; differs from ``group_id`` only in a resumed run."""
    attempt: int = 0
    """How often the group was begun before, by workers that were lost."""
    bound: GroupBound = UNBOUNDED
    """What the group may hold: the buffer takes no more."""
