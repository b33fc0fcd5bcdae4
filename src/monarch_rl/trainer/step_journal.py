"""A trainer rank's journal: its share of each batch, what the step made of it, and the steps after a checkpoint."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from monarch_rl.checkpoint.journal import PLAN, JournalWriter, Made, journal_of
from monarch_rl.episode.shard import PackedShard
from monarch_rl.trainer.known_steps import JournalBatch
from monarch_rl.trainer.plan import TrainerPlan
from monarch_rl.trainer.plan_file import trained_as, write_plan
from monarch_rl.trainer.policy import Policy
from monarch_rl.weights.checksum import tensor_checksum

logger = logging.getLogger("monarch_rl")


class StepJournal:
    """Of one rank. Tensor-parallel neighbours take the same part of a batch, which the first of them writes."""

    def __init__(self, policy: Policy, writer: JournalWriter) -> None:
        self._policy, self._writer = policy, writer
        self._writes_batches = policy.rank % policy.settings.tp == 0

    @classmethod
    def begin(cls, folder: Path, nbytes: int, plan: TrainerPlan, policy: Policy) -> StepJournal:
        """Begin to write; the first rank also writes the plan of this generation of the run.

        Without the plan, which the disk may refuse, records are written all the same: a run that goes on from a
        checkpoint needs them alone.
        """
        if policy.rank == 0:
            try:
                write_plan(folder, plan)
            except OSError as error:
                logger.warning(
                    "the journal in %s has no %s, without which tools/replay.py makes no step of this run again: %r",
                    *(folder, PLAN.format(generation=plan.generation), error),
                )
        about = {
            "generation": plan.generation,
            "ranks": policy.world_size,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "trained_as": trained_as(plan),
        }
        return cls(policy, JournalWriter(folder, policy.rank, nbytes, about))

    def took(self, shard: PackedShard) -> None:
        """Note this rank's share, before anything is computed."""
        if self._writes_batches:
            self._writer.batch(shard)

    def made(self, version: int, figures: dict[str, float]) -> None:
        """Note what the update of ``version`` has made. Reads all weights; on the thread that computes."""
        self._writer.made(version, Made(weights_checksums(self._policy), figures))

    @property
    def lost(self) -> int:
        """Records of this rank that could not be written."""
        return self._writer.lost

    def close(self) -> None:
        """Write what is on its way."""
        self._writer.close()


class EarlierSteps:
    """What the journal has of the steps after a checkpoint that this rank's weights are of.

    Args:
        folder: ``journal/`` of the run.
        plan: of the trainer now (:class:`TrainerPlan`).
        version: that the checkpoint holds.
        generation: of the run that made the checkpoint.
        since: batches of earlier generations do not count: a later one went on without the journal.

    Raises ValueError if the journal has another format, and OSError.
    """

    def __init__(
        self, folder: Path, plan: TrainerPlan, policy: Policy, version: int, generation: int, since: int = 0
    ) -> None:
        self._policy = policy
        self._own, self._batches = journal_of(folder, policy.rank, policy.settings.tp, since=version - 1)
        self.known: list[JournalBatch] = []
        """One after the other from the checkpoint's version on."""
        if self._is_equal(version - 1, generation) is False:
            logger.warning("the journal is of other weights than the checkpoint: no step is made again from it")
            return
        alike, there = trained_as(plan), set(self._batches.versions)
        while version in there and self._may_be_made(version, max(generation, since), plan.generation, alike):
            shard = self.batch(version)
            rows = [] if shard.supervised is None else shard.supervised.minibatches
            content = shard.group_ids, shard.trainable_tokens, shard.num_episodes, [row.episodes for row in rows]
            taken_by = self._batches.about_batch(version)["generation"]
            self.known.append(JournalBatch(version, taken_by, zlib.crc32(repr(content).encode())))
            version += 1

    def _may_be_made(self, version: int, since: int, generation: int, alike: str) -> bool:
        """Whether the batch is of generation ``since`` or a later one before this, ``generation``, and was cut for
        ranks that train as these do. One of which nobody knows that its step ended may be what ended the run: it is
        tried once."""
        about = self._batches.about_batch(version)
        if not since <= about["generation"] < generation:
            return False
        if about.get("trained_as") != alike:
            logger.warning("step %d is not made again from the journal: it was trained in another way", version + 1)
            return False
        return self._own.made(version) is not None or about["generation"] == generation - 1

    def batch(self, version: int) -> PackedShard:
        """This rank's share of the batch that updates ``version``, one of :attr:`known`."""
        return self._batches.batch(version)

    def equal(self, version: int) -> bool | None:
        """Whether the weights are those that the update of ``version`` made then; None if that is not here. Reads all
        weights; on the thread that computes."""
        return self._is_equal(version, self._batches.about_batch(version)["generation"])

    def _is_equal(self, version: int, generation: int) -> bool | None:
        """The same; what was made before ``generation`` does not count: a run went back since."""
        made, about = self._own.made(version), self._own.about_made(version)
        if made is None or about is None or about["generation"] < generation:
            return None
        return bool(np.array_equal(made.checksums, weights_checksums(self._policy)))


# -- checksums of the weights under training, each rank's part: equal ones mean equal bits ----------------------------


def weights_checksums(policy: Policy) -> np.ndarray:
    """int64[tensors]: of this rank's part of each trained parameter, in the order of the model's parameters, then of
    those of the critic, if there is one."""
    modules = [policy.module] if policy.critic is None else [policy.module, policy.critic.model.module]
    with torch.no_grad():
        trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        return torch.stack([_checksum(parameter) for parameter in trained]).cpu().numpy()


def _checksum(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if not local.numel():  # there are more ranks than rows
        return torch.zeros((), dtype=torch.int64, device=local.device)
    return tensor_checksum(local.reshape(local.shape or (1,)))
