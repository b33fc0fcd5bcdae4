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
