"""Which checkpoints of a run stay: the newest ones, and the one whose version an evaluation found to be the best."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch_rl.checkpoint import folders
from monarch_rl.checkpoint.folders import Measurement
from monarch_rl.checkpoint.settings import CheckpointSettings
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.runtime.deadlines import on_disk

logger = logging.getLogger("monarch_rl")


class KeptCheckpoints:
    """Notes in checkpoints what evaluations found, and removes those that do not stay.

    Args:
        root: the folder of all checkpoints.
        metric: of an evaluation; the checkpoint with its largest value stays, if the settings say so.
        limit_s: seconds for the disk.
    """

    def __init__(
        self, root: Path, settings: CheckpointSettings, metric: str, limit_s: Callable[[], float], saved: int | None
    ) -> None:
        self.saved = saved
        """Version of the newest that is whole."""
        self.wanted: Measurement | None = None
        """The best result so far, while no checkpoint has it."""
        self.notes = set[asyncio.Task[None]]()
        """Of what evaluations found, under way."""
        self._root, self._settings, self._limit_s = root, settings, limit_s
        self._metric = metric if settings.keep_best else ""
        self._found: Measurement | None = None
        """By the last evaluation."""
        self._disk = asyncio.Lock()
        """Two that remove folders would meet."""

    def evaluated(self, found: Measurement, best: bool, begun: int, writing: asyncio.Task[None] | None) -> None:
        """Take what an evaluation found. It is noted in the checkpoint of its version, or in the first one after it. If
        there is none and it is the ``best`` result so far, one is wanted.

        Args:
            begun: the version of which a checkpoint was begun last.
            writing: its task.
        """
        if not found.version:  # its weights are those of the model's folder
            return
        self._found = folders.closer(self._found, found)
        if found.version > begun:
            self._want(found, best)
        else:
            note = asyncio.create_task(self._note(found, best, writing))
            self.notes.add(note)
            note.add_done_callback(self.notes.discard)

    def found_for(self, version: int) -> Measurement | None:
        """What counts for a checkpoint that is made now: what was found of its version, or what it was wanted for."""
        found = self._found if self._found is not None and self._found.version == version else self.wanted
        return found if found is not None and found.version <= version else None

    async def made(self, version: int) -> None:
        """Take note of a checkpoint that is whole, with what counts for it."""
        self.saved = version
        if self.wanted is not None and self.wanted.version <= version:
            self.wanted = None
        await self._remove_others()

    def _want(self, found: Measurement, best: bool) -> None:
        if best and self._metric and self._settings.between_steps:
            self.wanted = found

    async def _note(self, found: Measurement, best: bool, writing: asyncio.Task[None] | None) -> None:
        if writing is not None:
            await asyncio.wait([writing])  # waits: all that it awaits has a deadline
        try:
            what = f"the checkpoint of version {found.version}, which was evaluated, to be noted"
            async with self._disk:
                counts = await on_disk(self._limit_s(), what, folders.measure, self._root, found, best)
        except Exception as error:
            logger.warning("the result of version %d is in no checkpoint: %s", found.version, last_line(error))
            return
        if counts:
            await self._remove_others()
        else:
            self._want(found, best)

    async def _remove_others(self) -> None:
        if self.saved is not None:
            async with self._disk:
                kept = self.saved, self._settings.keep, self._metric
                await tidy(self._limit_s(), "older checkpoints", folders.keep, self._root, *kept)


async def tidy(limit_s: float, what: str, work: Callable[..., None], *arguments: Any) -> None:
    """Remove what no longer counts. A disk that does not do it costs nothing but room."""
    try:
        await on_disk(limit_s, f"{what} to be removed", work, *arguments)
    except Exception as error:
        logger.warning("%s: not removed: %s", what, last_line(error))
