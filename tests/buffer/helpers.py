"""Groups made of versions only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from monarch_rl.episode import Completion, Episode, Group, Turn


def episode(versions: Sequence[int], reward: float = 0.0, prompt: int = 2) -> Episode:
    """``prompt`` context tokens, then one token drawn by each version."""
    n = len(versions)
    drawn = Completion(np.arange(n), np.full(n, -1.0), np.asarray(versions, np.int32), "stop")
    return Episode([Turn.from_completion(list(range(prompt)), drawn)], reward, "stop")


def group(group_id: int, *versions: Sequence[int]) -> Group:
    return Group(group_id, group_id, [episode(v, reward=float(i)) for i, v in enumerate(versions)])
