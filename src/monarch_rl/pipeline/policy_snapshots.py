"""Frozen models that take over the policy's weights after every so many versions, and are the policy of then.

A disk that refuses a snapshot costs that snapshot: they stay the policy of before until the next one is due.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from monarch.actor import ActorError

from monarch_rl.checkpoint.folders import partial_folder
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.pipeline.frozen import FrozenPool
from monarch_rl.pipeline.start import Actors, save
from monarch_rl.runtime.deadlines import disk_limit_s, on_disk

logger = logging.getLogger("monarch_rl")

KEPT = 2
"""Folders: the newest, and the one before it, which an engine that comes up may still be reading."""


async def take_snapshots(actors: Actors, version: int, folder: Path | None, resumed: bool = False) -> None:
    """Have the engines serve ``version``, which was published, where that is due: where it, or one that was made since
    the version published before it, is a multiple of ``snapshot_every``.

    Args:
        folder: of the run; None if it has none. Snapshots are written to ``snapshots/`` in it, and the older ones
            removed.
        resumed: the run goes on from ``version``: it is due for all, whatever their number of versions is.

    Raises:
        RuntimeError: the run has no folder.
    """
    following = [pool for pool in actors.frozen if pool.plan.snapshot_every]
    due = [pool for pool in following if version and (resumed or pool.is_due(version))]
    for pool in following:
        pool.published_version = version
    if not due:
        return
    if folder is None:
        raise RuntimeError("the run has no folder for snapshots of the policy, which frozen models are to take over")
    written = folder / "snapshots" / f"version-{version:08d}"
    try:
        await save(actors.trainer, written, actors.model_bytes)
    except (ActorError, OSError) as error:  # of a rank, or of the wait for a disk that stalls
        _note_refused(due, version, error)
    else:
        # waits: each load has a deadline
        await asyncio.gather(*(pool.load(written, version) for pool in due))
        for pool in due:
            pool.refused = False
    served = {pool.folder for pool in following}
    try:
        await on_disk(
            disk_limit_s(actors.model_bytes), "older snapshots to be removed", _remove_older, written.parent, served
        )
    except OSError as error:
        logger.warning("older snapshots: not removed: %s", last_line(error))


def _note_refused(due: Sequence[FrozenPool], version: int, error: Exception) -> None:
    for pool in due:
        pool.refused_snapshots += 1
        if not pool.refused:
            has = pool.folder if pool.version is None else f"version {pool.version}"
            logger.error(
                "%s does not take over version %d of the policy: %s; it stays %s. While the run goes on, a later "
                "version is tried when it is due",
                *(pool.kind, version, last_line(error), has),
            )
        pool.refused = True


def _remove_older(folder: Path, served: set[Path]) -> None:
    """Folders that are not the newest ones, and that nobody serves; and what is left of one that was not completed."""
    for partial in folder.glob(partial_folder(Path("version-*")).name):
        shutil.rmtree(partial)
    written = sorted(path for path in folder.glob("version-*") if path.name.removeprefix("version-").isdigit())
    for path in written[:-KEPT]:
        if path not in served:
            shutil.rmtree(path)
            shutil.rmtree(path.with_name(f"{path.name}_adapter"), ignore_errors=True)  # of a run with LoRA
