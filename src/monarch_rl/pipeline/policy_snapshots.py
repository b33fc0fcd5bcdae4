"""Frozen models that load a snapshot of the policy's weights every ``snapshot_every`` versions.

If a snapshot cannot be written to disk, it is skipped: the models keep their weights until the next one is due.
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

SNAPSHOTS_KEPT = 2
"""Snapshot folders kept: the newest, and the one before it, which a starting engine may still be reading."""


async def take_snapshots(actors: Actors, version: int, folder: Path | None, resumed: bool = False) -> None:
    """Have frozen models load the published ``version`` if a snapshot is due: if a multiple of ``snapshot_every`` lies
    after the previously published version and up to this one.

    Args:
        folder: the run's folder; None if it has none. Snapshots are written to its ``snapshots/``, and older ones are
            removed.
        resumed: the run resumes from ``version``; a snapshot is then due for all models with ``snapshot_every``.

    Raises:
        RuntimeError: a snapshot is due, but the run has no folder.
    """
    following = [pool for pool in actors.frozen if pool.plan.snapshot_every]
    due = [pool for pool in following if version and (resumed or pool.is_due(version))]
    for pool in following:
        pool.published_version = version
    if not due:
        return
    if folder is None:
        raise RuntimeError("the run has no folder for the policy snapshots that its frozen models are to load")
    written = folder / "snapshots" / f"version-{version:08d}"
    try:
        await save(actors.trainer, written, actors.model_bytes)
    except (ActorError, OSError) as error:  # a rank failed, or the wait for a stalled disk timed out
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
        logger.warning("older policy snapshots could not be removed: %s", last_line(error))


def _note_refused(due: Sequence[FrozenPool], version: int, error: Exception) -> None:
    for pool in due:
        pool.refused_snapshots += 1
        if not pool.refused:
            current = pool.folder if pool.version is None else f"version {pool.version}"
            logger.error(
                "%s cannot load version %d of the policy: %s. It keeps serving %s; the run continues, and the next "
                "snapshot is tried when it is due",
                pool.kind,
                version,
                last_line(error),
                current,
            )
        pool.refused = True


def _remove_older(folder: Path, served: set[Path]) -> None:
    """Remove snapshots that are neither among the newest nor served, and the remains of incomplete ones."""
    for partial in folder.glob(partial_folder(Path("version-*")).name):
        shutil.rmtree(partial)
    written = sorted(path for path in folder.glob("version-*") if path.name.removeprefix("version-").isdigit())
    for path in written[:-SNAPSHOTS_KEPT]:
        if path not in served:
            shutil.rmtree(path)
            shutil.rmtree(path.with_name(f"{path.name}_adapter"), ignore_errors=True)  # written with LoRA
