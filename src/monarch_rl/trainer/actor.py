"""The trainer mesh: one :class:`Trainer` actor per rank, all in one torch.distributed world."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import numpy as np
from monarch.actor import current_rank

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.shards import ShardPlan
from monarch_rl.checkpoint.folders import FileSum
from monarch_rl.checkpoint.journal import LOST, JournalBatch, StepReplay
from monarch_rl.episode.serialization import deserialize_group
from monarch_rl.episode.shard import PackedShard, TokenRecord
from monarch_rl.runtime import device_work, timeline, wait_registry
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import concurrent_endpoint, persistent_endpoint
from monarch_rl.runtime.network import host_address
from monarch_rl.runtime.persistent_calls import ResilientActor
from monarch_rl.runtime.process import freeze_heap
from monarch_rl.trainer.plan import TrainerPlan
from monarch_rl.trainer.snapshots import Snapshots
from monarch_rl.weights.manifest import Manifest
from monarch_rl.weights.transport import Sender, TransferSettings, make_sender

if TYPE_CHECKING:
    import torch

    from monarch_rl.checkpoint.folders import Staged
    from monarch_rl.episode.shard import SupervisedShard
    from monarch_rl.trainer.functions import LoadedFunctions
    from monarch_rl.trainer.policy import Policy
    from monarch_rl.trainer.profiling import StepProfiler
    from monarch_rl.trainer.publishing import SnapshotPlan
    from monarch_rl.trainer.shards import NamedShape, Span
    from monarch_rl.trainer.step import TrainedBatch
    from monarch_rl.trainer.step_journal import EarlierSteps, StepJournal
    from monarch_rl.trainer.supervised import SupervisedPlan, SupervisedRows

logger = logging.getLogger("monarch_rl")

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Trainer(ResilientActor):
    """One trainer rank. Every call goes to all ranks. Training runs on one thread, checksums on another."""

    def __init__(self, plan: TrainerPlan, buffer: Buffer) -> None:
        self._rank = current_rank().rank
        self._name = f"trainer rank {self._rank}"
        wait_registry.register(self._name)
        self._plan = plan
        self._buffer = buffer
        # One thread for all of torch: FSDP and autograd keep state per thread.
        self._compute = ThreadPoolExecutor(1, "compute")
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        self._policy: Policy | None = None
        self._functions: LoadedFunctions | None = None
        self._snapshots: Snapshots | None = None
        self._snapshot_plans: dict[int, SnapshotPlan] = {}
        """By index of the snapshot."""
        self._records: list[TokenRecord] = []
        """Of this rank's sequences of the last step's logged groups."""
        self._journal: StepJournal | None = None
        self._earlier: EarlierSteps | None = None
        self._rows: SupervisedRows | None = None
        """The rows of :meth:`supervised`."""
        self._mixed: SupervisedRows | None = None
        """The rows that :meth:`update` mixes into its batches."""
        self._rows_taken = 0
        """Supervised rows trained so far."""
        self._profiler: StepProfiler | None = None

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise RuntimeError("setup() must come first")
        return self._policy

    @property
    def functions(self) -> LoadedFunctions:
        """Advantage and objective, with their state."""
        if self._functions is None:
            raise RuntimeError("setup() must come first")
        return self._functions

    @property
    def snapshots(self) -> Snapshots:
        if self._snapshots is None:
            raise RuntimeError("weights_setup() must come first")
        return self._snapshots

    @property
    def sender(self) -> Sender:
        return self.snapshots.sender

    async def _on(self, executor: ThreadPoolExecutor, call: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Call on a thread. Raises OutOfMemory, with the flags that lower the need, if memory is lacking there."""

        def named() -> T:
            from monarch_rl.trainer.out_of_memory import naming_flags

            with naming_flags(self._plan.settings, self._rank, self._plan.model):
                return call(*arguments)

        return await asyncio.get_running_loop().run_in_executor(executor, named)

    @concurrent_endpoint
    async def setup(self) -> dict[str, int]:
        """Join the world, build and load the model. Returns the rank and the number of parameters that it publishes."""

        def build() -> Policy:
            import torch

            from monarch_rl.trainer.functions import TrainingFunctions
            from monarch_rl.trainer.policy import Policy
            from monarch_rl.trainer.profiling import StepProfiler
            from monarch_rl.trainer.step_journal import StepJournal

            plan = self._plan
            functions = plan.functions or TrainingFunctions.of_settings(plan.settings.loss, plan.settings.critic)
            self._functions = functions.load()
            policy = Policy(plan.model, plan.settings, total_steps=plan.total_steps, temperature=plan.temperature)
            device_work.use_device(policy.device.type, make_mark=partial(torch.Event, policy.device))
            if plan.journal is not None:
                self._journal = StepJournal.begin(plan.journal, plan.journal_bytes, plan, policy)
            if plan.settings.profile_steps is not None and plan.traces is not None:
                self._profiler = StepProfiler(*plan.settings.profile_steps, plan.traces, policy.rank, policy.device)
            return policy

        with timeline.span("start", self._name):
            self._policy = await self._on(self._compute, build)
        await self._on(self._compute, self._note, 0)
        freeze_heap()
        owned = sum(elements for _, _, elements in self._policy.published.owned_spans())
        return {"rank": self._policy.rank, "parameters": owned}

    @persistent_endpoint
    async def update(self, version: int, batch_deadline_s: float) -> dict[str, float]:
        """Take this rank's share of the batch that updates ``version``, and train on it: ``trainer.epochs`` x
        ``trainer.minibatches`` optimiser steps.

        Args:
            version: the version being updated.
            batch_deadline_s: seconds to wait for the batch.

        Returns:
            The metrics of :meth:`Policy.update_batch` and :func:`batch_metrics`, ``wait_s`` (seconds idle, waiting for
            the batch) and ``step_s`` (seconds packing and computing).

        Raises:
            DeadlineExceeded: no batch came in time; states what is missing.
            NotFinite: the gradient is not finite; names the step and the cause.
            ValueError: the advantage or the objective returned an unusable value; names the function and where it is
                defined.
        """
        plan, policy = self._plan, self.policy
        started = time.perf_counter()
        shard = await within(
            batch_deadline_s + 10,
            self._buffer.take.call_one(
                version,
                policy.data_rank,
                ShardPlan(
                    plan.settings.data_ranks,
                    plan.settings.tokens_per_microbatch,
                    self.functions.advantage_columns,
                    plan.settings.minibatches,
                ),
                batch_deadline_s,
            ),
            f"the batch of step {version + 1}",
            on="buffer",
            flag="patience",
        )
        taken = time.perf_counter()
        if self._mixed is not None:
            shard.supervised = await self._take_rows(self._mixed, plan.settings.minibatches)
        metrics = await self._train(shard, self._journal)
        return metrics | {"wait_s": taken - started, "step_s": time.perf_counter() - taken}

    async def _train(self, shard: PackedShard, journal: StepJournal | None) -> dict[str, float]:
        """Train the next version on a batch, and record the step in ``journal``, if any."""
        from monarch_rl.trainer.publishing import changed_share
        from monarch_rl.trainer.step import train

        version, policy = shard.version, self.policy
        rows = 0 if shard.supervised is None else sum(part.episodes for part in shard.supervised.minibatches)
        if journal is not None:
            journal.took(shard)

        def step() -> tuple[TrainedBatch, dict[str, float]]:
            dtypes = {} if self._snapshots is None else self._snapshots.served_dtypes
            before = policy.published.sampled_rows(dtypes)
            profiled = nullcontext() if self._profiler is None else self._profiler.step(version + 1)
            # On this thread, because other work may be under way there when the update is called.
            with timeline.span("update", self._name, version + 1), profiled:
                trained = train(policy, shard, self.functions, self._plan.normaliser_tokens, self._plan.logged)
            self._rows_taken += rows
            self._note(version + 1)
            return trained, changed_share(before, policy.published.sampled_rows(dtypes), policy.device)

        trained, changed = await self._on(self._compute, step)
        metrics, self._records = trained.metrics, trained.records
        if journal is not None:
            await self._on(self._compute, journal.made, version, metrics)
            changed[LOST] = float(journal.lost)
        return metrics | changed | {"record_cpu_s": trained.record_cpu_s}

    def _note(self, version: int) -> None:
        """Mark the state of ``version`` as complete: the next checkpoint holds it."""
        from monarch_rl.trainer.checkpoint import ROWS_TAKEN

        self.policy.checkpoint.note(version, self.functions.state_dict() | {ROWS_TAKEN: self._rows_taken})

    # -- rows of prompt and answer: docs/algorithms.md ----------------------------------------------------------------

    @concurrent_endpoint
    async def use_rows(self, plan: SupervisedPlan) -> int:
        """Mix these rows into every following batch, or, if their share is 1, use them for :meth:`supervised`.

        Returns:
            The number of rows.

        Raises:
            ValueError: the rows cannot be read.
        """
        from monarch_rl.trainer.supervised import load_rows

        settings = self._plan.settings
        tokens, ranks = settings.tokens_per_microbatch, settings.data_ranks
        rows = await asyncio.to_thread(load_rows, plan, self._plan.model, tokens, ranks)
        if plan.share < 1:
            self._mixed = rows
        else:
            self._rows = rows
        return len(rows)

    @persistent_endpoint
    async def supervised(self, version: int) -> dict[str, float]:
        """Update ``version`` by one optimiser step on supervised rows alone.

        Returns:
            The metrics of :meth:`Policy.update_batch`, with ``wait_s`` and ``step_s``.

        Raises:
            NotFinite: the gradient is not finite; names the step and the cause.
            ValueError: a row cannot be trained; names the row and the cause.
        """
        if self._rows is None:
            raise RuntimeError("use_rows() must come first")
        started = time.perf_counter()
        shard = PackedShard.of_rows(version, await self._take_rows(self._rows, 1))
        metrics = await self._train(shard, self._journal)
        return metrics | {"wait_s": 0.0, "step_s": time.perf_counter() - started}

    async def _take_rows(self, rows: SupervisedRows, minibatches: int) -> SupervisedShard:
        return await asyncio.to_thread(rows.take, self._rows_taken, self.policy.data_rank, minibatches)

    @persistent_endpoint
    async def token_records(self) -> list[TokenRecord]:
        """What this rank computed of the tokens of the last step's logged groups. Tensor-parallel ranks return the
        same."""
        return self._records

    @persistent_endpoint
    async def logprobs(self, groups: list[bytes], version: int) -> list[np.ndarray]:
        """float32[trainable tokens] of each episode: log-probs under the current weights.

        All ranks compute all episodes; nothing is updated.
        """
        return await self._on(self._compute, self._logprobs, groups, version)

    def _logprobs(self, groups: list[bytes], version: int) -> list[np.ndarray]:
        import torch

        from monarch_rl.trainer.batch import pack

        logprobs: list[np.ndarray] = []
        with torch.no_grad():
            for episode in (episode for data in groups for episode in deserialize_group(data).episodes):
                batch = pack([episode], torch.zeros(1), torch.zeros(1), version, self.policy.device)
                with device_work.operation("a pass for log-probs", batch.token_ids.numel()):
                    logprobs.append(self.policy.token_logprobs(batch).logprobs.cpu().numpy())
        return logprobs

    # -- publishing: weights/transport.py has the order of calls ------------------------------------------------------

    @concurrent_endpoint
    async def owned_spans(self) -> tuple[int, list[NamedShape], list[Span]]:
        """``(rank, tensors of a version, this rank's spans of them)``, for the manifest."""
        published = self.policy.published

        def runs() -> tuple[list[NamedShape], list[Span]]:
            return published.tensors(), published.owned_spans()

        return self.policy.rank, *await self._on(self._compute, runs)

    @concurrent_endpoint
    async def base_checksums(self, dtype: str) -> tuple[list[NamedShape], np.ndarray]:
        """The base weights and this rank's part of their checksums: see
        :meth:`PublishedWeights.base_checksums`."""
        import torch

        return await self._on(self._compute, self.policy.published.base_checksums, getattr(torch, dtype))

    @concurrent_endpoint
    async def weights_setup(self, manifest: Manifest, settings: TransferSettings) -> None:
        """Create the sender, and allocate its snapshots."""
        policy = self.policy
        if self._snapshots is not None:
            await self._snapshots.close()
        self._snapshot_plans = {}
        sender = await asyncio.to_thread(make_sender, manifest, policy.rank, settings, host_address(), policy.device)
        self._snapshots = Snapshots(sender, manifest, policy.rank, policy.device)

    @concurrent_endpoint
    async def weights_open(self) -> tuple[int, bytes]:
        """Open the sender for connections; returns ``(rank, address)`` for the receivers."""
        return self.policy.rank, await self.sender.open()

    @concurrent_endpoint
    async def weights_connect(self, addresses: list[bytes], receivers: int) -> None:
        """Connect to all receivers."""
        await self.sender.connect(addresses, receivers)

    @persistent_endpoint
    async def ready(self) -> None:
        """Liveness check."""

    @persistent_endpoint
    async def snapshot(self, version: int, index: int) -> float:
        """Copy the weights, which must be those of ``version``, into snapshot ``index``. Returns the seconds taken."""
        started = time.perf_counter()
        views = self.snapshots.prepare(version, index)
        await self._on(self._compute, self._copy, version, index, views)
        return time.perf_counter() - started

    def _copy(self, version: int, index: int, views: list[torch.Tensor]) -> None:
        published = self.policy.published
        with timeline.span("snapshot", self._name, version), device_work.operation("a copy of the weights"):
            if index not in self._snapshot_plans:
                self._snapshot_plans[index] = published.plan_snapshot(self.snapshots.manifest, views)
            published.snapshot(self._snapshot_plans[index])

    @persistent_endpoint
    async def send(self, version: int, snapshot: int) -> np.ndarray:
        """Send this rank's part of ``version`` from a snapshot, given by index; the next update may run meanwhile.

        Returns:
            int64[tensors]: the checksum of this rank's part of each tensor of the manifest.

        Raises:
            NotFinite: a tensor of the version holds NaN or infinity; names the tensor.
        """
        with timeline.span("transfer", f"{self._name}, transfers", version):
            return await self.snapshots.send(version, snapshot)

    @persistent_endpoint
    async def weights_abort(self, why: str) -> None:
        """Abort a running transfer because a member is lost: ``send`` or ``weights_connect`` fails at once."""
        if self._snapshots is not None:
            self.sender.abort(why)

    # -- checkpoints: docs/checkpoints.md -----------------------------------------------------------------------------

    @persistent_endpoint
    async def stage(self, new_group: bool) -> Staged:
        """Copy the state for a checkpoint to host memory, after a running update has ended.

        Args:
            new_group: the last write failed: see :meth:`TrainerCheckpoint.stage`.

        Raises:
            RuntimeError: an update was interrupted, so the weights are not a complete version.
        """
        return await self._on(self._compute, self._stage, new_group)

    def _stage(self, new_group: bool) -> Staged:
        checkpoint = self.policy.checkpoint
        copying = timeline.span("copy for a checkpoint", self._name, checkpoint.version)
        with copying, device_work.operation("a copy for a checkpoint"):
            return checkpoint.stage(new_group)

    @persistent_endpoint
    async def write_checkpoint(self, folder: str) -> list[FileSum]:
        """Write the last staged state to a checkpoint folder while training continues. Returns this rank's files.

        Raises:
            CannotWrite: a rank could not write; names the rank.
        """
        checkpoint = self.policy.checkpoint
        with timeline.span("checkpoint", f"{self._name}, checkpoints", checkpoint.version):
            return await self._on(self._disk, checkpoint.write, Path(folder), checkpoint.group)

    @concurrent_endpoint
    async def restore(self, folder: str, version: int, optimizer_steps: int) -> None:
        """Resume from a checkpoint of ``version``.

        Raises:
            ValueError: the checkpoint is of another model, or its advantage and objective have other state.
        """
        from monarch_rl.trainer.checkpoint import ROWS_TAKEN

        state = await self._on(self._compute, self.policy.checkpoint.restore, Path(folder), optimizer_steps)
        self._rows_taken = state.pop(ROWS_TAKEN, 0)
        self.functions.load_state_dict(state)
        await self._on(self._compute, self._note, version)

    @concurrent_endpoint
    async def replayable_batches(self, generation: int, since: int) -> list[JournalBatch]:
        """Read the journal after :meth:`restore`.

        Args:
            generation: generation of the run that wrote the checkpoint.
            since: first generation whose batches may be replayed.

        Returns:
            The consecutive batches, from the restored version on, that this rank can replay.
        """
        from monarch_rl.trainer.step_journal import EarlierSteps

        plan = self._plan
        if plan.journal is None:
            return []
        version = self.policy.checkpoint.version
        read = partial(EarlierSteps, plan.journal, plan, self.policy, version, generation, since)
        try:
            self._earlier = await self._on(self._compute, read)
        except Exception as error:  # a run can resume without its journal
            logger.warning("no step is replayed from the journal: %r", error)
            return []
        return self._earlier.replayable

    @persistent_endpoint
    async def replay_step(self, version: int, last: bool) -> StepReplay:
        """Replay the update of ``version`` from its batch in the journal. All ranks must be called.

        Args:
            last: this is the last step to replay.

        Raises:
            NotFinite, ValueError: as :meth:`update`.
        """
        earlier = self._earlier
        if earlier is None:
            raise RuntimeError("replayable_batches() must come first")
        started = time.perf_counter()
        shard = await asyncio.to_thread(earlier.batch, version)
        metrics = await self._train(shard, None)
        metrics |= {"wait_s": 0.0, "step_s": time.perf_counter() - started}
        equal = await self._on(self._compute, earlier.equal, version)
        if equal is None and self._journal is not None:  # else the next resume takes it for the step that ended the run
            await self._on(self._compute, self._journal.made, version, metrics)
        if last:
            self._earlier = None
        return StepReplay(metrics, [group_id for group_id, _ in shard.group_ids], shard.lag_counts, equal)

    @concurrent_endpoint
    async def save(self, folder: str, end_tokens: Sequence[int]) -> None:
        """Write the model as a Hugging Face folder, and LoRA next to it: see :func:`save_model`."""
        await self._on(self._compute, self.policy.save, Path(folder), end_tokens)

    @concurrent_endpoint
    async def close(self) -> None:
        """Leave all torch.distributed worlds of this rank."""
        if self._snapshots is not None:
            await self._snapshots.close()
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)
        if self._policy is not None:
            await self._on(self._compute, self._policy.close)
