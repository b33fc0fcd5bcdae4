"""How tokens are sampled, and what an engine returns for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


class GenerationError(RuntimeError):
    """A request was refused or aborted; the message is the engine's."""


class RequestLost(RuntimeError):
    """A request was not answered: the replica that had it is lost. Another one can be asked."""


class SamplingMaskMissing(GenerationError):
    """The engine drew a token but cannot say from which set: the episode fails, and no other."""


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
    """Makes a request's draws repeatable under the same weights; ``None`` draws freely."""
    top_k: int = 0
    """Draw from the k most likely tokens only; 0 from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens that have this probability together (arXiv:1904.09751)."""
    min_p: float = 0.0
    """Draw from tokens that have at least this share of the most likely token's probability (arXiv:2407.01082)."""
    expert_routes_from: int | None = None
    """Return the expert routes of the tokens from this position on; ``None`` returns none."""
    conversation_version: int | None = None
    """The version that drew the first token of the conversation that this turn continues; ``None`` for a first turn.
    What the engine has read of a conversation it need not read again (``GeneratorSettings.in_flight`` says when)."""

    def __reduce__(self) -> tuple[type[Sampling], tuple[Any, ...]]:
        """For pickle: the way of a dataclass with slots looks at its fields one by one, for every request."""
        return Sampling, (
            self.max_new_tokens,
            self.temperature,
            self.stop_token_ids,
            self.seed,
            self.top_k,
            self.top_p,
            self.min_p,
            self.expert_routes_from,
            self.conversation_version,
        )

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn: then the engine says from which set each was drawn."""
        return bool(self.temperature) and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(slots=True)
class SamplingMasks:
    """The token ids that each of n tokens was drawn from, where the sampler cut others off: n sets of ids, ragged."""

    counts: np.ndarray
    """int32[n]: the size of each set; 0 for a token that was not drawn."""
    ids: np.ndarray
    """int32[sum of counts], set after set."""

    def __post_init__(self) -> None:
        if int(self.counts.sum()) != len(self.ids):
            raise ValueError(f"kept sets of {self.counts.sum()} ids in all have {len(self.ids)}")

    def __getitem__(self, tokens: slice | np.ndarray) -> SamplingMasks:
        """The sets of some of the tokens: a slice of them, bool[n], or their places, ascending."""
        mask = np.zeros(len(self.counts), bool)
        mask[tokens] = True
        return SamplingMasks(self.counts[mask], self.ids[np.repeat(mask, self.counts)])

    def split(self, sizes: Sequence[int]) -> list[SamplingMasks]:
        """The sets of the first ``sizes[0]`` tokens, of the next ``sizes[1]``, ...: the inverse of :meth:`join`."""
        counts = np.split(self.counts, np.cumsum(sizes)[:-1])
        ids = np.split(self.ids, np.cumsum([part.sum() for part in counts])[:-1])
        return [SamplingMasks(*part) for part in zip(counts, ids, strict=True)]

    @classmethod
    def join(cls, parts: Sequence[SamplingMasks]) -> SamplingMasks:
        """The sets of tokens that follow each other."""
        counts, ids = zip(*((part.counts, part.ids) for part in parts), strict=True)
        return cls(np.concatenate(counts), np.concatenate(ids))

    @classmethod
    def none(cls, tokens: int) -> SamplingMasks:
        """Empty sets, of tokens that were not drawn."""
        return cls(np.zeros(tokens, np.int32), np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine drew for one request: arrays of length n."""

    token_ids: np.ndarray
    """int32."""
    logprobs: np.ndarray
    """float32, natural log, of the distribution that drew each token."""
    policy_versions: np.ndarray
    """int32, the version whose weights drew each token; non-decreasing, except where another replica continued for one
    that was lost."""
    finish_reason: str
    """``stop`` or ``length``."""
    sampling_masks: SamplingMasks | None = None
    """The ids that each token was drawn from, with truncated sampling."""
    expert_routes: np.ndarray | None = None
    """uint8 or uint16 [tokens, layers, k], where asked for: the experts by which each token was read, from
    ``expert_routes_from`` to the last but one of the sequence; the last one drawn was not read."""


# -- log-probs of tokens that an engine was given ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens at each of n places, and how likely they are there."""

    token_ids: np.ndarray
    """int32[n, k], the most likely first."""
    logprobs: np.ndarray
    """float32[n, k], natural log, over the whole vocabulary."""
    given: np.ndarray
    """float32[n]: of the tokens that were given there."""

    def below(self, limit: int, k: int) -> TopLogprobs | None:
        """The ``k`` most likely tokens whose ids are below ``limit``; None if fewer of them are here at some place."""
        known = self.token_ids < limit
        if (known.sum(-1) < k).any():
            return None
        places = np.argsort(~known, axis=-1, kind="stable")[:, :k]
        ids, logprobs = (np.take_along_axis(values, places, -1) for values in (self.token_ids, self.logprobs))
        return TopLogprobs(ids, logprobs, self.given)
