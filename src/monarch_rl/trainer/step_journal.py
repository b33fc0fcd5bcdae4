"""A trainer rank's journal: recording its share of each batch and the result of the step, and replaying steps."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from monarch_rl.checkpoint.journal import PLAN, JournalBatch, JournalWriter, Made, journal_of
from monarch_rl.episode.shard import PackedShard
from monarch_rl.trainer.plan import TrainerPlan, functions_as, trained_as, write_plan
from monarch_rl.trainer.policy import Policy
from monarch_rl.weights.checksum import tensor_checksum

logger = logging.getLogger("monarch_rl")


class StepJournal:
    """The journal of one rank. Tensor-parallel neighbours have the same share of a batch: the first of them writes
    it."""

    def __init__(self, policy: Policy, writer: JournalWriter) -> None:
        self._policy, self._writer = policy, writer
        self._writes_batches = policy.rank % policy.settings.tp == 0

    @classmethod
    def begin(cls, folder: Path, nbytes: int, plan: TrainerPlan, policy: Policy) -> StepJournal:
        """Start the journal; rank 0 also writes the plan of this generation of the run."""
        if policy.rank == 0:
            try:
                write_plan(folder, plan)
            except OSError as error:  # resuming from a checkpoint needs the records, not the plan
                logger.warning(
                    "the journal in %s has no %s, without which tools/replay.py cannot replay this run: %r",
                    folder,
                    PLAN.format(generation=plan.generation),
                    error,
                )
        about = {
            "generation": plan.generation,
            "ranks": policy.world_size,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "trained_as": trained_as(plan),
            "functions_as": functions_as(plan),
        }
        return cls(policy, JournalWriter(folder, policy.rank, nbytes, about))

    def took(self, shard: PackedShard) -> None:
        """Record this rank's share of a batch, before anything is computed."""
        if self._writes_batches:
            self._writer.batch(shard)

    def made(self, version: int, metrics: dict[str, float]) -> None:
        """Record checksums and metrics after the update of ``version``. Reads all weights, on the thread that
        computes."""
        self._writer.made(version, Made(weights_checksums(self._policy), metrics))

    @property
    def lost(self) -> int:
        """Records of this rank that could not be written."""
        return self._writer.lost

    def close(self) -> None:
        """Write pending records."""
        self._writer.close()


class EarlierSteps:
    """The journal's steps after the checkpoint that this rank has restored.

    Args:
        folder: the run's ``journal/`` folder.
        plan: the trainer's current plan.
        version: the checkpoint's version.
        generation: generation of the run that wrote the checkpoint.
        since: first generation whose batches may be replayed: a later generation than the checkpoint's may have
            continued without the journal.

    Raises:
        ValueError: the journal has another format.
        OSError: the journal cannot be read.
    """

    def __init__(
        self, folder: Path, plan: TrainerPlan, policy: Policy, version: int, generation: int, since: int = 0
    ) -> None:
        self._policy = policy
        self._own, self._batches = journal_of(folder, policy.rank, policy.settings.tp, since=version - 1)
        self.replayable: list[JournalBatch] = []
        """The consecutive batches, from the checkpoint's version on, that can be replayed."""
        if self._is_equal(version - 1, generation) is False:
            logger.warning("the journal belongs to other weights than the checkpoint's: no step is replayed from it")
            return
        training, recorded = trained_as(plan), set(self._batches.versions)
        while version in recorded and self._can_replay(version, max(generation, since), plan.generation, training):
            shard = self.batch(version)
            rows = [] if shard.supervised is None else shard.supervised.minibatches
            content = shard.group_ids, shard.trainable_tokens, shard.num_episodes, [row.episodes for row in rows]
            taken_by = self._batches.about_batch(version)["generation"]
            self.replayable.append(JournalBatch(version, taken_by, zlib.crc32(repr(content).encode())))
            version += 1
        for damage in dict.fromkeys([*self._batches.damage, *self._own.damage]):
            logger.warning(
                "the journal is damaged: %s. Steps after %d are not replayed from it, but trained anew", damage, version
            )

    def _can_replay(self, version: int, since: int, generation: int, training: str) -> bool:
        """Whether the batch that updates ``version`` can be replayed.

        Args:
            since: first generation whose batches may be replayed.
            generation: the current generation, which has recorded no steps yet.
            training: digest of how this rank trains (:func:`trained_as`).
        """
        about = self._batches.about_batch(version)
        if not since <= about["generation"] < generation:
            return False
        if about.get("trained_as") != training:
            logger.warning("step %d is not replayed from the journal: it was trained in another way", version + 1)
            return False
        # A batch whose step has no recorded end may have ended the run: it is tried by the next generation only.
        return self._own.made(version) is not None or about["generation"] == generation - 1

    def batch(self, version: int) -> PackedShard:
        """This rank's share of the batch that updates ``version``, one of :attr:`replayable`."""
        return self._batches.batch(version)

    def equal(self, version: int) -> bool | None:
        """Whether the weights are bit-identical to those after the original update of ``version``; None if their
        checksums are not recorded. Reads all weights, on the thread that computes."""
        return self._is_equal(version, self._batches.about_batch(version)["generation"])

    def _is_equal(self, version: int, generation: int) -> bool | None:
        """The same, ignoring checksums from before ``generation``: the run has since gone back to an earlier
        version."""
        made, about = self._own.made(version), self._own.about_made(version)
        if made is None or about is None or about["generation"] < generation:
            return None
        return bool(np.array_equal(made.checksums, weights_checksums(self._policy)))


# -- checksums of each rank's part of the trained weights: equal checksums mean equal bits ----------------------------


def weights_checksums(policy: Policy) -> np.ndarray:
    """int64[tensors]: checksum of this rank's part of each trained parameter, in the order of the policy's parameters,
    then of the critic's, if there is one."""
    modules = [policy.module] if policy.critic is None else [policy.module, policy.critic.model.module]
    with torch.no_grad():
        trained = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        return torch.stack([_checksum(parameter) for parameter in trained]).cpu().numpy()


def _checksum(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if not local.numel():  # with more ranks than rows
        return torch.zeros((), dtype=torch.int64, device=local.device)
    return tensor_checksum(local.reshape(local.shape or (1,)))
