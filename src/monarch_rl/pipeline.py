"""Composition: the meshes of a run and what goes between them. The only file that knows all four actors.

    buffer <-- groups -- rollout workers -- prompts --> generators
      |                                                     ^
      +-- batch --> trainer ranks -- new weights -----------+

Rollout data does not pass through here: workers put groups into the buffer, trainer ranks take batches from it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from monarch.actor import ProcMesh

from monarch_rl.adapter import FULL_TRAINING, LoraSettings
from monarch_rl.buffer.actor import Buffer
from monarch_rl.generator.actor import Generator
from monarch_rl.generator.router import Router
from monarch_rl.generator.settings import GeneratorSettings, resolve_dtype
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.tasks import TaskSettings
from monarch_rl.rollout.worker import Evaluation, RolloutWorker
from monarch_rl.runtime.cluster import Cluster, init_torch_distributed_env
from monarch_rl.runtime.deadlines import within
from monarch_rl.trainer.actor import Trainer, TrainerPlan
from monarch_rl.weights.manifest import Manifest, make_manifest
from monarch_rl.weights.transport import TransferSettings

CALL_DEADLINE_S = 60.0
"""Seconds for a call that waits for nobody else."""
SET_UP_DEADLINE_S = 600.0
"""Seconds to load a model into trainer ranks or to set up workers: a large model on a slow disk takes minutes."""
HELD_OUT_ITEM_S = 30.0
"""Seconds that a held-out item may take on average, played beside others."""

T = TypeVar("T")


async def start_buffer(cluster: Cluster, groups_per_step: int, max_policy_lag: int) -> Any:
    """Spawn the buffer actor on the first host."""
    mesh = cluster.spawn("buffer", 1)
    return mesh.spawn("buffer", Buffer, groups_per_step, max_policy_lag)


async def start_trainer(cluster: Cluster, plan: TrainerPlan, buffer: Any, first_slot: int) -> Any:
    """Spawn the trainer mesh in one torch.distributed world, with the model loaded and sharded."""
    mesh: ProcMesh = cluster.spawn("trainer", plan.settings.ranks, first_slot=first_slot)
    await init_torch_distributed_env(mesh)
    trainer = mesh.spawn("trainer", Trainer, plan, buffer)
    await within(SET_UP_DEADLINE_S, trainer.setup.call(), f"{plan.settings.ranks} trainer ranks to load {plan.model}")
    return trainer


async def start_generators(
    cluster: Cluster, model: Path, settings: GeneratorSettings, first_slot: int, lora: LoraSettings = FULL_TRAINING
) -> list[Any]:
    """Spawn the generator replicas, one process mesh each, with their engines running.

    Args:
        lora: the trainer's; with adapters, versions are adapters.
    """
    replicas = []
    for index in range(settings.replicas):
        mesh = cluster.spawn(f"generator{index}", 1, first_slot=first_slot + index)
        replicas.append(mesh.spawn(f"generator{index}", Generator))
    deadline = settings.start_deadline_s + CALL_DEADLINE_S
    starts = [
        within(deadline, replica.setup.call_one(str(model), settings, index, lora), f"generator {index} to start")
        for index, replica in enumerate(replicas)
    ]
    await asyncio.gather(*starts)
    return replicas


async def start_rollout(
    cluster: Cluster,
    settings: RolloutSettings,
    task: TaskSettings,
    model: Path,
    buffer: Any,
    generators: list[Any],
    episode_limit: int,
) -> Any:
    """Spawn the rollout workers on the first host, each with a router of its own over all replicas.

    Args:
        episode_limit: tokens that an episode may have; longer ones fail, are counted and shown.
    """
    mesh = cluster.spawn("rollout", settings.workers)
    workers = mesh.spawn("rollout", RolloutWorker, settings, task, str(model))
    router = Router(generators, settings.generate_deadline_s)
    what = f"{settings.workers} rollout workers to set up"
    await within(SET_UP_DEADLINE_S, workers.setup.call(buffer, router, episode_limit), what)
    return workers


@dataclass
class SwapReport:
    """One version's way from trainer to generators, in seconds."""

    version: int
    snapshot_s: float
    """The local copy on the trainer: all that publishing makes it wait."""
    transfer_s: float
    """From trainer ranks into staging, while decoding went on."""
    paused_s: float
    """The longest time that a replica did not decode."""
    nbytes: int
    """Bytes of the version."""


@dataclass
class Publisher:
    """Takes new versions from the trainer mesh to all generators: transfer, then commit, then served."""

    trainer: Any
    generators: list[Any]
    buffer: Any
    settings: TransferSettings
    manifest: Manifest
    last: SwapReport | None = None
    """Of the newest version that is served."""
    _delivery: asyncio.Task[None] | None = field(default=None, repr=False)

    @classmethod
    async def connect(
        cls, trainer: Any, generators: list[Any], buffer: Any, settings: TransferSettings, dtype: str
    ) -> Publisher:
        """Plan what a version consists of, and let trainer ranks and generators meet. ``dtype`` is the served one."""
        manifest = await _plan(trainer, dtype)
        opened = await within(
            CALL_DEADLINE_S,
            trainer.open_transport.call(manifest, settings),
            "trainer ranks to open the transport",
        )
        addresses = [address for _, address in sorted(opened.values())]
        for index, generator in enumerate(generators):
            set_up = generator.weights_setup.call_one(manifest, index, addresses, settings)
            await within(CALL_DEADLINE_S, set_up, f"generator {index} to make its staging area")
        deadline = settings.deadline_s + CALL_DEADLINE_S
        count = len(generators)
        meets: list[Awaitable[Any]] = [
            within(deadline, trainer.connect.call(count), "trainer ranks to meet the generators")
        ]
        for index, generator in enumerate(generators):
            what = f"generator {index} to meet the trainer ranks"
            meets.append(within(deadline, generator.weights_connect.call_one(count), what))
        await asyncio.gather(*meets)
        return cls(trainer, generators, buffer, settings, manifest)

    async def publish(self, version: int) -> None:
        """Take a snapshot of ``version`` and send it on its way; the trainer may go on when this returns.

        The version before must have arrived by then: its delivery is awaited first. Raises what that raised.
        """
        await self.settled()
        deadline = self.settings.deadline_s
        answers = await within(deadline, self.trainer.snapshot.call(), f"trainer ranks to copy version {version}")
        checksums, _ = next(iter(answers.values()))
        slowest = max(seconds for _, seconds in answers.values())
        self._delivery = asyncio.create_task(self._deliver(version, checksums, slowest))

    async def or_failed(self, work: Awaitable[T]) -> T:
        """Await ``work``, but raise at once if the version on its way cannot be delivered.

        Paused engines draw nothing, so ``work`` may wait for a batch that cannot come.
        """
        task = asyncio.ensure_future(work)
        try:
            if self._delivery is not None:
                await asyncio.wait({task, self._delivery}, return_when=asyncio.FIRST_COMPLETED)
                if self._delivery.done():
                    self._delivery.result()
            return await task
        finally:
            task.cancel()

    async def settled(self) -> None:
        """Wait until the newest published version is served. Raises if it could not be delivered."""
        if self._delivery is not None:
            await self._delivery
            self._delivery = None

    async def _deliver(self, version: int, checksums: list[int], snapshot_s: float) -> None:
        # A rank that enters a collective early waits inside it: first every peer's answer, then the transfer.
        await self._all_ready(version)
        started = time.perf_counter()
        deadline = self.settings.deadline_s + CALL_DEADLINE_S
        moves: list[Awaitable[Any]] = [
            within(deadline, self.trainer.send.call(version), f"trainer ranks to send version {version}")
        ]
        for index, generator in enumerate(self.generators):
            what = f"generator {index} to receive version {version}"
            moves.append(within(deadline, generator.receive.call_one(version), what))
        await asyncio.gather(*moves)
        transferred = time.perf_counter()
        expected = dict(zip(self.manifest.names, checksums, strict=True))
        commits = [
            within(deadline, generator.commit.call_one(version, expected), f"generator {index} to commit")
            for index, generator in enumerate(self.generators)
        ]
        reports = await asyncio.gather(*commits)
        if version > 0:
            await within(CALL_DEADLINE_S, self.buffer.published.call_one(version), "the buffer to release slots")
        paused = max(report.paused_seconds for report in reports)
        self.last = SwapReport(version, snapshot_s, transferred - started, paused, self.manifest.nbytes)

    async def _all_ready(self, version: int) -> None:
        what = f"to be ready for version {version}"
        checks: list[Awaitable[Any]] = [within(CALL_DEADLINE_S, self.trainer.ready.call(), f"trainer ranks {what}")]
        for index, generator in enumerate(self.generators):
            checks.append(within(CALL_DEADLINE_S, generator.stats.call_one(), f"generator {index} {what}"))
        await asyncio.gather(*checks)


async def _plan(trainer: Any, dtype: str) -> Manifest:
    import torch

    answers = await within(CALL_DEADLINE_S, trainer.owned_runs.call(), "trainer ranks to say what they own")
    by_rank = sorted(answers.values(), key=lambda answer: answer[0])
    served = getattr(torch, dtype)
    tensors = [(name, shape, served) for name, shape in by_rank[0][1]]
    return make_manifest(tensors, [runs for _, _, runs in by_rank])


def served_dtype(settings: GeneratorSettings, cluster: Cluster) -> str:
    """The dtype that generators serve and versions are sent in."""
    return resolve_dtype(settings.dtype, cluster.devices.kind == "cuda")


def schedule(groups_per_step: int, group_size: int, max_policy_lag: int) -> str:
    """The schedule that the settings amount to, as a sentence for the start of a run."""
    slots = (max_policy_lag + 1) * groups_per_step
    return (
        f"{groups_per_step} prompts x {group_size} episodes = {groups_per_step * group_size} episodes a step; "
        f"lag <= {max_policy_lag}; buffer of {slots} groups."
    )


async def update(trainer: Any, buffer: Any, version: int, batch_deadline_s: float) -> list[dict[str, float]]:
    """One optimiser step from ``version`` on every trainer rank, once its batch is there; metrics by rank."""
    answers = await within(
        batch_deadline_s + SET_UP_DEADLINE_S, trainer.update.call(version), f"trainer ranks to update version {version}"
    )
    await within(CALL_DEADLINE_S, buffer.trained.call_one(version + 1), "the buffer to note the step")
    return list(answers.values())


async def save(trainer: Any, folder: Path) -> None:
    """Write the model as a Hugging Face folder, by all trainer ranks together."""
    await within(SET_UP_DEADLINE_S, trainer.save.call(str(folder)), f"trainer ranks to save to {folder}")


async def evaluate(workers: Any, items: int) -> Evaluation:
    """Play the first ``items`` held-out items once each, greedily, shared by all workers."""
    shards = list(_each(workers))
    deadline = SET_UP_DEADLINE_S + HELD_OUT_ITEM_S * items / len(shards)
    calls = [
        within(
            deadline,
            worker.evaluate.call_one(list(range(rank, items, len(shards)))),
            f"rollout worker {rank} to play the held-out items",
        )
        for rank, worker in enumerate(shards)
    ]
    parts = await asyncio.gather(*calls)
    failed: Counter[str] = Counter()
    for part in parts:
        failed.update(part.failed)
    return Evaluation(np.concatenate([part.rewards for part in parts]), dict(failed))


@asynccontextmanager
async def rolling_out(workers: Any, buffer: Any) -> AsyncIterator[None]:
    """Workers play while the block runs; a worker that fails ends the block with its error."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for worker in _each(workers):
                tasks.create_task(_run(worker))
            yield
            await within(CALL_DEADLINE_S, buffer.close.call_one(), "the buffer to close")
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the others followed from it


async def _run(worker: Any) -> None:
    await worker.run.call_one()  # as long as the run; lost processes are Monarch's to report


def _each(mesh: Any) -> Iterable[Any]:
    for rank in range(mesh.extent.sizes[-1]):
        yield mesh.slice(**{mesh.extent.labels[-1]: rank})


class Observer:
    """Gathers the figures of a step from all actors. Rates and shares are over the time since the last step."""

    def __init__(self, generators: list[Any], workers: Any, buffer: Any, rollouts: Path) -> None:
        self._generators = generators
        self._workers = workers
        self._buffer = buffer
        self._rollouts = rollouts
        self._then = 0.0
        self._tokens = 0
        self._busy = 0.0

    async def begin(self) -> None:
        """Start the clock: rates and shares of the first step count from here."""
        self._then, self._tokens, self._busy, _ = await self._engines()

    async def _engines(self) -> tuple[float, int, float, int]:
        calls = [generator.stats.call_one() for generator in self._generators]
        engines = await asyncio.gather(*(within(CALL_DEADLINE_S, call, "a generator's figures") for call in calls))
        tokens = sum(engine["generated_tokens"] for engine in engines)
        return time.perf_counter(), tokens, sum(engine["busy_seconds"] for engine in engines), len(engines)

    async def step(self, trained: list[dict[str, float]], swap: SwapReport | None) -> dict[str, float]:
        """Metrics of one step, by the names of docs/metrics.md; also appends sampled rollouts to their file.

        Args:
            trained: what the update returned, of each trainer rank.
            swap: the newest version that is served.
        """
        calls = [self._buffer.counts.call_one(), self._workers.stats.call(), self._workers.samples.call(8)]
        answers = [within(CALL_DEADLINE_S, call, "the figures of a step") for call in calls]
        counts, stats, samples = await asyncio.gather(*answers)
        now, tokens, busy, replicas = await self._engines()
        elapsed = now - self._then
        values = {_metric_name(name): value for name, value in trained[0].items()}
        values["time/step_s"] = elapsed
        computing = float(np.mean([rank["step_s"] for rank in trained])) + (swap.snapshot_s if swap else 0.0)
        values["trainer/idle_share"] = max(0.0, 1.0 - computing / elapsed)
        values["generator/idle_share"] = max(0.0, 1.0 - (busy - self._busy) / (elapsed * replicas))
        values["tokens_per_second"] = (tokens - self._tokens) / elapsed
        if swap is not None:
            values["weights/swap_ms"] = swap.paused_s * 1e3
            values["weights/transfer_ms"] = swap.transfer_s * 1e3
            values["weights/snapshot_ms"] = swap.snapshot_s * 1e3
            values["weights/served_version"] = swap.version
        values["buffer/admitted"] = counts.admitted
        values["buffer/trained"] = counts.trained
        lost = Counter(counts.dropped)
        for worker in stats.values():
            lost.update({f"episode {reason}": count for reason, count in worker.failed.items()})
        values |= {f"dropped/{reason}": float(count) for reason, count in lost.items()}
        self._then, self._tokens, self._busy = now, tokens, busy
        with self._rollouts.open("a") as file:
            file.writelines(json.dumps(sample) + "\n" for batch in samples.values() for sample in batch)
        return values


_GROUPED = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "equal_reward_groups": "reward/equal_groups_share",
    "lag_mean": "lag/mean",
    "lag_max": "lag/max",
}


def _metric_name(name: str) -> str:
    return _GROUPED.get(name, f"trainer/{name}")
