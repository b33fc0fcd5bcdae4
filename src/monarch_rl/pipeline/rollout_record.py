"""``rollouts/`` of a run: ended episodes, and the trainer's values of logged groups' tokens (docs/run_folder.md)."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.episode.shard import TokenRecord
from monarch_rl.observe.cpu_clock import CpuClock
from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.pieces import PieceLog
from monarch_rl.pipeline.actor_pool import ANSWER_DEADLINE_S, ActorPool, last_line
from monarch_rl.pipeline.run_folder import ROLLOUTS
from monarch_rl.rollout.transcripts import as_line, packed
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.trainer.actor import Trainer

logger = logging.getLogger("monarch_rl")

TAKE_S = 2.0
"""Seconds between two calls that take the workers' rows. A worker that is lost has not handed over more than that."""


NEWEST = 16
"""Rows of trained episodes that are kept for trackers."""
TRAINED = '{"kind": "train"'
"""Beginning of their lines."""
QUEUED_BYTES = 64 * 2**20
"""Most characters that wait for the disk; further lines are counted, and lost."""


class RolloutRecord:
    """Writes the rows of episodes that workers hand over, and the token records of trainer ranks.

    Args:
        folder: the run's folder.
        logged: the groups that are recorded with their tokens.
        nbytes: maximum size of both logs together.
    """

    def __init__(
        self, trainer: Trainer, workers: ActorPool[RolloutWorker], folder: Path, logged: LoggedGroups, nbytes: int
    ) -> None:
        self._trainer, self._workers, self._logged = trainer, workers, logged
        self.episodes = PieceLog(folder / ROLLOUTS, "episodes", nbytes // 2)
        self.tokens = PieceLog(folder / ROLLOUTS, "tokens", nbytes // 2)
        self._disk = DiskThread("rollouts", self._close)
        self._taking = asyncio.Lock()
        self._newest: deque[str] = deque(maxlen=NEWEST)
        self._failed = False
        """Whether a failure to take rows has been logged."""
        self._skipped, self._queued, self._cpu = 0, 0, CpuClock()
        self._lock = threading.Lock()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Take the workers' rows every :data:`TAKE_S` during the block, and once more at its end."""
        ended = asyncio.Event()
        taking = asyncio.create_task(self._take_until(ended))
        try:
            yield
        finally:
            ended.set()
            await asyncio.wait([taking])  # waits: for calls with a deadline

    async def _take_until(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), TAKE_S)
            await self.take()

    async def take(self) -> None:
        """Take the rows of all workers, and queue them to be written. Never raises: rows are not worth a run."""
        async with self._taking:  # waits: for a call with a deadline; a checkpoint needs the rows that it brings, too
            try:
                answers = await self._workers.ask(
                    ANSWER_DEADLINE_S, "to hand over its rows", lambda _, worker: worker.take_rows.call_one()
                )
            except Exception as error:
                if not self._failed:
                    logger.error("the rows of ended episodes cannot be taken: %s", last_line(error))
                self._failed = True
                return
        self._failed = False
        for rows in answers.values():
            self._skipped += rows.skipped
            self._cpu.add(rows.cpu_s)
            if rows.lost:
                self.episodes.lose(rows.lost, "workers end episodes faster than the run writes them")
            if rows.lines:
                self._newest.extend(line for line in rows.lines if line.startswith(TRAINED))
                self._append(self.episodes, rows.lines)

    def newest(self) -> Callable[[], list[dict[str, Any]]]:
        """Returns a function that parses the newest rows of episodes that were sampled for training."""
        lines = tuple(self._newest)
        return lambda: [json.loads(line) for line in lines]

    async def token_lines(self) -> list[str]:
        """Lines of the sequences of logged groups that the last step trained, for :meth:`append_tokens`."""
        if not self._logged.groups:
            return []
        asking = self._trainer.token_records.call()
        answers = await within(CALL_DEADLINE_S, asking, "the records of trained tokens", on="trainer ranks")
        with self._cpu.running():
            # Tensor-parallel ranks return the same records.
            found = {(one.group_id, one.attempt, one.place): one for of_rank in answers.values() for one in of_rank}
            return [_token_line(found[key]) for key in sorted(found)]

    def append_tokens(self, lines: list[str]) -> None:
        """Write lines that :meth:`token_lines` returned."""
        if lines:
            self._append(self.tokens, lines)

    @property
    def lost(self) -> int:
        """Number of lines that are not on disk."""
        return self.episodes.lost + self.tokens.lost

    def metrics(self) -> dict[str, float]:
        """Metrics of a step, named as in docs/metrics.md."""
        return {"record/cpu_s": self._cpu.take(), "record/skipped": float(self._skipped)}

    def positions(self) -> Future[dict[str, int]]:
        """Size of the newest piece of each log, by path in the run's folder, once all queued lines are on disk."""
        return self._disk.ask(self._positions)

    def close(self) -> None:
        """Finish pending writes."""
        self._disk.close()

    def _append(self, log: PieceLog, lines: list[str]) -> None:
        size = sum(map(len, lines))

        def write() -> None:
            with self._cpu.running():
                log.append(*lines)
            self._queue(-size)

        def lose() -> None:
            self._queue(-size)
            log.lose(len(lines), "the disk is slower than the run")

        if self._queue(size) > QUEUED_BYTES:
            lose()
        else:
            self._disk.begin(write, lose)

    def _queue(self, size: int) -> int:
        """Add to the characters that wait for the disk, which another thread also does; returns their number."""
        with self._lock:
            self._queued += size
            return self._queued

    def _positions(self) -> dict[str, int]:
        return {f"{ROLLOUTS}/{piece}": nbytes for piece, nbytes in (self.episodes.position(), self.tokens.position())}

    def _close(self) -> None:
        self.episodes.close()
        self.tokens.close()


def _token_line(record: TokenRecord) -> str:
    row = {"step": record.step, "group": record.group_id, "attempt": record.attempt, "episode": record.place}
    arrays = {name: packed(values, values.dtype.newbyteorder("<").str) for name, values in record.arrays.items()}
    return as_line({**row, "advantage": record.advantage, **arrays})
