"""Groups made of versions only, and cores built in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from monarch_rl.buffer.core import BufferCore
from monarch_rl.buffer.ledger import Counts
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.episode import Episode, Group, Turn
from monarch_rl.episode.prefixes import PrefixTree
from monarch_rl.episode.sampling import Completion
from monarch_rl.episode.serialization import SerializedEpisode, SerializedGroup


def episode(versions: Sequence[int], reward: float = 0.0, prompt: int = 2) -> Episode:
    """``prompt`` context tokens, then one sampled token per entry of ``versions``."""
    n = len(versions)
    sampled = Completion(np.arange(n), np.full(n, -1.0), np.asarray(versions, np.int32), "stop")
    return Episode([Turn.from_completion(list(range(prompt)), sampled)], reward, "stop")


def group(group_id: int, *versions: Sequence[int]) -> Group:
    """An episode for each list of versions, with rewards 0, 1, ..."""
    return Group(group_id, group_id, [episode(v, reward=float(i)) for i, v in enumerate(versions)])


def packed(
    group_id: int, *versions: Sequence[int], attempt: int = 0, failed: int = 0, equal: bool = False, nbytes: int = 0
) -> SerializedGroup:
    """What the buffer reads of :func:`group`'s bytes, without them. ``equal``: all rewards are."""
    episodes = [
        SerializedEpisode(0.0 if equal else float(i), 2 + len(v), dict(Counter(v)), b"") for i, v in enumerate(versions)
    ]
    separate = PrefixTree(list(range(len(episodes))), [0] * len(episodes))
    return SerializedGroup(group_id, group_id, episodes, separate, failed, attempt, bytes(nbytes))


def core(groups_per_step: int, max_policy_lag: int | None, version: int = 0, **settings: Any) -> BufferCore:
    """A core in strict order unless ``settings`` change it."""
    if settings.get("late", "wait") == "wait":
        settings.setdefault("window", 0)
    return BufferCore(groups_per_step, BufferSettings(max_policy_lag, **settings), version)


def mean_lag(counts: Counts) -> float:
    """Over all trained tokens; nan before the first."""
    total = sum(counts.lag_counts)
    return sum(lag * count for lag, count in enumerate(counts.lag_counts)) / total if total else float("nan")
