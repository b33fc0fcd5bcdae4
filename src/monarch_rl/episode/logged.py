"""Which groups are logged with their tokens: a rule by group id, so that the worker that runs a group and the trainer
ranks that train it agree without a message."""

from __future__ import annotations

import functools
from typing import NamedTuple

from monarch_rl.episode.shard import sample_groups


class LoggedGroups(NamedTuple):
    """The ids of logged groups: from each ``per_step`` consecutive ids, ``groups`` sampled at random."""

    groups: int
    """Number of logged groups (``rollout.logged_groups``); 0 logs none."""
    per_step: int
    """Groups of a step's batch (``groups_per_step``)."""
    seed: int = 0

    def __contains__(self, group_id: object) -> bool:
        if not isinstance(group_id, int) or group_id < 0 or not self.groups:
            return False
        block, position = divmod(group_id, self.per_step)
        return position in _sampled(self, block)


NOT_LOGGED = LoggedGroups(groups=0, per_step=1)
"""No group is logged."""


@functools.lru_cache(64)
def _sampled(logged: LoggedGroups, block: int) -> frozenset[int]:
    return frozenset(sample_groups(logged.per_step, logged.groups, f"rollouts {logged.seed}/{block}"))
