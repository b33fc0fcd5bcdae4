"""The buffer's core in virtual time: no processes, no sleeping, and the same result for the same seed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from monarch_rl.buffer.core import BufferCore
from monarch_rl.episode.prefixes import PrefixTree
from monarch_rl.episode.serialization import SerializedEpisode, SerializedGroup


@dataclass
class Outcome:
    """Result of a simulation until its last batch was trained."""

    trained: list[int] = field(default_factory=list)
    """Group ids in order of training."""
    seconds: float = 0.0
    trainer_idle_s: float = 0.0
    admitted: int = 0


def drive(
    core: BufferCore, seconds_of: Callable[[int], float], places: int, step_s: float, publish_s: float, steps: int
) -> Outcome:
    """Roll out, train and publish ``steps`` batches.

    Args:
        core: a new buffer core.
        seconds_of: returns the seconds of a group by its id; a token is sampled by the version served at that moment.
        places: maximum number of concurrent groups.
        step_s: seconds of an optimiser step.
        publish_s: seconds until a trained version is served; the next step continues meanwhile.
        steps: optimiser steps.
    """
    out, order, now = Outcome(), itertools.count(), 0.0
    ends: list[tuple[float, int, str, int]] = []
    """Events: time, order among events of the same time, kind, and number."""
    began: dict[int, int] = {}
    training, free_since = False, 0.0
    while len(out.trained) < steps * core.groups_per_step:
        while len(began) < places and (ticket := core.admit()) is not None:
            began[ticket.group_id] = core.published_version
            heapq.heappush(ends, (now + seconds_of(ticket.group_id), next(order), "group", ticket.group_id))
        if not training and (batch := core.take(core.version)) is not None:
            training = True
            out.trained += [group.group_id for group in batch.groups]
            out.trainer_idle_s += now - free_since
            heapq.heappush(ends, (now + step_s, next(order), "step", core.version + 1))
        now, _, what, number = heapq.heappop(ends)
        if what == "group":
            versions = dict.fromkeys((began.pop(number), core.published_version), 1)
            core.submit(
                SerializedGroup(number, number, [SerializedEpisode(0.0, 1, versions, b"")], PrefixTree([0], [0]))
            )
        elif what == "step":
            core.trained(number)
            training, free_since = False, now
            heapq.heappush(ends, (now + publish_s, next(order), "publish", number))
        else:
            core.published(number)
    out.seconds, out.admitted = now, core.counts().admitted
    return out
