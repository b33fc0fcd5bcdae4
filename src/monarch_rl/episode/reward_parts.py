"""Named parts of rewards, for the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def means_of_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part over the episodes that have it; ``parts`` are those of each episode."""
    names = dict.fromkeys(name for of_episode in parts for name in of_episode)
    return {name: float(np.mean([of_episode[name] for of_episode in parts if name in of_episode])) for name in names}
