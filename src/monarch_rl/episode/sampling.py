"""Sampling parameters, and what an engine returns for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine samples tokens."""

    max_new_tokens: int = 64
    """Maximum tokens sampled in a turn; the engine stops there with finish reason ``length``."""
    temperature: float = 1.0
    """0 is greedy. Log-probs are of the tempered distribution."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a turn. The stop token is part of the turn and is trained."""
    seed: int | None = None
    """Makes the samples of a request reproducible under the same weights; ``None``: not reproducible."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0: from all tokens."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens whose total probability reaches this (arXiv:1904.09751)."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability (arXiv:2407.01082)."""
    expert_routes_from: int | None = None
    """Return the expert routes of the tokens from this position on; ``None`` returns none."""
    conversation_version: int | None = None
    """Version that sampled the first token of the conversation that this turn continues; ``None`` for a first turn. It
    lets the engine reuse the conversation's cached prefix (see ``GeneratorSettings.in_flight`` for when it may)."""

    def __reduce__(self) -> tuple[type[Sampling], tuple[Any, ...]]:
        """Fast pickling: the default of a dataclass with slots inspects its fields one by one, for every request."""
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
        """Whether some tokens cannot be sampled. The engine then returns a sampling mask for each token."""
        return bool(self.temperature) and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(slots=True)
class SamplingMasks:
    """The sets of token ids from which each of n tokens was sampled, if the sampler truncates: n sets, ragged."""

    counts: np.ndarray
    """int32[n]: size of each set; 0 for a token that was not sampled."""
    ids: np.ndarray
    """int32[sum of counts]: ids of all sets, one set after the other."""

    def __post_init__(self) -> None:
        if int(self.counts.sum()) != len(self.ids):
            raise ValueError(
                f"the counts of sampling masks add up to {self.counts.sum()} ids, but there are {len(self.ids)}"
            )

    def __getitem__(self, tokens: slice | np.ndarray) -> SamplingMasks:
        """The sets of selected tokens; ``tokens``: a slice, bool[n], or ascending indices."""
        mask = np.zeros(len(self.counts), bool)
        mask[tokens] = True
        return SamplingMasks(self.counts[mask], self.ids[np.repeat(mask, self.counts)])

    def split(self, sizes: Sequence[int]) -> list[SamplingMasks]:
        """The sets of the first ``sizes[0]`` tokens, of the next ``sizes[1]``, ...: the inverse of :meth:`join`."""
        counts = np.split(self.counts, np.cumsum(sizes)[:-1])
        ids = np.split(self.ids, np.cumsum([chunk.sum() for chunk in counts])[:-1])
        return [SamplingMasks(*chunk) for chunk in zip(counts, ids, strict=True)]

    @classmethod
    def join(cls, parts: Sequence[SamplingMasks]) -> SamplingMasks:
        """Concatenate the sets of consecutive tokens."""
        counts, ids = zip(*((part.counts, part.ids) for part in parts), strict=True)
        return cls(np.concatenate(counts), np.concatenate(ids))

    @classmethod
    def none(cls, tokens: int) -> SamplingMasks:
        """Empty sets, for ``tokens`` tokens that were not sampled."""
        return cls(np.zeros(tokens, np.int32), np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that the engine sampled for one request: arrays of length n."""

    token_ids: np.ndarray
    """int32."""
    logprobs: np.ndarray
    """float32: natural log-prob of each token under the distribution that it was sampled from."""
    policy_versions: np.ndarray
    """int32: version whose weights sampled each token; non-decreasing, except where another replica continued after a
    replica was lost."""
    finish_reason: str
    """``stop`` or ``length``."""
    sampling_masks: SamplingMasks | None = None
    """The sampling mask of each token; None unless sampling is truncated."""
    expert_routes: np.ndarray | None = None
    """uint8 or uint16 [tokens, layers, k], if requested: the experts to which each token was routed, from
    ``expert_routes_from`` to the last but one of the sequence. The last sampled token was never an input."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds from the request to the answer, set by the dispatcher."""
    replica: int | None = field(default=None, compare=False)
    """Index of the replica that sampled it, or its last part; set by the dispatcher."""


# -- log-probs of tokens that the engine received as input ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens at each of n positions, with their log-probs."""

    token_ids: np.ndarray
    """int32[n, k], the most likely first."""
    logprobs: np.ndarray
    """float32[n, k], natural log, over the whole vocabulary."""
    given: np.ndarray
    """float32[n]: log-probs of the actual input tokens at these positions."""

    def below(self, limit: int, k: int) -> TopLogprobs | None:
        """The ``k`` most likely tokens with ids below ``limit``; None if some position has fewer of them."""
        allowed = self.token_ids < limit
        if (allowed.sum(-1) < k).any():
            return None
        chosen = np.argsort(~allowed, axis=-1, kind="stable")[:, :k]
        ids, logprobs = (np.take_along_axis(values, chosen, -1) for values in (self.token_ids, self.logprobs))
        return TopLogprobs(ids, logprobs, self.given)
