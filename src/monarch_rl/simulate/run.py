"""A whole run in virtual time: the real loop, publisher, buffer and workers, and latency models for everything else."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.ledger import Counts
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.buffer.shards import ShardPlan
from monarch_rl.episode.episode import Group
from monarch_rl.episode.shard import PackedShard
from monarch_rl.errors import SettingsError
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.settings import GeneratorSettings, InFlight
from monarch_rl.model.messages import Message, ParsedReply
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.run import Run
from monarch_rl.pipeline.settings import RunSettings
from monarch_rl.pipeline.start import Actors
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.stages import Stage
from monarch_rl.rollout.worker import Resources, RolloutWorker
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, now, within
from monarch_rl.simulate.clock import run_virtual
from monarch_rl.simulate.costs import Costs, uniform
from monarch_rl.simulate.handles import LocalMesh
from monarch_rl.simulate.replica import SimulatedReplica
from monarch_rl.tasks.task import Outcome, Policy, Task
from monarch_rl.weights.transport import TransferSettings

FOREVER_S = 1e9
"""A deadline that no simulated wait reaches: long waits show in the metrics and are not errors."""
ANSWER_GRAINS = 64
"""Simulated tokens in a mean answer, if the grain is automatic: step times differ by less than 1 % from grain 1."""


@dataclass(frozen=True)
class Plan:
    """Sizes and devices of a run."""

    groups_per_step: int = 32
    """Prompts per optimiser step."""
    group_size: int = 8
    """Episodes per prompt."""
    trainer_devices: int = 4
    """Devices of the trainer."""
    replicas: int = 4
    """Generator replicas."""
    tp: int = 1
    """Devices per replica."""
    workers: int = 1
    """Rollout workers; each chooses replicas by its own requests only."""
    concurrent_groups: int = 0
    """Concurrent groups per worker; 0 is as many as the buffer has slots."""
    scorer_processes: int = 1
    """Concurrent scores per worker."""
    stage_concurrency: int = 8
    """Concurrent groups in stages, per worker."""
    in_flight: InFlight = "continue"
    """Treatment of running sequences at a commit (generator.in-flight)."""
    buffer: BufferSettings = field(default_factory=BufferSettings)
    seed: int = 0
    """Seed of all random numbers. It determines the lengths independently of all other settings, so settings can be
    compared."""

    def __post_init__(self) -> None:
        for name in (
            "groups_per_step",
            "trainer_devices",
            "replicas",
            "tp",
            "workers",
            "scorer_processes",
            "stage_concurrency",
        ):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.group_size < 1 or self.concurrent_groups < 0:
            raise SettingsError(
                f"group-size must be at least 1 and concurrent-groups must not be negative, got {self.group_size} and "
                f"{self.concurrent_groups}"
            )
        if self.places is None:
            raise SettingsError("set concurrent-groups: a stream's buffer has no slots from which to derive it")

    @property
    def places(self) -> int | None:
        """Concurrent groups per worker."""
        slots = self.buffer.slots_for(self.groups_per_step)
        return self.concurrent_groups or (None if slots is None else -(-slots // self.workers))


@dataclass(frozen=True)
class RunMetrics:
    """Metrics of a run, without its first steps."""

    step_s: float
    """Seconds per optimiser step."""
    trainer_idle_share: float
    generator_idle_share: float
    running: float
    """Mean number of requests in a replica while it has any."""
    tokens_per_s: float
    """Tokens per second sampled by all replicas."""
    lag: tuple[float, ...]
    """Share of the trained tokens with policy lag 0, 1, ..."""
    order_wait_share: float
    """Share of the time in which enough groups were complete but a slow one was due."""
    wasted_share: float
    """Share of the sampled tokens that are not trained: filtered, late, rejected."""
    steps: int
    run_s: float
    """Seconds of all steps on the event loop's clock."""
    wall_s: float
    """Real seconds that the simulation took."""

    @property
    def lag_mean(self) -> float:
        return sum(lag * share for lag, share in enumerate(self.lag))


def predict(plan: Plan, costs: Costs, steps: int = 40, warm_up: int = 10, grain: int = 0) -> RunMetrics:
    """Simulate ``steps`` optimiser steps; returns the metrics of those after the first ``warm_up``.

    Args:
        grain: number of real tokens per simulated token; 0 chooses it by the mean length.

    Raises:
        ValueError: the settings contradict each other.
    """
    if not 0 <= warm_up < steps:
        raise SettingsError(f"warm-up must be at least 0 and less than steps ({steps}), got {warm_up}")
    grain = grain or max(1, int(costs.length.average / ANSWER_GRAINS))
    return run_virtual(_predict(plan, costs, steps, warm_up, grain))


async def _predict(plan: Plan, costs: Costs, steps: int, warm_up: int, grain: int) -> RunMetrics:
    async with Run.open(run_settings(plan, FOREVER_S)) as run:
        await run.begin(simulated_actors(plan, costs, grain))
        return await measure(run, steps, warm_up)


def run_settings(plan: Plan, deadline_s: float) -> RunSettings:
    """Settings of a run with existing actors; ``deadline_s`` is the deadline of steps and transfers."""
    return RunSettings(
        groups_per_step=plan.groups_per_step,
        update_deadline_s=deadline_s,
        generator=GeneratorSettings(start_deadline_s=deadline_s),
        weights=TransferSettings(deadline_s=deadline_s),
    )


async def measure(run: Run, steps: int, warm_up: int) -> RunMetrics:
    """Run ``steps`` optimiser steps; returns the metrics of those after the first ``warm_up``.

    In real time if the run has real handles.

    Raises:
        RuntimeError: an episode failed.
        DeadlineExceeded: a batch was not ready in time.
    """
    started, wall = now(), time.perf_counter()
    rows: list[dict[str, float]] = []
    first = last = await run.counts()
    async for step in run.steps(steps):
        rows.append(await run.step())
        if step == warm_up:
            first = await run.counts()
        if step == steps:  # not after the loop: by then unfinished groups have been dropped
            last = await run.counts()
    if failed := [name for name in rows[-1] if name.startswith("dropped/episode")]:
        raise RuntimeError(f"episodes failed: {', '.join(failed)}")
    return _figures(rows[warm_up:], first, last, steps, now() - started, time.perf_counter() - wall)


def _figures(
    rows: list[dict[str, float]], first: Counts, last: Counts, steps: int, run_s: float, wall_s: float
) -> RunMetrics:
    """Sums and means over the measured steps.

    Args:
        rows: metrics of the measured steps.
        first: the buffer's counts before the measured steps.
        last: the buffer's counts after the measured steps.
        steps: number of all steps.
        run_s: seconds of all steps on the event loop's clock.
        wall_s: real seconds of all steps.
    """
    seconds = np.asarray([row["time/step_s"] for row in rows])

    def mean(name: str) -> float:
        """Mean weighted by the duration of each step."""
        return float(np.average([row[name] for row in rows], weights=seconds))

    lag = _difference(last.lag_counts, first.lag_counts)
    wasted = sum(last.wasted_tokens.values()) - sum(first.wasted_tokens.values())
    return RunMetrics(
        step_s=float(seconds.mean()),
        trainer_idle_share=mean("trainer/idle_share"),
        generator_idle_share=mean("generator/idle_share"),
        running=mean("generator/running"),
        tokens_per_s=mean("tokens_per_second"),
        lag=tuple(float(share) for share in lag / max(lag.sum(), 1)),
        order_wait_share=(last.order_wait_s - first.order_wait_s) / float(seconds.sum()),
        wasted_share=wasted / max(wasted + int(lag.sum()), 1),
        steps=steps,
        run_s=run_s,
        wall_s=wall_s,
    )


def _difference(after: list[int], before: list[int]) -> np.ndarray:
    found = np.asarray(after, np.int64)
    found[: len(before)] -= np.asarray(before, np.int64)
    return found


def simulated_actors(plan: Plan, costs: Costs, grain: int) -> Actors:
    """The actors of a simulated run: real buffer and workers, and latency models of trainer, engines and scores."""

    def mesh(*actors: Any) -> Any:  # replaces the handle of the real actor: tests/simulate/test_handles.py
        return LocalMesh(actors, costs.call_s)

    buffer = mesh(Buffer(plan.groups_per_step, replace(plan.buffer, max_mib=2**30)))
    trainer = mesh(SimulatedTrainer(costs, plan.trainer_devices, grain, buffer))
    replicas = [SimulatedReplica(costs, grain, plan.in_flight, plan.tp) for _ in range(plan.replicas)]
    rollout = [SimulatedWorker(plan, costs, grain, f"rollout worker {rank}") for rank in range(plan.workers)]
    for worker in rollout:
        worker.set_up(buffer, replicas)
    for name in ("buffer", *(f"rollout worker {rank}" for rank in range(plan.workers))):
        wait_registry.unregister(name)  # there is no watch, and virtual hours would have many heartbeats
    workers = ActorPool("rollout worker", "rollout", {rank: mesh(worker) for rank, worker in enumerate(rollout)})
    generators = ActorPool("generator", "generator", {index: mesh(replica) for index, replica in enumerate(replicas)})
    return Actors(buffer, trainer, generators, workers)


class SimulatedTrainer:
    """The whole trainer mesh as one rank, because ranks split a batch by tokens and wait for each other."""

    def __init__(self, costs: Costs, devices: int, grain: int, buffer: Buffer) -> None:
        self._costs = costs
        self._token_s = costs.trainer.token_s * grain / devices
        self._buffer = buffer

    async def update(self, version: int, batch_deadline_s: float) -> dict[str, float]:
        """Like ``Trainer.update``: take the batch, then spend the time of the update."""
        started = now()
        take = self._buffer.take.call_one(
            version, 0, ShardPlan(dp_size=1, tokens_per_microbatch=2**62), batch_deadline_s
        )
        what = f"the batch of step {version + 1}"
        shard: PackedShard = await within(batch_deadline_s + CALL_DEADLINE_S, take, what, on="buffer")
        taken = now()
        await asyncio.sleep(self._costs.trainer.step_s + self._token_s * shard.trainable_tokens)
        return {"tokens": float(shard.trainable_tokens), "wait_s": taken - started, "step_s": now() - taken}

    async def token_records(self) -> list[Any]:
        """Empty: simulated episodes have no meaningful tokens."""
        return []

    async def owned_spans(self) -> tuple[int, list[Any], list[Any]]:
        """A version with a single element."""
        return 0, [("weights", (1,))], [("weights", 0, 1)]

    async def base_checksums(self, dtype: str) -> tuple[list[Any], list[int]]:
        """Empty: no tensor is frozen."""
        return [], []

    async def weights_setup(self, manifest: Any, settings: Any) -> None:
        """Does nothing."""

    async def weights_open(self) -> tuple[int, bytes]:
        """Rank, and an address to which nothing connects."""
        return 0, b""

    async def weights_connect(self, addresses: list[bytes], receivers: int) -> None:
        """Does nothing."""

    async def ready(self) -> None:
        """Returns at once: the simulated trainer is always ready."""

    async def snapshot(self, version: int, index: int) -> float:
        """Spend the time of the copy, for which the next update waits."""
        await asyncio.sleep(self._costs.snapshot_s)
        return self._costs.snapshot_s

    async def send(self, version: int, snapshot: int) -> list[int]:
        """Takes no time: the replica's ``receive`` takes the time of the transfer."""
        return [0]


class SimulatedWorker(RolloutWorker):
    """The real worker, with its concurrency, groups and submitting, but meaningless tokens and scores that only take
    time."""

    def __init__(self, plan: Plan, costs: Costs, grain: int, name: str) -> None:
        limit = costs.length.maximum
        settings = RolloutSettings(
            concurrent_groups=plan.places or 1,
            group_size=plan.group_size,
            max_new_tokens=2**31 - 1 if math.isinf(limit) else max(1, math.ceil(limit / grain)),
            seed=plan.seed,
            episode_deadline_s=FOREVER_S,
            slot_deadline_s=FOREVER_S,
        )
        items = _Items(plan.seed, costs.equal_rewards)
        task = Task(items, _play, {"held_out": items}, name="simulated", success_reward=1.0)
        super().__init__(settings, ByValue(task), "", name, stages=ByValue(_stages(plan, costs)))
        self._costs = costs
        self._score_places = asyncio.Semaphore(plan.scorer_processes)
        prompt = max(1, round(costs.prompt_tokens / grain))
        template: Any = _Template(prompt)
        scorer: Any = self
        self._stand_ins = Resources(template, task, scorer)

    def set_up(self, buffer: Buffer, replicas: list[SimulatedReplica]) -> None:
        """Like ``setup``, with simulated chat template, task and scorer."""
        self.connect(buffer, SimulatedDispatcher(replicas), self._stand_ins)

    async def score(self, function: Any, entry: dict[str, Any]) -> Outcome:
        """Like ``Scorer.score``: wait for a free process, then for the time of a score. Rewards alternate between 0 and
        1, or are all 0."""
        entry["scored"] += 1
        reward = 0.0 if entry["equal"] else float(entry["scored"] % 2)
        seconds = self._costs.score.draw(entry["task"], ("score", entry["task"], entry["scored"]))
        if seconds > 0:
            async with self._score_places:
                await asyncio.sleep(seconds)
        return Outcome(reward)


def _stages(plan: Plan, costs: Costs) -> list[Stage]:
    """A single stage that takes the time of all stages; none if that is 0."""

    async def stage(entry: dict[str, Any], group: Group) -> None:
        await asyncio.sleep(costs.stage.draw(entry["task"], ("stage", entry["task"])))

    return [Stage(stage, concurrency=plan.stage_concurrency, deadline_s=FOREVER_S)] if costs.stage.average else []


class SimulatedDispatcher(Dispatcher):
    """The real dispatcher, with replicas in place of connections to them."""

    def __init__(self, replicas: list[SimulatedReplica]) -> None:
        connections: Any = replicas
        super().__init__(connections, FOREVER_S)
        self._connections = connections


class _Template:
    """Replaces :class:`ChatTemplate`. The first token ID of a prompt identifies its item; the others are
    meaningless."""

    stop_token_ids = ()
    system = ""

    def __init__(self, prompt: int) -> None:
        self._rest = [0] * (prompt - 1)

    def opening(self, messages: list[Message], tools: None) -> list[int]:
        return [int(messages[0].content), *self._rest]

    def read(self, token_ids: list[int], tools: None, stop: Sequence[str]) -> ParsedReply:
        return ParsedReply("", "")

    def decode(self, token_ids: list[int]) -> str:
        return ""

    plain = decode

    def token_texts(self) -> list[str]:
        return []


async def _play(item: dict[str, Any], policy: Policy) -> Outcome:
    """One turn, one score."""
    await policy.reply(str(item["task"]))
    return await policy.in_scorer(float, item)  # SimulatedWorker.score, which ignores the function


class _Items:
    """Replaces a task's data: items by cursor."""

    def __init__(self, seed: int, equal_rewards: float) -> None:
        self._seed = seed
        self._equal_rewards = equal_rewards

    def __len__(self) -> int:
        return 2**62

    def __call__(self, cursor: int) -> dict[str, Any]:
        equal = uniform("rewards", self._seed, cursor) < self._equal_rewards
        return {"task": cursor, "equal": equal, "scored": 0}

    __getitem__ = __call__
