"""The checkpoints of a run: when one is due, what it contains, and which ones are kept (docs/checkpoints.md).

    between two steps    trainer ranks copy their state to host memory, the buffer records its groups; steps wait
                         for nothing else
    during later steps   both write to .step-000120.partial
    at the end           the manifest is written, the folder renamed, and older checkpoints are removed

If a checkpoint cannot be written to disk, the run continues, and the next one is tried when it is due.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, cast

from monarch_rl.buffer.actor import Buffer
from monarch_rl.checkpoint import folders
from monarch_rl.checkpoint.folders import FileSum, Manifest, Measurement, Staged
from monarch_rl.checkpoint.settings import CheckpointSettings
from monarch_rl.pipeline.actor_pool import last_line
from monarch_rl.runtime import timeline
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, disk_limit_s, now, on_disk, within
from monarch_rl.runtime.wait_registry import CONTROLLER
from monarch_rl.trainer.actor import Trainer

logger = logging.getLogger("monarch_rl")

FOLDER = "checkpoints"
"""Name of the checkpoints' folder in the run's folder."""
REPEAT_ERROR_S = 3600.0
"""Seconds between error messages while all checkpoints fail."""


class Savers(Protocol):
    """The actors that write a checkpoint."""

    @property
    def trainer(self) -> Trainer: ...

    @property
    def buffer(self) -> Buffer: ...

    @property
    def checkpoint_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The controller's state of a run, stored in each checkpoint."""

    seconds: float = 0.0
    """Duration of the run so far."""
    positions: dict[str, int] = field(default_factory=dict)
    """Sizes of the run's log files in bytes, by path in its folder: where a resumed run continues them."""
    counters: dict[str, Any] = field(default_factory=dict)
    """Run totals that no actor keeps (``Observer.counters``)."""
    best: Measurement | None = None
    """Best evaluation result so far, as in ``best.json``."""
    warm_up_steps: int | None = 0
    """As in the manifest."""
    base_weights: dict[str, int] = field(default_factory=dict)
    """As in the manifest."""


class Checkpoints:
    """Writes the checkpoints of one run, and removes old ones.

    Args:
        run: the run's folder.
        run_settings: the run's settings, stored in each checkpoint.
        note: prints a line.
        before: awaited before each checkpoint; has deadlines of its own.
        version: the version that the run starts from.
        generation: number of times the run was resumed.
        metric: returns the evaluation metric that defines the best checkpoint (largest value), for
            ``checkpoint.keep_best``; "" while there is none.
    """

    def __init__(
        self,
        run: Path,
        savers: Savers,
        settings: CheckpointSettings,
        run_settings: dict[str, Any],
        note: Callable[[str], None],
        before: Callable[[], Awaitable[None]] | None = None,
        version: int = 0,
        generation: int = 0,
        metric: Callable[[], str] = str,
    ) -> None:
        self.failed = 0
        """Number of checkpoints that could not be written."""
        self._root, self._savers, self._settings, self._note = run / FOLDER, savers, settings, note
        self._generation, self._run_settings, self._before = generation, run_settings, before
        self._begun_version, self._begun_at = version, now()
        self._failure_logged_at: float | None = None
        self._shards_failed = False
        """Whether trainer ranks failed in the last write: some may have been left waiting for each other."""
        self._copy_s = self._write_s = 0.0
        self._nbytes = 0
        self._writing: asyncio.Task[None] | None = None
        self.grace_s = settings.grace_s
        """Seconds for a last checkpoint when a signal or an error ends the run; 0 writes none."""
        self._kept = KeptCheckpoints(self._root, settings, metric, lambda: self.limit_s, version or None)

    # -- scheduling ------------------------------------------------------------------------------------------------

    async def after_step(self, version: int, state: Callable[[], ControllerState], last: bool) -> None:
        """Begin a checkpoint if one is due, if an evaluation was the best so far, or if this was the ``last`` step;
        returns after the local copy. While the previous checkpoint is still being written, the new one is postponed to
        a later step, unless it has to be of this version."""
        s, wanted = self._settings, self._kept.wanted
        due = wanted is not None or s.due(version - self._begun_version, now() - self._begun_at)
        due |= last and version != self.saved and s.between_steps
        if due and (last or (wanted is not None and wanted.version == version)):
            await self.settled()
        if due and not self.writing:
            await self.begin(version, state)

    def evaluated(self, found: Measurement, best: bool) -> None:
        """Record an evaluation result, and whether it is the best so far. If no checkpoint covers its version yet, one
        is made after the current step."""
        self._kept.evaluated(found, best, self._begun_version, self._writing)

    @property
    def saved(self) -> int | None:
        """Version of the newest complete checkpoint."""
        return self._kept.saved

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    @property
    def limit_s(self) -> float:
        """Deadline, in seconds, for writing or reading a checkpoint."""
        return disk_limit_s(self._savers.checkpoint_bytes) + CALL_DEADLINE_S

    async def settled(self) -> None:
        """Wait until all writes are done. If this wait is cancelled by a signal, the writes continue."""
        if tasks := [task for task in (self._writing, *self._kept.notes) if task is not None]:
            await asyncio.wait(tasks)  # waits: all that they await has a deadline

    async def now(self, version: int, state: Callable[[], ControllerState]) -> bool:
        """Write a checkpoint immediately, at the end of a run; returns whether it was written."""
        await self.settled()
        if self.saved != version:
            await self.begin(version, state)
            await self.settled()
        return self.saved == version

    async def _staged(self) -> Staged:
        """Have the trainer ranks copy their state, after any update in progress.

        Raises:
            RuntimeError: the ranks hold different versions.
        """
        call = self._savers.trainer.stage.call(self._shards_failed)
        what = "trainer ranks to copy their state for a checkpoint"
        ranks = await within(CALL_DEADLINE_S + disk_limit_s(0), call, what, on="trainer ranks")
        copies = list(ranks.values())
        if len({copy.version for copy in copies}) > 1:
            raise RuntimeError(f"trainer ranks hold versions {sorted(copy.version for copy in copies)}")
        self._shards_failed = False
        return replace(copies[0], seconds=max(copy.seconds for copy in copies))

    def metrics(self) -> dict[str, float]:
        """Metrics, named as in docs/metrics.md."""
        values = {"checkpoint/failed": float(self.failed)}
        if self._nbytes:
            values["checkpoint/copy_ms"], values["checkpoint/write_s"] = 1e3 * self._copy_s, self._write_s
            values["checkpoint/mib"] = self._nbytes / 2**20
            values["checkpoint/step"] = float(self.saved or 0)
        return values

    # -- one checkpoint --------------------------------------------------------------------------------------------

    async def begin(self, version: int, state: Callable[[], ControllerState]) -> None:
        """Begin a checkpoint, whether or not one is due; returns after the local copy. None may be being written."""
        self._begun_version, self._begun_at = version, now()
        try:
            if self._before is not None:
                await self._before()  # waits: it has deadlines
            current = await on_disk(disk_limit_s(0), "the run's files to be flushed", state)
            stage = self._savers.buffer.stage.call_one()
            copy, buffer_version = await asyncio.gather(
                self._staged(), within(CALL_DEADLINE_S, stage, "the buffer to record its groups", on="buffer")
            )
            if {copy.version, buffer_version} != {version}:
                raise RuntimeError(
                    f"version {version} was expected, but the trainer is at version {copy.version} and the buffer at "
                    f"{buffer_version}"
                )
        except Exception as error:
            self._note_failed(version, error)
            return
        self._copy_s = copy.seconds
        self._writing = asyncio.create_task(self._recorded_write(copy, current))

    async def _recorded_write(self, copy: Staged, state: ControllerState) -> None:
        with timeline.span("checkpoint", f"{CONTROLLER}, checkpoints", copy.version):
            await self._write(copy, state)

    async def _write(self, copy: Staged, state: ControllerState) -> None:
        started = now()
        try:
            what = f"the folder of the checkpoint of step {copy.version}"
            partial = await on_disk(self.limit_s, what, folders.begin, self._root, copy.version)
            shards, groups_end = await self._write_parts(partial)
            measured = self._kept.found_for(copy.version)
            manifest = Manifest(
                version=copy.version,
                optimizer_steps=copy.optimizer_steps,
                generation=self._generation,
                seconds=state.seconds,
                positions=state.positions,
                counters=state.counters,
                measured=measured,
                best=state.best,
                warm_up_steps=state.warm_up_steps,
                base_weights=state.base_weights,
                settings=self._run_settings,
                ranks=len(shards),
                files=[file for of_rank in shards for file in of_rank],
            )
            what = f"the checkpoint of step {copy.version} to be flushed"
            folder, manifest = await on_disk(self.limit_s, what, self._finish, partial, manifest, groups_end)
        except Exception as error:
            self._note_failed(copy.version, error)
            await tidy(self.limit_s, "the incomplete checkpoint", folders.discard, self._root, copy.version)
            return
        self._failure_logged_at = None
        self._write_s, self._nbytes = now() - started, manifest.nbytes
        size = f"{manifest.nbytes / 1e6:,.1f} MB"
        step = copy.version - (state.warm_up_steps or 0)
        of_step = f"step {step}" if step else f"warm-up step {copy.version}"
        self._note(f"checkpoint of {of_step} ({size}, {self._write_s:.1f} s) in {folder}")
        await self._kept.made(copy.version)

    async def _write_parts(self, partial: Path) -> tuple[list[list[FileSum]], list[tuple[str, int]]]:
        """Have trainer ranks and buffer write their parts; returns the trainer's files by rank, and where the records
        of the buffer's file end.

        Raises the first error.
        """
        # on="the disk": the disk is no process of the run, so waiting for a slow one is not a stall.
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
        shards, groups_end = cast(list[Any], answers)
        return list(shards.values()), groups_end

    def _finish(self, partial: Path, manifest: Manifest, groups_end: list[tuple[str, int]]) -> tuple[Path, Manifest]:
        files = [*manifest.files, folders.sum_records(partial, partial / folders.GROUPS, groups_end)]
        manifest = replace(manifest, files=files, packages=versions_of_packages())
        return folders.commit(self._root, manifest), manifest

    def _note_failed(self, version: int, error: Exception) -> None:
        self.failed += 1
        self._kept.wanted = None  # the next one is tried when it is due
        if self._failure_logged_at is None or now() - self._failure_logged_at >= REPEAT_ERROR_S:
            self._failure_logged_at = now()
            last = f"the newest checkpoint is of step {self.saved}" if self.saved else "there is no earlier checkpoint"
            logger.error(
                "no checkpoint of step %d: %s; %s. The run continues, and the next checkpoint is tried when it is due",
                version,
                last_line(error),
                last,
            )


class NoCheckpoints:
    """The checkpoints of a run without a folder, or of one whose actors have not started: none is written."""

    grace_s = 0.0
    limit_s = 0.0
    writing = False

    async def after_step(self, version: int, state: Callable[[], ControllerState], last: bool) -> None:
        pass

    def evaluated(self, found: Measurement, best: bool) -> None:
        pass

    async def begin(self, version: int, state: Callable[[], ControllerState]) -> None:
        pass

    async def now(self, version: int, state: Callable[[], ControllerState]) -> bool:
        return False

    async def settled(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


@cache
def versions_of_packages() -> dict[str, str]:
    """Versions of all installed packages, by name."""
    return dict(sorted((found.name, found.version) for found in metadata.distributions()))


# -- retention: the newest checkpoints are kept, and the best-evaluated one -------------------------------------------


class KeptCheckpoints:
    """Records evaluation results in checkpoints, and removes checkpoints that are not kept.

    Args:
        root: the folder of all checkpoints.
        metric: returns the evaluation metric; the checkpoint with its largest value is kept, with
            ``checkpoint.keep_best``.
        limit_s: returns the deadline of a disk operation, in seconds.
        saved: version of the newest complete checkpoint.
    """

    def __init__(
        self,
        root: Path,
        settings: CheckpointSettings,
        metric: Callable[[], str],
        limit_s: Callable[[], float],
        saved: int | None,
    ) -> None:
        self.saved = saved
        """Version of the newest complete checkpoint."""
        self.wanted: Measurement | None = None
        """The best result so far, while no checkpoint covers it."""
        self.notes = set[asyncio.Task[None]]()
        """Tasks that are recording evaluation results in checkpoints."""
        self._root, self._settings, self._limit_s = root, settings, limit_s
        self._metric = metric if settings.keep_best else str
        self._found: Measurement | None = None
        """Result of the last evaluation."""
        self._disk = asyncio.Lock()
        """Serialises disk operations: two concurrent removals of folders would collide."""

    def evaluated(self, found: Measurement, best: bool, begun: int, writing: asyncio.Task[None] | None) -> None:
        """Record an evaluation result in the checkpoint of its version, or in the first one after it. If there is none
        and it is the ``best`` result so far, request one.

        Args:
            begun: version of the checkpoint that was begun last.
            writing: task that writes this checkpoint.
        """
        if not found.version:  # version 0 has the weights of the model's folder
            return
        self._found = folders.closer(self._found, found)
        if found.version > begun:
            self._want(found, best)
        else:
            note = asyncio.create_task(self._note(found, best, writing))
            self.notes.add(note)
            note.add_done_callback(self.notes.discard)

    def found_for(self, version: int) -> Measurement | None:
        """The result to record in a new checkpoint: that of its version, or the one for which it was requested."""
        found = self._found if self._found is not None and self._found.version == version else self.wanted
        return found if found is not None and found.version <= version else None

    async def made(self, version: int) -> None:
        """Register a complete checkpoint, and remove those that are no longer kept."""
        self.saved = version
        if self.wanted is not None and self.wanted.version <= version:
            self.wanted = None
        await self._remove_others()

    def _want(self, found: Measurement, best: bool) -> None:
        if best and self._settings.keep_best and self._settings.between_steps:
            self.wanted = found

    async def _note(self, found: Measurement, best: bool, writing: asyncio.Task[None] | None) -> None:
        if writing is not None:
            await asyncio.wait([writing])  # waits: all that it awaits has a deadline
        try:
            what = f"the evaluation of version {found.version} to be recorded in its checkpoint"
            async with self._disk:
                recorded = await on_disk(self._limit_s(), what, folders.measure, self._root, found, best)
        except Exception as error:
            logger.warning(
                "the evaluation of version %d was recorded in no checkpoint: %s", found.version, last_line(error)
            )
            return
        if recorded:
            await self._remove_others()
        else:
            self._want(found, best)

    async def _remove_others(self) -> None:
        if self.saved is not None:
            async with self._disk:
                kept = self.saved, self._settings.keep, self._metric()
                await tidy(self._limit_s(), "older checkpoints", folders.keep, self._root, *kept)


async def tidy(limit_s: float, what: str, work: Callable[..., None], *arguments: Any) -> None:
    """Remove files that are no longer needed. A failure is only logged: it costs disk space, nothing else."""
    try:
        await on_disk(limit_s, f"{what} to be removed", work, *arguments)
    except Exception as error:
        logger.warning("%s could not be removed: %s", what, last_line(error))
