"""The checkpoints of a run: when one is due, what goes into it, and which stay. docs/checkpoints.md has the picture.

    between two steps    trainer ranks copy to the host's memory, the buffer remembers its groups: all that a step pays
    meanwhile            both write to .step-000120.partial
    then                 manifest, rename, and older ones are removed

A disk that refuses a checkpoint costs that checkpoint: the run goes on, and the next one is tried when it is due.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from monarch_rl.buffer.actor import Buffer
from monarch_rl.checkpoint import folders
from monarch_rl.checkpoint.folders import FileSum, Manifest, Measurement, Staged
from monarch_rl.checkpoint.settings import CheckpointSettings
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, disk_limit_s, now, on_disk, within
from monarch_rl.trainer.actor import Trainer

logger = logging.getLogger("monarch_rl")

FOLDER = "checkpoints"
"""In the run's folder."""
SAID_AGAIN_S = 3600.0
"""Seconds between two messages that checkpoints fail, while all of them do."""
ALIVE_S = 5.0
"""Seconds for trainer and buffer to answer at the end of a run; Monarch notices a lost process within two."""


class Savers(Protocol):
    """The actors that write a checkpoint."""

    @property
    def trainer(self) -> Trainer: ...

    @property
    def buffer(self) -> Buffer: ...

    @property
    def checkpoint_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run is, as the controller knows it."""

    seconds: float = 0.0
    """Of the run so far."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of the run's own files, by path in its folder."""
    counters: dict[str, Any] = field(default_factory=dict)
    best: Measurement | None = None
    """The best result of an evaluation so far, as ``best.json`` has it."""


class Checkpoints:
    """Makes the checkpoints of one run, and keeps some.

    Args:
        run: the run's folder.
        about: the run's settings, as each checkpoint has them.
        note: shows a line.
        version: that the run begins with.
        generation: how often the run was resumed.
        metric: of an evaluation; that of the largest value stays, if the best one is to stay.
    """

    def __init__(
        self,
        run: Path,
        savers: Savers,
        settings: CheckpointSettings,
        about: dict[str, Any],
        note: Callable[[str], None],
        version: int = 0,
        generation: int = 0,
        metric: str = "",
    ) -> None:
        self.failed = 0
        """That the disk has refused."""
        self._root, self._savers, self._settings, self._note = run / FOLDER, savers, settings, note
        self._generation, self._about = generation, about
        self._begun_version, self._begun_at = version, now()
        self._failure_said_at: float | None = None
        self._shards_failed = False
        """In the last write: trainer ranks may have waited for each other in vain."""
        self._copy_s = self._write_s = 0.0
        self._nbytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._kept = KeptCheckpoints(self._root, settings, metric, lambda: self.limit_s, version or None)

    # -- when ------------------------------------------------------------------------------------------------------

    async def after_step(self, version: int, position: Callable[[], Position], last: bool) -> None:
        """Begin a checkpoint if one is due, if an evaluation found the best result so far, or if this was the ``last``
        step; returns after the local copy. One that is due while the disk still writes the one before is begun after a
        later step, unless it has to be of this version."""
        s, wanted = self._settings, self._kept.wanted
        due = wanted is not None or s.due(version - self._begun_version, now() - self._begun_at)
        due |= last and version != self.saved and s.between_steps
        if due and (last or (wanted is not None and wanted.version == version)):
            await self.settled()
        if due and not self.writing:
            await self.begin(version, position)

    def evaluated(self, found: Measurement, best: bool) -> None:
        """Take what an evaluation found, and whether that is the best so far. The checkpoint that it counts for is made
        after the step, if there is none."""
        self._kept.evaluated(found, best, self._begun_version, self._writing)

    @property
    def saved(self) -> int | None:
        """Version of the newest that is whole."""
        return self._kept.saved

    @property
    def writing(self) -> bool:
        """Whether the disk does not have yet what was begun."""
        return self._writing is not None and not self._writing.done()

    @property
    def limit_s(self) -> float:
        """Seconds for the disk to take a checkpoint, or to give it back."""
        return disk_limit_s(self._savers.checkpoint_bytes) + CALL_DEADLINE_S

    async def settled(self) -> None:
        """Wait until the disk has what was begun. A signal ends this wait alone: the checkpoint is written on."""
        if tasks := [task for task in (self._writing, *self._kept.notes) if task is not None]:
            await asyncio.wait(tasks)  # waits: all that they await has a deadline

    async def now(self, version: int, position: Callable[[], Position]) -> bool:
        """Make a checkpoint at once, for the end of a run; returns whether it is there."""
        await self.settled()
        if self.saved != version:
            await self.begin(version, position)
            await self.settled()
        return self.saved == version

    async def hold(self) -> int:
        """Have the buffer give out no more batches; returns the version that there is after an update under way."""
        call = self._savers.buffer.hold.call_one()
        return await within(CALL_DEADLINE_S, call, "the buffer to give out no more batches", on="buffer")

    async def _staged(self) -> Staged:
        """Have the trainer ranks copy what they hold, after an update that is under way.

        Raises:
            RuntimeError: the ranks hold different versions.
        """
        call = self._savers.trainer.stage.call(self._shards_failed)
        what = "trainer ranks to copy what a checkpoint holds"
        ranks = await within(CALL_DEADLINE_S + disk_limit_s(0), call, what, on="trainer ranks")
        copies = list(ranks.values())
        if len({copy.version for copy in copies}) > 1:
            raise RuntimeError(f"trainer ranks hold versions {sorted(copy.version for copy in copies)}")
        self._shards_failed = False
        return replace(copies[0], seconds=max(copy.seconds for copy in copies))

    async def alive(self) -> None:
        """Raise at once if a trainer rank or the buffer is lost: no checkpoint can be made then."""
        calls = self._savers.trainer.ready.call(), self._savers.buffer.counts.call_one()
        for who, call in zip(("trainer ranks", "buffer"), calls, strict=True):
            await within(ALIVE_S, call, f"{who} to answer before a last checkpoint", on=who)

    def metrics(self) -> dict[str, float]:
        """By the names of docs/metrics.md."""
        values = {"checkpoint/failed": float(self.failed)}
        if self._nbytes:
            values["checkpoint/copy_ms"], values["checkpoint/write_s"] = 1e3 * self._copy_s, self._write_s
            values["checkpoint/mib"] = self._nbytes / 2**20
            values["checkpoint/step"] = float(self.saved or 0)
        return values

    # -- one checkpoint --------------------------------------------------------------------------------------------

    async def begin(self, version: int, position: Callable[[], Position]) -> None:
        """Begin one, due or not, if none is being written; returns after the local copy."""
        self._begun_version, self._begun_at = version, now()
        try:
            at = await on_disk(disk_limit_s(0), "the lines of the run's files", position)
            stage = self._savers.buffer.stage.call_one()
            copy, groups = await asyncio.gather(
                self._staged(), within(CALL_DEADLINE_S, stage, "the buffer to remember its groups", on="buffer")
            )
            if {copy.version, groups} != {version}:
                raise RuntimeError(f"the trainer is at version {copy.version}, the buffer at {groups}")
        except Exception as error:
            self._note_failed(version, error)
            return
        self._copy_s = copy.seconds
        self._writing = asyncio.create_task(self._write(copy, at))

    async def _write(self, copy: Staged, position: Position) -> None:
        started = now()
        try:
            what = f"the folder of the checkpoint of step {copy.version}"
            partial = await on_disk(self.limit_s, what, folders.begin, self._root, copy.version)
            shards = await self._write_parts(partial)
            measured = self._kept.found_for(copy.version)
            manifest = Manifest(
                copy.version,
                copy.optimizer_steps,
                self._generation,
                position.seconds,
                position.files,
                position.counters,
                measured,
                position.best,
                self._about,
                ranks=len(shards),
                files=[file for of_rank in shards for file in of_rank],
            )
            what = f"the checkpoint of step {copy.version} to be flushed"
            folder, manifest = await on_disk(self.limit_s, what, self._finish, partial, manifest)
        except Exception as error:
            self._note_failed(copy.version, error)
            await tidy(self.limit_s, "what was written of it", folders.discard, self._root, copy.version)
            return
        self._failure_said_at = None
        self._write_s, self._nbytes = now() - started, manifest.nbytes
        size = f"{manifest.nbytes / 1e6:,.1f} MB"
        self._note(f"checkpoint of step {copy.version} ({size}, {self._write_s:.1f} s) in {folder}")
        await self._kept.made(copy.version)

    async def _write_parts(self, partial: Path) -> list[list[FileSum]]:
        """Have all write their parts; returns the trainer's files, by rank. Raises what the first failure raised."""
        # The disk is not a process of the run: waiting for a slow one is no stall.
        parts: list[Awaitable[Any]] = [
            self._savers.trainer.write_checkpoint.call(str(partial)),
            self._savers.buffer.write_checkpoint.call_one(str(partial / folders.GROUPS)),
        ]
        writes = [within(self.limit_s, part, f"a part of the checkpoint {partial}", on="the disk") for part in parts]
        answers = await asyncio.gather(*writes, return_exceptions=True)
        self._shards_failed = isinstance(answers[0], BaseException)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        shards: Any = answers[0]
        return list(shards.values())

    def _finish(self, partial: Path, manifest: Manifest) -> tuple[Path, Manifest]:
        files = [*manifest.files, folders.file_sum(partial, partial / folders.GROUPS)]
        manifest = replace(manifest, files=files, packages=versions_of_packages())
        return folders.commit(self._root, manifest), manifest

    def _note_failed(self, version: int, error: Exception) -> None:
        self.failed += 1
        self._kept.wanted = None  # the next one is tried when it is due
        if self._failure_said_at is None or now() - self._failure_said_at >= SAID_AGAIN_S:
            self._failure_said_at = now()
            last = f"the last one is of step {self.saved}" if self.saved else "there is none before it"
            logger.error(
                "no checkpoint of step %d: %s; %s. While the run goes on, the next one is tried when it is due",
                *(version, last_line(error), last),
            )


@cache
def versions_of_packages() -> dict[str, str]:
    """Of all that is installed, by name."""
    return dict(sorted((found.name, found.version) for found in metadata.distributions()))


# -- which checkpoints of a run stay: the newest ones, and the one that evaluated best --------------------------------


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
