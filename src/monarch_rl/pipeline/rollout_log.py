"""``rollouts.jsonl``: some groups of each batch that was trained, with all that is known of them."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from monarch_rl.episode.sampled import TrainedEpisode
from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.lines import LineFile
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.start import Actors
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.trainer.actor import Trainer


class RolloutLog:
    """Writes groups that are drawn at random from the batch of each step.

    The trainer ranks know what was trained, and as what; the worker that played a group knows who said what in it.

    Args:
        path: of the file; lines are appended.
        groups: of a step; 0 writes nothing.
        seed: of the draw.
        again: groups may be trained again (``buffer.replay``).
    """

    def __init__(
        self,
        trainer: Trainer,
        workers: ActorPool[RolloutWorker],
        path: Path,
        groups: int,
        seed: int = 0,
        again: bool = False,
    ) -> None:
        self._trainer, self._workers = trainer, workers
        self.lines = LineFile(path)
        self._disk = DiskThread("rollouts", self.lines.close)
        self._groups, self._seed, self._again = groups, seed, again

    @classmethod
    def of(cls, actors: Actors, folder: Path, settings: RolloutSettings, replay: int) -> RolloutLog:
        """The log of a run in its folder."""
        path = folder / "rollouts.jsonl"
        return cls(actors.trainer, actors.workers, path, settings.logged_groups, settings.seed or 0, replay > 1)

    async def gather(self) -> list[dict[str, Any]]:
        """The rows of the groups that are drawn from the batch that was trained last."""
        return await self._rows(await self._trained()) if self._groups else []

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Write what :meth:`gather` returned."""
        self._disk.begin(
            lambda: self.lines.append(*map(json.dumps, rows)),
            lambda: self.lines.lose(len(rows), "the disk is slower than the run"),
        )

    def position(self) -> Future[int]:
        """As that of ``LineFile``, with all lines that were handed over before; as that of ``Metrics``."""
        return self._disk.ask(self.lines.position)

    def close(self) -> None:
        """Write what is left."""
        self._disk.close()

    async def _trained(self) -> list[TrainedEpisode]:
        asking = self._trainer.trained_episodes.call(self._groups, self._seed)
        answers = await within(CALL_DEADLINE_S, asking, "the episodes that were trained", on="trainer ranks")
        # Tensor-parallel ranks have the same part of a batch.
        episodes = {(one.group_id, one.place): one for of_rank in answers.values() for one in of_rank}
        return [episodes[key] for key in sorted(episodes)]

    async def _rows(self, trained: list[TrainedEpisode]) -> list[dict[str, Any]]:
        """In their order. Of an episode whose worker is lost another worker makes the row, without messages."""
        what = "to return rollouts"
        answers = await self._workers.ask(
            CALL_DEADLINE_S, what, lambda _, worker: worker.rollouts.call_one(trained, True, self._again)
        )
        rows = {(row["group"], row["episode"]): row for of_worker in answers.values() for row in of_worker}
        missing = [one for one in trained if (one.group_id, one.place) not in rows]
        others = dict(list(self._workers.handles.items())[:1]) if missing else {}
        more = await self._workers.ask(
            CALL_DEADLINE_S, what, lambda _, worker: worker.rollouts.call_one(missing, False, self._again), others
        )
        rows |= {(row["group"], row["episode"]): row for of_worker in more.values() for row in of_worker}
        return [rows[key] for one in trained if (key := (one.group_id, one.place)) in rows]
