"""What the buffer says about itself: who holds which group since when, and what the next batch misses."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from monarch_rl.buffer.core import BufferCore
from monarch_rl.runtime.deadlines import now
from monarch_rl.runtime.presence import Wait


@dataclass(frozen=True, slots=True)
class Lease:
    """Who plays a group, and since when (:func:`now`, seconds)."""

    worker: str
    since: float
    attempt: int = 0


def report(core: BufferCore, leases: Mapping[int, Lease]) -> str:
    """One line on the slots, the drops and who holds which group since when."""
    counts, moment = core.counts(), now()
    holders = [
        f"group {group_id} by {lease.worker} for {moment - lease.since:.1f} s" for group_id, lease in leases.items()
    ]
    missing = core.missing()
    playing = [str(group_id) for group_id in missing if group_id is not None]
    unadmitted = len(missing) - len(playing)
    next_batch = f"groups {', '.join(playing)}" if playing else "no admitted group"
    if unadmitted:
        next_batch += f" and {unadmitted} that no worker has asked for"
    return (
        f"policy version {counts.version}, published {counts.published}; slots: "
        f"{'any number' if counts.slots is None else f'{counts.slots_free} free of {counts.slots}'}, "
        f"{counts.playing} playing, {counts.complete} complete, {counts.taken} in training, "
        f"{f'{counts.again} trained and kept for another time, ' if counts.again else ''}"
        f"{counts.unpublished} trained and not published; the next batch misses "
        f"{next_batch if missing else 'nothing'}; {counts.nbytes / 2**20:.1f} MiB; "
        f"held: {'; '.join(holders) or 'none'}; "
        f"dropped so far: {counts.dropped or 'none'}"
    )


def waits(core: BufferCore, leases: Mapping[int, Lease]) -> list[Wait]:
    """What the next batch lacks, as waits: groups on who plays them, new ones on workers and on what frees slots.

    Called on another thread: it only reads what is right at every moment.
    """
    missing = core.missing()
    here = f"{core.groups_per_step - len(missing)} of {core.groups_per_step} groups of the batch are in"
    owed = []
    for group_id in missing:
        lease = leases.get(group_id) if group_id is not None else None
        if lease is not None:
            what = f"group {group_id}, held by {lease.worker} ({here})"
            owed.append(Wait("buffer", what, lease.worker, lease.since, math.inf))
    if None in missing:
        moment = time.monotonic()  # on another thread than the event loop's
        owed.append(Wait("buffer", f"workers to start groups ({here})", "rollout workers", moment, math.inf))
        if core.version > core.published_version:
            what = f"version {core.version} to be served, which frees slots ({here})"
            owed.append(Wait("buffer", what, "controller", moment, math.inf))
    return owed
