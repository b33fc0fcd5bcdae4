"""What is left out of training, and why: the rules of the settings, and the assertion behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from monarch_rl.buffer.ledger import EQUAL_REWARDS, LATE, PARTIAL, REJECTED, STALE
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.packed import PackedGroup


@dataclass(frozen=True, slots=True)
class LagLimit:
    """What is left out of training above a lag: the whole group, or its tokens above the limit."""

    lag: int
    mask: bool
    reason: str

    def drops(self, group: PackedGroup, version: int) -> bool:
        decisive = group.newest_version if self.mask else group.oldest_version
        return decisive is not None and version - decisive > self.lag


def token_lags(groups: Iterable[PackedGroup], version: int, oldest: int | None, bound: int | None) -> np.ndarray:
    """Tokens to train by lag against ``version``: int64[bound + 1], or as long as needed without a bound.

    Raises:
        ValueError: a token would be trained whose lag is negative or above the bound.
    """
    by_lag: Counter[int] = Counter()
    for group in groups:
        for episode in group.episodes:
            for drawn_by, count in episode.tokens_by_version.items():
                if oldest is not None and drawn_by < oldest:
                    continue
                if version < drawn_by or (bound is not None and version - drawn_by > bound):
                    raise ValueError(
                        f"group {group.group_id} has {count} tokens of version {drawn_by} in the batch that updates "
                        f"version {version}; the bound is {bound}"
                    )
                by_lag[version - drawn_by] += count
    length = 1 + (max(by_lag, default=0) if bound is None else bound)
    return np.asarray([by_lag[lag] for lag in range(length)], np.int64)


def tokens_before(oldest: int | None, groups: Iterable[PackedGroup]) -> int:
    """Trainable tokens that versions before ``oldest`` drew."""
    if oldest is None:
        return 0
    by_version = (item for group in groups for episode in group.episodes for item in episode.tokens_by_version.items())
    return sum(tokens for drawn_by, tokens in by_version if drawn_by < oldest)


class Rules:
    """The rules of ``settings`` for batches of ``groups_per_step`` groups."""

    def __init__(self, settings: BufferSettings, groups_per_step: int) -> None:
        self._partial = settings.partial
        self._equal_rewards = settings.max_filtered * groups_per_step if settings.drop_equal_rewards else 0
        self.filtered = 0
        """Groups dropped for their equal rewards since the last batch was trained."""
        self._limits: list[LagLimit] = []
        if settings.max_policy_lag is not None:
            reason = STALE if settings.late == "wait" else LATE
            self._limits.append(LagLimit(settings.max_policy_lag, settings.late == "mask", reason))
        if settings.reject_lag is not None:
            self._limits.append(LagLimit(settings.reject_lag, settings.reject == "mask", REJECTED))

    def oldest(self, version: int) -> int | None:
        """The oldest version whose tokens may be trained in the update of ``version``; None is any."""
        return version - min(limit.lag for limit in self._limits) if self._limits else None

    def lag_reason(self, group: PackedGroup, version: int) -> str | None:
        """Why the group cannot be in the update of ``version``, or of later ones; None if it can."""
        return next((limit.reason for limit in self._limits if limit.drops(group, version)), None)

    def on_arrival(self, group: PackedGroup, version: int) -> str | None:
        """Why a group that was just put is left out of training; None if it is kept."""
        if group.failed and self._partial == "drop":
            return PARTIAL
        # Beyond this number they are trained: to refill the batch without end would be a hang.
        if self.filtered < self._equal_rewards and rewards_are_equal(group):
            self.filtered += 1
            return EQUAL_REWARDS
        return self.lag_reason(group, version)


def rewards_are_equal(group: PackedGroup) -> bool:
    """Whether all sequences have one reward, or those of each seat."""
    return len({(episode.seat, episode.reward) for episode in group.episodes}) == len(
        {episode.seat for episode in group.episodes}
    )
