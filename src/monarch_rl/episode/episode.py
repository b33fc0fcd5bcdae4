"""The data contract: what a policy generated, token by token, and which version sampled each token.

Shapes: ``n`` is the number of tokens of a turn. Tokens are stored as arrays per turn, never as objects per token.
Token-in, token-out: ``token_ids`` are the ids that the engine received and the ids that it sampled; text is never
tokenised a second time.

A :class:`Group` (all episodes of one prompt) is sent between processes and stored on disk as bytes
(``serialization.py``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from monarch_rl.episode.admission_steps import AdmissionSteps
from monarch_rl.episode.group_bound import UNBOUNDED, GroupBound
from monarch_rl.episode.sampling import Completion, SamplingMasks

POSITION = -1
"""Default of ``Episode.rollout``: the episode's position in the group."""
NO_VERSION = -1
"""``policy_versions`` of a token that no policy sampled (prompt and environment tokens)."""
VersionSpan = tuple[int, int, bool]
"""Consecutive tokens of the same version and trainability: number of tokens, policy version, whether trainable."""


@dataclass(slots=True)
class Turn:
    """One request to the engine: the tokens that it received (prompt, environment) and the tokens that it sampled."""

    token_ids: np.ndarray
    """int32[n]."""
    logprobs: np.ndarray
    """float32[n]; 0 where not trainable."""
    policy_versions: np.ndarray
    """int32[n]; ``NO_VERSION`` where not trainable."""
    trainable: np.ndarray
    """bool[n]; True for tokens that the policy sampled."""
    sampling_masks: SamplingMasks | None = None
    """n sets; empty where not trainable. None if the sampler did not truncate the distribution."""
    reward: float | None = None
    """Reward of this turn alone (a process reward), or None. The episode's reward does not depend on it."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """float32[n] by name, 0 where not trainable: per-token values that objectives and advantages read. All turns of a
    group have the same columns."""
    seconds: float = 0.0
    """Seconds that the turn was waited for. Stays on the worker that ran the episode, as does ``replica``."""
    replica: int | None = None
    """Index of the replica that generated it."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.policy_versions), len(self.trainable)}
        if self.sampling_masks is not None:
            lengths.add(len(self.sampling_masks.counts))
        if len(lengths) != 1:
            raise ValueError(f"the arrays of a turn must have one length, got {sorted(lengths)}")

    @property
    def spans(self) -> list[VersionSpan]:
        """The turn split into spans of one version and trainability: ``(tokens, policy version, trainable)``."""
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
    def from_spans(
        cls,
        spans: list[VersionSpan],
        token_ids: np.ndarray,
        trainable_logprobs: np.ndarray,
        sampling_masks: SamplingMasks | None = None,
        trainable_columns: Mapping[str, np.ndarray] | None = None,
    ) -> Turn:
        """The inverse of :attr:`spans`.

        Args:
            spans: spans of the whole turn.
            token_ids: int32[n].
            trainable_logprobs: float32[trainable tokens].
            sampling_masks: sampling masks of the trainable tokens only.
            trainable_columns: float32[trainable tokens] by name.
        """
        # Slices of whole arrays: a turn has few spans, and for so few np.repeat takes longer.
        mask, versions, start = np.zeros(len(token_ids), bool), np.empty(len(token_ids), np.int32), 0
        for length, version, is_trainable in spans:
            end = start + length
            mask[start:end], versions[start:end] = is_trainable, version
            start = end
        if start != len(token_ids):
            raise ValueError(f"the spans of a turn cover {start} of its {len(token_ids)} tokens")
        logprobs = _spread(mask, trainable_logprobs)
        columns = {name: _spread(mask, values) for name, values in (trainable_columns or {}).items()}
        if sampling_masks is not None:
            counts = np.zeros(len(token_ids), np.int32)
            counts[mask] = sampling_masks.counts
            sampling_masks = SamplingMasks(counts, sampling_masks.ids)
        return cls(token_ids, logprobs, versions, mask, sampling_masks, columns=columns)

    @classmethod
    def from_completion(cls, context_ids: list[int], completion: Completion) -> Turn:
        """Concatenate the tokens that the engine received (not trainable) and those that it sampled.

        Raises ValueError unless the completion has one log-prob and one version per token.
        """
        context, sampled = len(context_ids), len(completion.token_ids)
        if not sampled == len(completion.logprobs) == len(completion.policy_versions):
            raise ValueError(
                f"a completion of {sampled} tokens has {len(completion.logprobs)} log-probs and "
                f"{len(completion.policy_versions)} versions"
            )
        token_ids = np.empty(context + sampled, np.int32)
        token_ids[:context], token_ids[context:] = context_ids, completion.token_ids
        logprobs = np.zeros(context + sampled, np.float32)
        logprobs[context:] = completion.logprobs
        versions = np.full(context + sampled, NO_VERSION, np.int32)
        versions[context:] = completion.policy_versions
        trainable = np.zeros(context + sampled, bool)
        trainable[context:] = True
        sampling_masks = completion.sampling_masks
        if sampling_masks is not None:
            sampling_masks = SamplingMasks.join([SamplingMasks.none(context), sampling_masks])
        return cls(
            token_ids,
            logprobs,
            versions,
            trainable,
            sampling_masks,
            seconds=completion.seconds,
            replica=completion.replica,
        )


def _spread(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float32[n]: the elements of ``values``, in order, where ``mask`` (bool[n]) is set, and 0 elsewhere."""
    spread = np.zeros(len(mask), np.float32)
    spread[mask] = values
    return spread


class Fork(NamedTuple):
    """Where a sequence branches off an earlier one of its rollout."""

    sequence: int
    """Index of the earlier sequence among the sequences of the rollout."""
    turns: int
    """Number of leading turns that both share. They are trained in the earlier sequence, and are context here."""


@dataclass(slots=True)
class EpisodeTimes:
    """When an episode ran, and what it waited for besides the policy's turns. Stays on the worker that ran it."""

    began: float = field(default_factory=time.time)
    """Unix time in seconds."""
    ended: float = 0.0
    """Unix time in seconds."""
    tool_s: float = 0.0
    """Seconds in ``run_tools``, over all calls."""
    score_s: float = 0.0
    """Seconds in which scores were waited for, over all scores."""


@dataclass(slots=True)
class Episode:
    """One sequence of one rollout of a prompt. A rollout with seats or branches has several."""

    turns: list[Turn]
    reward: float
    finish_reason: str
    """Why it ended: ``stop``, ``length`` (limit of the last turn), ``context`` (the context window is full), ``turns``
    (``rollout.max_turns``)."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values for later inspection (texts, the scorer's details); training never reads them."""
    expert_routes: np.ndarray | None = None
    """uint8 or uint16 [n - 1, layers, k], if recorded: the experts to which the engine routed each token except the
    last, in each MoE layer."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named components of the reward, for the metrics and for advantages that read them."""
    seat: str = ""
    """Name of the player whose sequence it is, in a rollout with several players."""
    rollout: int = POSITION
    """Index of the rollout of the prompt that it belongs to, 0, 1, ...; ``POSITION``, until the group is serialized,
    means its own position in the group."""
    fork: Fork | None = None
    """Where it branches off an earlier sequence of its rollout; None if it does not."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The whole conversation, as JSON objects with role and content. Stays on the worker that ran the episode."""
    answer: str = ""
    """Text of the last turn, without reasoning and tool calls. Stays on the worker as well."""
    times: EpisodeTimes | None = None
    """Shared by all sequences of the rollout."""

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
    def sampled(self) -> np.ndarray:
        """bool[n] over all turns: tokens that the policy sampled for training, including those that have since been
        masked for their lag."""
        return self.trainable | (self.policy_versions != NO_VERSION)

    @property
    def sampling_masks(self) -> SamplingMasks | None:
        """Sampling masks of all turns; None if no turn has them. Raises ValueError if only some turns have them."""
        sets = [turn.sampling_masks for turn in self.turns if turn.sampling_masks is not None]
        if len(sets) not in (0, len(self.turns)):
            raise ValueError(f"{len(sets)} of the {len(self.turns)} turns of an episode have sampling masks")
        return SamplingMasks.join(sets) if sets else None

    def column(self, name: str) -> np.ndarray:
        """float32[n] over all turns. Raises KeyError if a turn has no such column."""
        return np.concatenate([turn.columns[name] for turn in self.turns])

    def fill_column(self, name: str, values: np.ndarray) -> None:
        """Set a column of all turns.

        Args:
            name: name of the column.
            values: float[n], one for each token of the episode; values of tokens that are not trainable are ignored.

        Raises:
            ValueError: the number of values differs from the number of tokens.
        """
        if np.shape(values) != (self.num_tokens,):
            raise ValueError(
                f"column {name} of an episode of {self.num_tokens} tokens has values of shape {list(np.shape(values))}:"
                " provide one value per token, prompts included"
            )
        ends = np.cumsum([len(turn.token_ids) for turn in self.turns])
        for turn, of_turn in zip(self.turns, np.split(np.asarray(values), ends[:-1]), strict=True):
            turn.columns[name] = np.where(turn.trainable, of_turn, 0).astype(np.float32)

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_trainable(self) -> int:
        return sum(int(np.count_nonzero(turn.trainable)) for turn in self.turns)


@dataclass(slots=True)
class Group:
    """The episodes of one prompt, which advantages compare with each other."""

    group_id: int
    """Unique in a run; ids follow the order of admission."""
    task_index: int
    """Position of the prompt in the stream of tasks."""
    episodes: list[Episode]
    failed: int = 0
    """Number of episodes that started and failed; they are not in ``episodes``."""
    attempt: int = 0
    """Number of the attempt: it grows whenever the group is restarted because its worker was lost. With ``group_id`` it
    identifies a lease."""
    task: str = ""
    """Name of the prompt's task, for the metrics."""
    success_reward: float | None = None
    """See :attr:`monarch_rl.tasks.task.Task.success_reward`."""

    @property
    def rewards(self) -> np.ndarray:
        """float32[G]."""
        return np.asarray([episode.reward for episode in self.episodes], np.float32)

    @property
    def rollouts(self) -> np.ndarray:
        """int32[G]: index of the rollout that each episode belongs to."""
        rollouts = [i if episode.rollout == POSITION else episode.rollout for i, episode in enumerate(self.episodes)]
        return np.asarray(rollouts, np.int32)


# -- reward components, for the metrics -------------------------------------------------------------------------------


def mean_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each reward component over the episodes that have it; ``parts``: the components of each episode."""
    names = dict.fromkeys(name for of_episode in parts for name in of_episode)
    return {name: float(np.mean([of_episode[name] for of_episode in parts if name in of_episode])) for name in names}


# -- tickets: the buffer's permission to start one group --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to roll out one group."""

    group_id: int
    """Number of the admission: 0, 1, 2, ..."""
    task_cursor: int
    """Position in the stream of tasks; differs from ``group_id`` only in a resumed run."""
    steps: AdmissionSteps
    """The steps for which this group and earlier ones are admitted."""
    attempt: int = 0
    """Number of the attempt: it grows whenever the group is restarted because its worker was lost."""
    bound: GroupBound = UNBOUNDED
    """Maximum sequences and tokens of the group; the buffer accepts no more."""
