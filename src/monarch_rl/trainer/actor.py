"""The trainer mesh: one :class:`Trainer` actor a rank, all in one torch.distributed world of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import numpy as np
from monarch.actor import current_rank

from monarch_rl.algorithms.advantages import ADVANTAGES
from monarch_rl.buffer.actor import Buffer
from monarch_rl.episode.packed import unpack_group
from monarch_rl.runtime import device_work, presence
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, lasting_endpoint
from monarch_rl.runtime.heap import freeze_heap
from monarch_rl.runtime.network import host_address
from monarch_rl.runtime.resilient import ResilientActor
from monarch_rl.trainer.batch_metrics import batch_metrics
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.snapshots import Snapshots
from monarch_rl.weights.endpoint import Sender, TransferSettings
from monarch_rl.weights.finite import NotFinite
from monarch_rl.weights.manifest import Manifest
from monarch_rl.weights.transport import make_sender

if TYPE_CHECKING:
    import torch

    from monarch_rl.algorithms.advantages import Advantage
    from monarch_rl.trainer.objective import Objective
    from monarch_rl.trainer.policy import Policy
    from monarch_rl.trainer.publishing import SnapshotPlan
    from monarch_rl.trainer.shards import NamedShape, Run

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True)
class TrainerPlan:
    """What a trainer rank needs to know beside its settings."""

    model: Path
    """The Hugging Face folder to start from."""
    settings: TrainerSettings
    total_steps: int
    """Optimiser steps of the run, for the learning-rate schedule."""
    temperature: float
    """Of the sampling distribution."""
    max_new_tokens: int
    """Tokens that an episode may draw: the normaliser of the ``constant`` aggregation."""
    advantage: Advantage | None = None
    """Function of a group's rewards; None is the one that ``settings.loss`` names. It travels to the ranks by
    cloudpickle, so a function of a script, a closure or a ``functools.partial`` will do."""
    objective: Objective | None = None
    """Loss of a micro-batch; None is :func:`reinforcement` with ``settings.loss``. With one, only the aggregation of
    these settings acts, as ``MicroBatch.weights``. It travels like the advantage."""


def loss_functions(plan: TrainerPlan) -> tuple[Advantage, Objective]:
    """The plan's own advantage and objective, and where it has none, what its loss settings name."""
    from monarch_rl.trainer.objective import reinforcement

    loss = plan.settings.loss
    return plan.advantage or ADVANTAGES[loss.advantage], plan.objective or reinforcement(loss)


class Trainer(ResilientActor):
    """One rank. All ranks get every call; training runs on one thread, checksums on another."""

    def __init__(self, plan: TrainerPlan, buffer: Buffer) -> None:
        presence.register(f"trainer rank {current_rank().rank}")
        self._plan = plan
        self._buffer = buffer
        # One thread for all of torch: FSDP and autograd keep state per thread.
        self._compute = ThreadPoolExecutor(1, "compute")
        self._policy: Policy | None = None
        self._snapshots: Snapshots | None = None
        self._snapshot_plans: dict[int, SnapshotPlan] = {}
        """By the snapshot's index."""

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise RuntimeError("setup() must come first")
        return self._policy

    @property
    def snapshots(self) -> Snapshots:
        if self._snapshots is None:
            raise RuntimeError("weights_setup() must come first")
        return self._snapshots

    @property
    def sender(self) -> Sender:
        return self.snapshots.sender

    async def _on(self, executor: ThreadPoolExecutor, call: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, call, *arguments)

    @concurrent_endpoint
    async def setup(self) -> dict[str, int]:
        """Join the world, build and load the model; returns the rank and how many parameters it publishes."""

        def build() -> Policy:
            from monarch_rl.trainer.policy import Policy

            plan = self._plan
            policy = Policy(plan.model, plan.settings, total_steps=plan.total_steps, temperature=plan.temperature)
            device_work.use_device(policy.device.type)
            return policy

        self._policy = await self._on(self._compute, build)
        freeze_heap()
        owned = sum(elements for _, _, elements in self._policy.published.owned_runs())
        return {"rank": self._policy.rank, "parameters": owned}

    @lasting_endpoint
    async def update(self, version: int, batch_deadline_s: float) -> dict[str, float]:
        """Take this rank's share of the batch for the update from ``version``, and make one optimiser step.

        Args:
            version: the version being updated.
            batch_deadline_s: seconds to wait for the batch.

        Returns:
            The metrics of :meth:`Policy.update`, with ``wait_s`` (seconds without a batch: idle) and
            ``step_s`` (seconds of packing and computing), and those of :func:`batch_metrics`.

        Raises:
            DeadlineExceeded: no batch came in time; says what is missing.
            NotFinite: the gradient is not finite; names the step, and why.
        """
        from monarch_rl.trainer.batch import advantages_of, pack_shard

        plan, policy = self._plan, self.policy
        advantage, objective = loss_functions(plan)
        started = time.perf_counter()
        packed = await within(
            batch_deadline_s + 10,
            self._buffer.take.call_one(
                version,
                policy.data_rank,
                plan.settings.data_ranks,
                plan.settings.tokens_per_microbatch,
                batch_deadline_s,
            ),
            f"the batch of step {version + 1}",
            on="buffer",
            flag="update-deadline-s",
        )
        taken = time.perf_counter()

        def step() -> dict[str, float]:
            aggregation = plan.settings.loss.aggregation
            advantages = advantages_of(packed.rewards, advantage)
            batches = pack_shard(packed.unpack(), advantages, aggregation, plan.max_new_tokens, policy.device)
            figures = batch_metrics(packed, [of_group.numpy() for of_group in advantages])
            try:
                return policy.update(batches, objective) | figures
            except NotFinite as error:
                raise NotFinite(f"step {version + 1}: {error}") from error

        metrics = await self._on(self._compute, step)
        return metrics | {"wait_s": taken - started, "step_s": time.perf_counter() - taken}

    @lasting_endpoint
    async def logprobs(self, groups: list[bytes], version: int) -> list[np.ndarray]:
        """Log-probs of the trainable tokens of each episode under the current weights: float32 arrays.

        All ranks compute all episodes; nothing is updated.
        """
        return await self._on(self._compute, self._logprobs, groups, version)

    def _logprobs(self, groups: list[bytes], version: int) -> list[np.ndarray]:
        import torch

        from monarch_rl.trainer.batch import pack

        logprobs: list[np.ndarray] = []
        with torch.no_grad():
            for episode in (episode for data in groups for episode in unpack_group(data).episodes):
                batch = pack([episode], torch.zeros(1), torch.zeros(1), version, self.policy.device)
                with device_work.piece("a pass for log-probs", batch.token_ids.numel()):
                    logprobs.append(self.policy.token_logprobs(batch).logprobs.cpu().numpy())
        return logprobs

    # -- publishing: see weights/endpoint.py for the order of calls ------------------------------------------

    @concurrent_endpoint
    async def owned_runs(self) -> tuple[int, list[NamedShape], list[Run]]:
        """``(rank, tensors of a version, this rank's runs of them)``, to make the manifest from."""
        published = self.policy.published

        def runs() -> tuple[list[NamedShape], list[Run]]:
            return published.tensors(), published.owned_runs()

        return self.policy.rank, *await self._on(self._compute, runs)

    @concurrent_endpoint
    async def frozen_checksums(self, dtype: str) -> tuple[list[NamedShape], np.ndarray]:
        """The weights that are not trained and this rank's part of their checksums: see
        :meth:`PublishedWeights.frozen_checksums`."""
        import torch

        return await self._on(self._compute, self.policy.published.frozen_checksums, getattr(torch, dtype))

    @concurrent_endpoint
    async def weights_setup(self, manifest: Manifest, settings: TransferSettings) -> None:
        """Make the sending end, with room for snapshots."""
        policy = self.policy
        if self._snapshots is not None:
            await self._snapshots.close()
        self._snapshot_plans = {}
        sender = await asyncio.to_thread(make_sender, manifest, policy.rank, settings, host_address(), policy.device)
        self._snapshots = Snapshots(sender, manifest, policy.rank, policy.device)

    @concurrent_endpoint
    async def weights_open(self) -> tuple[int, bytes]:
        """Prepare a meeting with the receivers; returns ``(rank, address)`` for them."""
        return self.policy.rank, await self.sender.open()

    @concurrent_endpoint
    async def weights_connect(self, addresses: list[bytes], receivers: int) -> None:
        """Meet all receivers."""
        await self.sender.connect(addresses, receivers)

    @lasting_endpoint
    async def ready(self) -> None:
        """Answer: this rank is alive."""

    @lasting_endpoint
    async def snapshot(self, version: int, index: int) -> float:
        """Copy the weights, which are those of ``version``, into the snapshot ``index``; returns the seconds it
        took."""
        started = time.perf_counter()
        views = self.snapshots.prepare(version, index)
        await self._on(self._compute, self._copy, index, views)
        return time.perf_counter() - started

    def _copy(self, index: int, views: list[torch.Tensor]) -> None:
        published = self.policy.published
        with device_work.piece("a copy of the weights"):
            if index not in self._snapshot_plans:
                self._snapshot_plans[index] = published.plan_snapshot(self.snapshots.manifest, views)
            published.snapshot(self._snapshot_plans[index])

    @lasting_endpoint
    async def send(self, version: int, snapshot: int) -> np.ndarray:
        """Send a snapshot, by its index, as part of ``version``; the next update may go on meanwhile.

        Returns:
            The checksum of this rank's part of each tensor of the manifest: int64[tensors].

        Raises:
            NotFinite: a tensor of the version holds NaN or infinity; names it.
        """
        return await self.snapshots.send(version, snapshot)

    @lasting_endpoint
    async def weights_abort(self, why: str) -> None:
        """End a transfer under way, because a member is lost: ``send`` or ``weights_connect`` fails at once."""
        if self._snapshots is not None:
            self.sender.abort(why)

    @concurrent_endpoint
    async def save(self, folder: str) -> None:
        """Write the model as a Hugging Face folder, and LoRA beside it: see :func:`save_model`."""
        await self._on(self._compute, self.policy.save, Path(folder))

    @concurrent_endpoint
    async def close(self) -> None:
        """Leave the worlds that this rank is in."""
        if self._snapshots is not None:
            await self._snapshots.close()
        if self._policy is not None:
            await self._on(self._compute, self._policy.close)
