"""What an engine says of tokens that it was given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
