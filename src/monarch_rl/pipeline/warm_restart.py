"""A run that has lost trainer ranks or the buffer, and neither its controller nor a host, keeps what still lives.

    the recipe's function     raises, as where the run ends; files are closed
    trainer and buffer        all their processes are killed; new ones start from the newest checkpoint
    engines                   stay: what they draw fails, and they are sent the restored version, and verify it
    rollout workers           stay: they give up what they play, and play for the new buffer
    the recipe's function     is called again, with a run that is resumed

So a run goes on once from each checkpoint. If it is lost again before there is a newer one, or cannot be restored so,
it ends, and whoever started it (``runtime/supervisor.py``, torchrun) starts all of it again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from monarch_rl.checkpoint.folders import complete
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.checkpoints import FOLDER, Checkpoints
from monarch_rl.pipeline.components import RunComponents
from monarch_rl.pipeline.recovery import LOSSES, LostProcesses
from monarch_rl.pipeline.resume import Resumed, open_run, take_folder
from monarch_rl.pipeline.run_folder import may_resume
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.pipeline.start import Actors
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import disk_limit_s, now, on_disk

logger = logging.getLogger("monarch_rl")

LOST = "trainer with its buffer"
"""What messages and ``losses.jsonl`` call both: neither goes on without the other."""


@dataclass(frozen=True)
class Survivors:
    """What a run goes on with."""

    actors: Actors
    """Of which trainer and buffer have been killed."""
    resumed: Resumed
    cause: Exception
    """What ended the run first."""
    lost_at: float
    """Seconds of the event loop's clock."""
    losses: LostProcesses

    def note_returned(self) -> None:
        """The run has what it lost."""
        self.losses.note_returned(LOST, now() - self.lost_at)
        self.losses.close()
        _forget_frames(self.cause)


async def find_survivors(
    error: Exception,
    parts: RunComponents,
    settings: RunSettings,
    cluster: Cluster,
    folder: Path,
    before: Resumed | None,
) -> Survivors | None:
    """What a run that ``error`` has ended goes on with; None if it has to end.

    Args:
        parts: of the run.
        before: what it went on from already.
    """
    interrupts, checkpoints = cluster.interrupts, parts.checkpoints
    may = settings.checkpoint.restarts > 0 and may_resume(error) and not (interrupts.received or interrupts.reason)
    since = 0 if before is None else before.version
    if not may or checkpoints is None:
        return None
    if not await _has_newer_resume(checkpoints, folder, since) or not await _lost(checkpoints):
        return None
    lost_at, losses = now(), LostProcesses(settings.recovery.per_s, folder / LOSSES)
    losses.note_lost(LOST, error)
    losses.close()  # what goes on writes to the same file
    try:
        for name in ("trainer", "buffer"):
            await cluster.kill(cluster.named(name))
        await checkpoints.settled()
        what = f"a whole checkpoint of {folder}"
        resumed = await on_disk(checkpoints.limit_s, what, _open_newer, folder, settings, since)
        print(f"going on with {folder} from {resumed.checkpoint.name}, engines and workers kept: {last_line(error)}")
        await on_disk(disk_limit_s(0), f"{folder} to be cut back", take_folder, settings, resumed)
    except Exception as refused:  # what ended the run first is told
        logger.error("the run does not go on with what it has kept: %s", last_line(refused))
        return None
    return Survivors(parts.actors, resumed, error, lost_at, losses)


def _forget_frames(error: BaseException) -> None:
    """Have ``error``, and what led to it, no longer say where it was raised. The frames there have the run that it
    ended, which has what that went on with, and so all runs before."""
    left, seen = [error], set[int]()
    while left:
        known = left.pop()
        if id(known) in seen:
            continue
        seen.add(id(known))
        known.__traceback__ = None
        left += [other for other in (known.__cause__, known.__context__) if other is not None]
        left += known.exceptions if isinstance(known, BaseExceptionGroup) else ()


async def _has_newer_resume(checkpoints: Checkpoints, folder: Path, since: int) -> bool:
    """Whether there is a checkpoint after step ``since``, or will be."""
    if checkpoints.writing:
        return True
    try:
        there = await on_disk(disk_limit_s(0), f"the checkpoints of {folder}", complete, folder / FOLDER)
    except OSError as error:
        logger.error("the run does not go on with what it has kept: %s", last_line(error))
        return False
    return max(there, default=0) > since


def _open_newer(folder: Path, settings: RunSettings, since: int) -> Resumed:
    """As :func:`open_run`. Raises ValueError, too, if no checkpoint after step ``since`` is whole."""
    resumed = open_run(folder, settings)
    if resumed.version <= since:
        raise ValueError(f"the newest checkpoint that is whole is {resumed.checkpoint.name}, where it went on already")
    return resumed


async def _lost(checkpoints: Checkpoints) -> bool:
    """Whether a trainer rank or the buffer does not answer."""
    try:
        await checkpoints.alive()
    except Exception as error:
        logger.debug("not alive: %s", error)
        return True
    return False
