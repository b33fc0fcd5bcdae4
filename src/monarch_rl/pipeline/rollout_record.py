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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_rl.episode.logged import LoggedGroups
from monarch_rl.episode.shard import TokenRecord
from monarch_rl.observe.cpu_clock import CpuClock
from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.pieces import PieceLog
from monarch_rl.pipeline.actor_pool import ActorPool, last_line
from monarch_rl.pipeline.run_folder import ROLLOUTS
from monarch_rl.rollout.record import WorkerRows
from monarch_rl.rollout.transcripts import as_line, packed
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.trainer.actor import Trainer

logger = logging.getLogger("monarch_rl")

TAKE_S = 2.0
"""Seconds between two calls that take the workers' rows: a lost worker has not handed over those of the last ones."""
LAST_S = 5.0
"""Seconds for the workers' last rows at the end of a run, which may have to be over in seconds."""
NEWEST, NEWEST_BYTES = 16, 4 * 2**20
"""Maximum number of rows of trained episodes that are kept for trackers, and of their characters."""
TRAINED = '{"kind": "train"'
"""Beginning of their lines."""
QUEUED_BYTES = 64 * 2**20
"""Most characters that wait for the disk; further lines are counted, and lost."""


@dataclass
class _Asked:
    """A worker that has been asked for its rows."""

    worker: RolloutWorker
    task: asyncio.Task[None]
    again: bool = False
    """Whether it is to be asked once more: other episodes have ended since."""


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
        self._asked: dict[int, _Asked] = {}
        """By index, workers that have not answered."""
        self._failed: set[int] = set()
        """Workers that did not answer the last time, which has been logged."""
        self._newest: deque[str] = deque(maxlen=NEWEST)
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
            await asyncio.wait([taking])  # waits: at most TAKE_S
            await self.take(LAST_S)
            self._give_up(list(self._asked))

    async def _take_until(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), TAKE_S)
            await self.take(TAKE_S)

    async def take(self, seconds: float) -> None:
        """Take the rows of the episodes that have ended so far, and queue those of each worker as it answers.

        Returns when all workers have answered, or after ``seconds``: what the others answer later is written, too, and
        they are asked once more then. Never raises: rows are not worth a run.
        """
        workers = self._workers.handles
        self._give_up([index for index, asked in self._asked.items() if workers.get(index) is not asked.worker])
        for index, worker in workers.items():
            if index in self._asked:
                self._asked[index].again = True
            else:
                self._asked[index] = _Asked(worker, asyncio.create_task(self._ask(index)))
        if self._asked:
            await asyncio.wait([asked.task for asked in self._asked.values()], timeout=seconds)

    async def _ask(self, index: int) -> None:
        asked = self._asked[index]
        try:
            while True:
                asked.again = False
                # waits: in a task, for which others wait with a deadline; what is answered after it is not lost
                self._write(await asked.worker.take_rows.call_one())
                self._failed.discard(index)
                if not asked.again:
                    break
        except Exception as error:
            self._log_failure(index, last_line(error))
        finally:
            if self._asked.get(index) is asked:
                del self._asked[index]

    def _give_up(self, indices: list[int]) -> None:
        """Wait no longer for the rows of workers that have not answered."""
        for index in indices:
            self._asked.pop(index).task.cancel()
            self._log_failure(index, "it did not answer")

    def _log_failure(self, index: int, reason: str) -> None:
        if index not in self._failed:
            name = self._workers.name(index)
            logger.warning("rows of episodes of %s are not in the run's record: %s", name, reason)
        self._failed.add(index)

    def _write(self, rows: WorkerRows) -> None:
        self._skipped += rows.skipped
        self._cpu.add(rows.cpu_s)
        if rows.lost:
            self.episodes.lose(rows.lost, "workers end episodes faster than the run writes them")
        if rows.lines:
            self._append(self.episodes, rows.lines)
        for line in rows.lines:
            if line.startswith(TRAINED):
                self._newest.append(line)
        while sum(map(len, self._newest)) > NEWEST_BYTES:
            self._newest.popleft()

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

    def metrics(self, timeline_cpu_s: float) -> dict[str, float]:
        """Metrics of a step, named as in docs/metrics.md, with the CPU seconds of the timeline."""
        return {"record/cpu_s": self._cpu.take() + timeline_cpu_s, "record/skipped": float(self._skipped)}

    def positions(self) -> Future[dict[str, int]]:
        """Size of the newest piece of each log, by path in the run's folder, once all queued lines are on disk."""
        return self._disk.ask(self._positions)

    def close(self) -> None:
        """Finish pending writes."""
        self._disk.close()

    def _append(self, log: PieceLog, lines: list[str]) -> None:
        size = sum(map(len, lines))

        def write() -> None:
            try:
                with self._cpu.running():
                    log.append(*lines)
            finally:
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
