"""Warm restart: a run that loses trainer ranks or the buffer, but no host, resumes with its surviving processes.

    the recipe's function     raises, as at the end of a run; files are closed
    trainer and buffer        all their processes are killed; new ones start from the newest checkpoint
    engines                   survive: their running requests fail; they receive and verify the restored version
    rollout workers           survive: they abandon their episodes, and work for the new buffer
    the recipe's function     is called again, with the resumed run

A run makes at most one warm restart from each checkpoint. If it fails again before there is a newer one, or the warm
restart fails, the run ends, and whatever started it (``runtime/supervisor.py``, torchrun) restarts it completely.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from monarch_rl.checkpoint.folders import complete
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.checkpoints import FOLDER, Checkpoints, NoCheckpoints
from monarch_rl.pipeline.recovery import FAILURES_FILE, LostProcesses
from monarch_rl.pipeline.resume import Resumed, open_run, take_folder
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.pipeline.start import Actors, check_alive
from monarch_rl.runtime.cluster import Cluster
from monarch_rl.runtime.deadlines import disk_limit_s, now, on_disk
from monarch_rl.runtime.restart import Ending, ending_of

logger = logging.getLogger("monarch_rl")

LOST = "trainer with its buffer"
"""Name of both in messages and ``failures.jsonl``: they are always restarted together."""


@dataclass(frozen=True)
class Survivors:
    """The surviving processes of a run, and the state that it resumes from."""

    actors: Actors
    """The run's actors; trainer and buffer have been killed."""
    resumed: Resumed
    cause: Exception
    """The error that ended the run."""
    lost_at: float
    """Time of the loss, in seconds of the event loop's clock."""
    losses: LostProcesses

    def note_returned(self) -> None:
        """Record that trainer and buffer have been replaced."""
        self.losses.note_returned(LOST, now() - self.lost_at)
        self.losses.close()
        _forget_frames(self.cause)


async def find_survivors(
    error: Exception,
    actors: Actors,
    checkpoints: Checkpoints | NoCheckpoints,
    settings: RunSettings,
    cluster: Cluster,
    folder: Path,
    previous: Resumed | None,
) -> Survivors | None:
    """Prepare the warm restart of a run that ended with ``error``; None if it has to end.

    Args:
        previous: the state from which this run had resumed; None if it had not.
    """
    interrupts = cluster.interrupts
    lost = ending_of(error) is Ending.LOST and not (interrupts.received or interrupts.reason)
    since = 0 if previous is None else previous.version
    if not lost or settings.checkpoint.restarts == 0:
        return None
    if not await _has_newer_checkpoint(checkpoints, folder, since) or not await _lost(actors):
        return None
    lost_at, losses = now(), LostProcesses(settings.recovery.per_s, folder / FAILURES_FILE)
    losses.note_lost(LOST, error)
    losses.close()  # the resumed run writes to the same file
    try:
        for name in ("trainer", "buffer"):
            await cluster.kill(cluster.named(name))
        await checkpoints.settled()
        what = f"a complete checkpoint of {folder}"
        resumed = await on_disk(checkpoints.limit_s, what, _open_newer, folder, settings, since)
        print(f"resuming {folder} from {resumed.checkpoint.name}, engines and workers kept: {last_line(error)}")
        await on_disk(disk_limit_s(0), f"{folder} to be reset to the checkpoint", take_folder, settings, resumed)
    except Exception as failed:  # only logged: the run ends with its first error
        logger.error("warm restart failed: %s", last_line(failed))
        return None
    return Survivors(actors, resumed, error, lost_at, losses)


def _forget_frames(error: BaseException) -> None:
    """Clear the tracebacks of ``error`` and of its causes. Their frames reference the ended run, which references the
    state it had resumed from, and so all earlier runs: none would be freed."""
    remaining, seen = [error], set[int]()
    while remaining:
        current = remaining.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = None
        remaining += [other for other in (current.__cause__, current.__context__) if other is not None]
        remaining += current.exceptions if isinstance(current, BaseExceptionGroup) else ()


async def _has_newer_checkpoint(checkpoints: Checkpoints | NoCheckpoints, folder: Path, since: int) -> bool:
    """Whether a checkpoint after step ``since`` exists or is being written."""
    if checkpoints.writing:
        return True
    try:
        found = await on_disk(disk_limit_s(0), f"the checkpoints of {folder}", complete, folder / FOLDER)
    except OSError as error:
        logger.error("warm restart failed: %s", last_line(error))
        return False
    return max(found, default=0) > since


def _open_newer(folder: Path, settings: RunSettings, since: int) -> Resumed:
    """As :func:`open_run`, but raises ValueError if no checkpoint after step ``since`` is complete."""
    resumed = open_run(folder, settings)
    if resumed.version <= since:
        name = resumed.checkpoint.name
        raise ValueError(f"the newest complete checkpoint is {name}, from which the run has already resumed once")
    return resumed


async def _lost(actors: Actors) -> bool:
    """Whether a trainer rank or the buffer does not answer."""
    try:
        await check_alive(actors.trainer, actors.buffer)
    except Exception as error:
        logger.debug("not alive: %s", error)
        return True
    return False
