"""Composition: the meshes of a run and what goes between them. The only file that knows all four actors.

    buffer <-- groups -- rollout workers -- prompts --> generators
      |                                                     ^
      +-- batch --> trainer ranks -- new weights -----------+

Rollout data does not pass through here: workers put groups into the buffer, trainer ranks take batches from it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from monarch.actor import ProcMesh

from monarch_rl.adapter import FULL_TRAINING, LoraSettings
from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.ledger import Counts
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.crew import Crew, Way
from monarch_rl.generator.actor import Generator
from monarch_rl.generator.router import Router
from monarch_rl.generator.settings import GeneratorSettings, resolve_dtype
from monarch_rl.publishing import Publisher, Routing
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.tasks import TaskSettings
from monarch_rl.rollout.worker import Evaluation, RolloutWorker, WorkerStats
from monarch_rl.runtime import presence
from monarch_rl.runtime.cluster import Cluster, init_torch_distributed_env
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, Patience, now, within
from monarch_rl.trainer.actor import Trainer, TrainerPlan

logger = logging.getLogger("monarch_rl")

SET_UP_DEADLINE_S = 600.0
"""Seconds to load a model into trainer ranks or to set up workers: a large model on a slow disk takes minutes."""
UPDATE_GRACE_S = 15.0
"""Seconds by which a rank's own deadline for its batch may be told late."""
HELD_OUT_ITEM_S = 30.0
"""Seconds that a held-out item may take on average, played beside others."""

T = TypeVar("T")


async def start_buffer(cluster: Cluster, groups_per_step: int, settings: BufferSettings) -> Any:
    """Spawn the buffer actor on the first host."""
    mesh = cluster.spawn("buffer", 1)
    return mesh.spawn("buffer", Buffer, groups_per_step, settings)


async def start_trainer(cluster: Cluster, plan: TrainerPlan, buffer: Any, first_slot: int) -> Any:
    """Spawn the trainer mesh in one torch.distributed world, with the model loaded and sharded."""
    mesh: ProcMesh = cluster.spawn("trainer", plan.settings.ranks, first_slot=first_slot)
    await init_torch_distributed_env(mesh)
    trainer = mesh.spawn("trainer", Trainer, plan, buffer)
    what = f"{plan.settings.ranks} trainer ranks to load {plan.model}"
    await within(SET_UP_DEADLINE_S, trainer.setup.call(), what, on="trainer ranks")
    return trainer


async def start_generators(
    cluster: Cluster,
    model: Path,
    settings: GeneratorSettings,
    first_slot: int,
    lora: LoraSettings = FULL_TRAINING,
    routes: bool = False,
) -> Crew:
    """Spawn the generator replicas, one process mesh each, with their engines running.

    Args:
        lora: the trainer's; with adapters, versions are adapters, or weights with adapters on experts merged.
        routes: they can tell by which experts they read each token.
    """

    def spawn(index: int) -> tuple[ProcMesh, Any]:
        slot = first_slot + index * settings.tp
        mesh = cluster.spawn(f"generator{index}", 1, first_slot=slot, slots_per_process=settings.tp)
        return mesh, mesh.spawn(f"generator{index}", Generator)

    async def set_up(index: int, replica: Any) -> None:
        start, name = replica.setup.call_one(str(model), settings, index, lora, routes), f"generator {index}"
        await within(settings.start_deadline_s + CALL_DEADLINE_S, start, f"{name} to start", on=name)

    generators = Crew("generator", "generator", way=Way(cluster, spawn, set_up))
    await generators.start_all(settings.replicas)
    return generators


async def start_rollout(
    cluster: Cluster,
    settings: RolloutSettings,
    task: TaskSettings,
    model: Path,
    buffer: Any,
    generators: Crew,
    episode_limit: int,
    routes: bool = False,
) -> Crew:
    """Spawn the rollout workers on the first host, one process mesh each, with a router of its own over all replicas.

    Args:
        episode_limit: tokens that an episode may have; longer ones fail, are counted and shown.
        routes: episodes keep by which experts the generators read their tokens.
    """

    def spawn(index: int) -> tuple[ProcMesh, Any]:
        mesh = cluster.spawn(f"rollout{index}", 1)
        name = f"rollout worker {index}"
        return mesh, mesh.spawn("rollout", RolloutWorker, settings, task, str(model), name, routes)

    async def set_up(index: int, worker: Any) -> None:
        replicas = [generators.latest[replica] for replica in sorted(generators.latest)]
        set_up = worker.setup.call_one(buffer, Router(replicas, settings.generate_deadline_s), episode_limit)
        name = f"rollout worker {index}"
        await within(SET_UP_DEADLINE_S, set_up, f"{name} to set up", on=name)

    workers = Crew("rollout worker", "rollout", way=Way(cluster, spawn, set_up))
    await workers.start_all(settings.workers)
    return workers


def routing(workers: Crew) -> Routing:
    """Tells all rollout workers which replicas take no new requests, and which are lost."""

    async def tell(paused: list[int], lost: list[int]) -> None:
        what = "to take note of the replicas"
        await workers.ask(CALL_DEADLINE_S, what, lambda _, worker: worker.route.call_one(paused, lost))

    return tell


def served_dtype(settings: GeneratorSettings, cluster: Cluster) -> str:
    """The dtype that generators serve and versions are sent in."""
    return resolve_dtype(settings.dtype, cluster.devices.kind == "cuda")


def schedule(groups_per_step: int, group_size: int, buffer: BufferSettings) -> str:
    """The schedule that the settings amount to, in sentences for the start of a run."""
    slots, window = buffer.slots_for(groups_per_step), buffer.window_for(groups_per_step)
    order = "any number of groups may" if window is None else f"at most {window} groups may"
    batch = f"{groups_per_step} prompts x {group_size} episodes = {groups_per_step * group_size} episodes a step; "
    if slots is None:
        return (
            f"{batch}stream: nothing bounds the lag. Tokens may be trained however old they are, above all where "
            f"generators are faster than the trainer; {order} overtake another."
        )
    late = {
        "wait": "the trainer waits for it then",
        "drop": "a group above the bound is dropped",
        "mask": "tokens above the bound are not trained",
    }[buffer.late]
    return f"{batch}lag <= {buffer.max_policy_lag}; buffer of {slots} groups; {order} overtake another: {late}."


async def update(trainer: Any, buffer: Any, version: int, patience: Patience) -> list[dict[str, float]]:
    """One optimiser step from ``version`` on every trainer rank, once its batch is there; metrics by rank.

    Args:
        patience: how long batch and update may take together, judged by the steps before.
    """
    with patience.step() as limit_s:
        # The rank's own deadline comes first: the buffer can say what its batch lacks.
        call = trainer.update.call(version, limit_s)
        what = f"trainer ranks to make step {version + 1}"
        answers = await within(limit_s + UPDATE_GRACE_S, call, what, on="trainer ranks")
    await within(CALL_DEADLINE_S, buffer.trained.call_one(version + 1), "the buffer to note the step", on="buffer")
    presence.progress("step trained")
    return list(answers.values())


async def save(trainer: Any, folder: Path) -> None:
    """Write the model as a Hugging Face folder, by all trainer ranks together."""
    what = f"trainer ranks to save to {folder}"
    # A disk is outside the run: a slow one is no stall.
    await within(SET_UP_DEADLINE_S, trainer.save.call(str(folder)), what, on="the disk")


async def evaluate(workers: Crew, items: int) -> Evaluation:
    """Play the first ``items`` held-out items once each, greedily, shared by all workers.

    What a worker owes that is lost meanwhile others play, or the one that takes its place.
    """
    left, parts, lost = list(range(items)), list[Evaluation](), dict[int, Any]()
    while left:
        workers.changed.clear()
        players = {index: worker for index, worker in workers.handles.items() if id(worker) not in lost}
        if not players:
            what = "a rollout worker to play the held-out items"
            await within(SET_UP_DEADLINE_S, workers.changed.wait(), what, on="controller")
            continue
        shares = dict(zip(players, (left[rank :: len(players)] for rank in range(len(players))), strict=True))
        deadline = SET_UP_DEADLINE_S + HELD_OUT_ITEM_S * items / len(players)

        def play(index: int, worker: Any, shares: dict[int, list[int]] = shares) -> Any:
            return worker.evaluate.call_one(shares[index])

        played = await workers.ask(deadline, "to play the held-out items", play, players)
        parts += played.values()
        lost |= {id(worker): worker for index, worker in players.items() if index not in played}
        left = sorted(item for index in players.keys() - played.keys() for item in shares[index])
    failed: Counter[str] = Counter()
    for part in parts:
        failed.update(part.failed)
    return Evaluation(np.concatenate([part.rewards for part in parts]), dict(failed))


class Observer:
    """Gathers the figures of a step from all actors. Rates and shares are over the time since the last step."""

    def __init__(self, publisher: Publisher, workers: Crew, buffer: Any, rollouts: Path) -> None:
        self._publisher = publisher
        self._workers = workers
        self._buffer = buffer
        self._rollouts = rollouts
        self._then = 0.0
        self._engines: dict[int, _Engine] = {}
        """The replicas that are there."""
        self._stats: dict[tuple[str, int], WorkerStats] = {}
        """The last of each process that was a worker, by name and pid."""
        self._drawn, self._device_s = 0, 0.0
        """Tokens drawn by all replicas, and seconds that their devices were busy, since ``begin``."""

    async def begin(self) -> None:
        """Start the clock: rates and shares of the first step count from here."""
        self._then, self._engines = now(), await self._ask_engines()

    async def _ask_engines(self) -> dict[int, _Engine]:
        """A replica that is lost meanwhile is left out: what happens to it is the publisher's to say."""

        async def ask(index: int, generator: Any) -> tuple[int, _Engine] | None:
            try:
                call, name = generator.stats.call_one(), f"generator {index}"
                found = await within(CALL_DEADLINE_S, call, f"the figures of {name}", on=name)
            except Exception as error:
                logger.warning("no figures of generator %d: %s", index, str(error).splitlines()[0])
                return None
            names = ("pid", "generated_tokens", "busy_seconds", "request_seconds", "devices")
            return index, _Engine(*(found[name] for name in names))

        asked = [ask(index, generator) for index, generator in self._publisher.generators.items()]
        return dict(answer for answer in await asyncio.gather(*asked) if answer)

    async def step(self, trained: list[dict[str, float]]) -> dict[str, float]:
        """Metrics of one step, by the names of docs/metrics.md; also appends sampled rollouts to their file.

        Args:
            trained: what the update returned, of each trainer rank.
        """
        swap = self._publisher.last
        counts, stats, samples = await asyncio.gather(
            within(CALL_DEADLINE_S, self._buffer.counts.call_one(), "the figures of the buffer", on="buffer"),
            self._workers.ask(CALL_DEADLINE_S, "to tell its figures", lambda _, worker: worker.stats.call_one()),
            self._workers.ask(CALL_DEADLINE_S, "to tell its rollouts", lambda _, worker: worker.samples.call_one(8)),
        )
        self._stats |= {(found.worker, found.pid): found for found in stats.values()}
        engines = await self._ask_engines()
        moment = now()
        elapsed = moment - self._then
        since = [found.since(self._engines.get(index)) for index, found in engines.items()]
        tokens, busy = sum(one.tokens for one in since), sum(one.busy_s for one in since)
        self._drawn += tokens
        self._device_s += sum(one.busy_s * one.devices for one in since)
        values = {_metric_name(name): value for name, value in trained[0].items()}
        values["time/step_s"] = elapsed
        computing = float(np.mean([rank["step_s"] for rank in trained])) + (swap.snapshot_s if swap else 0.0)
        values["trainer/idle_share"] = max(0.0, 1.0 - computing / elapsed)
        values["generator/idle_share"] = max(0.0, 1.0 - busy / (elapsed * max(len(since), 1)))
        values["generator/running"] = sum(one.request_s for one in since) / busy if busy else 0.0
        values["generator/replicas"] = float(len(self._publisher.generators))
        values["tokens_per_second"] = tokens / elapsed
        if swap is not None:
            values["weights/swap_ms"] = swap.paused_s * 1e3
            values["weights/verify_share"] = swap.verify_share
            values["weights/transfer_ms"] = swap.transfer_s * 1e3
            values["weights/snapshot_ms"] = swap.snapshot_s * 1e3
            values["weights/sent_share"] = swap.sent_bytes / swap.nbytes
            values["weights/served_version"] = swap.version
        values["buffer/admitted"] = counts.admitted
        values["buffer/trained"] = counts.trained
        values["buffer/playing"], values["buffer/complete"] = counts.playing, counts.complete
        values["buffer/mib"] = counts.nbytes / 2**20
        values["buffer/order_waits"] = counts.order_waits
        values["buffer/order_wait_s"] = counts.order_wait_s
        values |= self._lost(counts, list(self._stats.values()))
        self._then = moment
        self._engines |= engines  # one that did not answer this time is counted from where it was
        with self._rollouts.open("a") as file:
            file.writelines(json.dumps(sample) + "\n" for batch in samples.values() for sample in batch)
        return values

    def _lost(self, counts: Counts, workers: list[WorkerStats]) -> dict[str, float]:
        """What was drawn and is not trained: groups and episodes by reason, tokens, and their share of the devices."""
        lost = Counter(counts.dropped)
        for worker in workers:
            lost.update({f"episode {reason}": count for reason, count in worker.failed.items()})
        tokens = sum(counts.wasted_tokens.values()) + sum(worker.failed_tokens for worker in workers)
        values = {f"dropped/{reason}": float(count) for reason, count in lost.items()}
        values |= {f"wasted/{reason}_tokens".replace(" ", "_"): float(n) for reason, n in counts.wasted_tokens.items()}
        return values | {"wasted/tokens": tokens, "wasted/seconds": tokens * self._device_s / max(self._drawn, 1)}


@dataclass(frozen=True, slots=True)
class _Engine:
    """What a replica has done."""

    pid: int
    tokens: int
    busy_s: float
    request_s: float
    """Busy seconds, each times the requests that were in the engine."""
    devices: int

    def since(self, before: _Engine | None) -> _Engine:
        if before is None or before.pid != self.pid:  # it was started anew
            return self
        busy_s, request_s = self.busy_s - before.busy_s, self.request_s - before.request_s
        return _Engine(self.pid, self.tokens - before.tokens, busy_s, request_s, self.devices)


_GROUPED = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "equal_reward_groups": "reward/equal_groups_share",
    "lag_mean": "lag/mean",
    "lag_max": "lag/max",
}


def _metric_name(name: str) -> str:
    return _GROUPED.get(name, f"trainer/{name}")
