"""``rollouts.jsonl``: a random sample of the groups of each trained batch, with their full details."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from monarch_rl.episode.shard import TrainedEpisode
from monarch_rl.observe.disk_thread import DiskThread
from monarch_rl.observe.lines import LineFile
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.start import Actors
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, within
from monarch_rl.trainer.actor import Trainer


class RolloutLog:
    """Logs groups chosen at random from the batch of each step.

    Trainer ranks have the trained tokens with their advantages; the worker that ran a group has its messages.

    Args:
        path: the file; lines are appended.
        groups: number of groups per step; 0 writes nothing.
        seed: seed of the choice.
        again: whether groups may be trained more than once (``buffer.replay``).
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
        """The rollout log in a run's folder."""
        path = folder / "rollouts.jsonl"
        return cls(actors.trainer, actors.workers, path, settings.logged_groups, settings.seed or 0, replay > 1)

    async def gather(self) -> list[dict[str, Any]]:
        """Rows of the groups chosen from the last trained batch."""
        return await self._rows(await self._trained()) if self._groups else []

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Write rows that :meth:`gather` returned."""
        self._disk.begin(
            lambda: self.lines.append(*map(json.dumps, rows)),
            lambda: self.lines.lose(len(rows), "the disk is slower than the run"),
        )

    def position(self) -> Future[int]:
        """Size of the file in bytes, as ``LineFile.position``, once all rows appended so far are on disk."""
        return self._disk.ask(self.lines.position)

    def close(self) -> None:
        """Finish pending writes."""
        self._disk.close()

    async def _trained(self) -> list[TrainedEpisode]:
        asking = self._trainer.trained_episodes.call(self._groups, self._seed)
        answers = await within(CALL_DEADLINE_S, asking, "the episodes that were trained", on="trainer ranks")
        # Tensor-parallel ranks return the same episodes.
        episodes = {(one.group_id, one.place): one for of_rank in answers.values() for one in of_rank}
        return [episodes[key] for key in sorted(episodes)]

    async def _rows(self, trained: list[TrainedEpisode]) -> list[dict[str, Any]]:
        """The rows of episodes, in their order. If an episode's worker is lost, another one makes the row, without
        messages."""
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
