"""Accuracy of the simulator: runs with injected latencies compared with their simulation.

    python benchmarks/simulate_validation.py

Each setting has a real run: Monarch processes, the buffer actor, rollout workers with tokenizer, tasks and scoring
processes, dispatchers and connections, the publisher and the recipe's loop. Only computation is replaced: the engine
sleeps through every decoding step and then gives each running sequence a token, and the trainer sleeps through its
update. Lengths are sampled with the same seeds on both sides; the time of a call to an actor is measured during the run
and passed to the simulation. The last line is JSON: predicted over observed step time, by setting.
"""

from __future__ import annotations

import monarch_rl  # isort: skip  # noqa: F401  its settings for Monarch count only if it is imported first

import asyncio
import json
import os
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import Actor, Port

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.settings import BufferSettings
from monarch_rl.episode.sampling import Completion, Sampling
from monarch_rl.errors import GenerationError
from monarch_rl.generator.commit import CommitReport
from monarch_rl.generator.connection import Answering
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.generator.parts import OnPart
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.run import Run
from monarch_rl.pipeline.start import Actors
from monarch_rl.rollout.settings import RolloutSettings
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.by_value import ByValue
from monarch_rl.runtime.cluster import Cluster, launch_cluster
from monarch_rl.runtime.deadlines import now, within
from monarch_rl.runtime.endpoint import concurrent_endpoint, one_way_endpoint
from monarch_rl.simulate.costs import Costs, DecodeCosts, Distribution, TrainerCosts
from monarch_rl.simulate.run import Plan, RunMetrics, SimulatedTrainer, measure, predict, run_settings
from monarch_rl.tasks.reasoning_gym import Item, ReasoningGym, TaskSettings
from monarch_rl.tasks.task import Outcome, Policy, Task

MODEL = Path(".cache/tiny-qwen3")
"""A model, for its tokenizer."""
TASK = TaskSettings("spell_backward", '{"min_word_len": 3, "max_word_len": 5}', "{word} -> ", held_out_size=1)
DEADLINE_S = 120.0
"""Deadline of a batch and of short waits, in seconds."""
RUN_S = 240.0
"""Deadline of a setting in seconds."""
STEPS, WARM_UP = 11, 3


@dataclass(frozen=True)
class Case:
    name: str
    plan: Plan
    costs: Costs


def case(name: str, lag: int, length: Distribution, trainer: TrainerCosts) -> Case:
    buffer = BufferSettings(lag)
    plan = Plan(4, 4, 1, 2, workers=1, scorer_processes=2, buffer=buffer, seed=7)
    decode = DecodeCosts(0.010, 0.0005, max_running=16)
    score = Distribution(0.1)
    return Case(name, plan, Costs(length, 1, decode, trainer, score, 0.0, 0.04, 0.2, 0.1))


CASES = (
    case("lag0_balanced", 0, Distribution(80, 0.3, 400), TrainerCosts(0.6, 0.0005)),
    case("lag1_long_tail", 1, Distribution(80, 1.0, 500), TrainerCosts(0.6, 0.0005)),
    case("lag2_trainer_bound", 2, Distribution(60, 0.8, 400), TrainerCosts(1.0, 0.001)),
)


@dataclass(eq=False)
class PendingSequence:
    """A running or waiting sequence."""

    length: int
    answer: asyncio.Future[Completion]
    versions: list[int]


class SleepingGenerator(Actor):
    """An engine that sleeps through each decoding step, then appends a token to every running sequence."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._answering = Answering(self._sample, GenerationError)
        self._waiting: deque[PendingSequence] = deque()
        self._running: list[PendingSequence] = []
        self._asked = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._decoding: asyncio.Task[None] | None = None
        self._version = self._tokens = 0
        self._busy_s = self._request_s = 0.0

    @concurrent_endpoint
    async def answer(self, connection: str, port: Port[Any]) -> None:
        """Like ``Generator.answer``."""
        await self._answering.answer(connection, port)

    @one_way_endpoint
    async def generate(self, connection: str, requests: bytes) -> None:
        """Like ``Generator.generate``."""
        self._answering.start(connection, requests)

    async def _sample(self, prompt_ids: list[int], sampling: Sampling, on_part: OnPart) -> Completion:
        tokens = self._costs.length.draw(0, sampling.seed)
        length = min(max(1, round(tokens)), sampling.max_new_tokens)
        sequence = PendingSequence(length, asyncio.get_running_loop().create_future(), [])
        self._waiting.append(sequence)
        self._asked.set()
        return await sequence.answer

    async def _decode(self) -> None:
        due = now()
        while True:
            if not self._waiting and not self._running:
                self._asked.clear()
                await self._asked.wait()
                due = now()
            asked = now()
            async with self._between_steps:
                began = now()
                due += began - asked  # a commit
                while self._waiting and len(self._running) < self._costs.decode.max_running:
                    self._running.append(self._waiting.popleft())
                count = len(self._running)
                # Sleeps until the due time, so that delays of waking up do not add up.
                step_s = self._costs.decode.step_s + self._costs.decode.sequence_s * count
                due += step_s
                await asyncio.sleep(due - began)
                self._busy_s += now() - began
                self._request_s += (count + len(self._waiting)) * (now() - began)
                self._tokens += count
                for sequence in self._running:
                    sequence.versions.append(self._version)
                    if len(sequence.versions) == sequence.length:
                        sequence.answer.set_result(completion(sequence.versions))
                self._running = [one for one in self._running if len(one.versions) < one.length]

    @concurrent_endpoint
    async def weights_setup(self, manifest: Any, settings: Any) -> float:
        """Start to decode; running sequences never delay a commit."""
        self._decoding = asyncio.ensure_future(self._decode())
        return 0.0

    @concurrent_endpoint
    async def weights_connect(self, addresses: list[bytes], position: int, receivers: int) -> None:
        """Nothing to connect."""

    @concurrent_endpoint
    async def block_until_lost(self) -> None:
        """Never returns; the call fails when this process is lost."""
        await asyncio.Event().wait()  # waits: as long as the run

    @concurrent_endpoint
    async def ready(self) -> None:
        """Raise the error that ended decoding, if there is one."""
        if self._decoding is not None and self._decoding.done():
            self._decoding.result()

    @concurrent_endpoint
    async def receive(self, version: int, snapshot: int) -> int:
        await asyncio.sleep(self._costs.transfer_s)
        return 1

    @concurrent_endpoint
    async def commit(self, version: int, snapshot: int, checksums: dict[str, int]) -> CommitReport:
        async with self._between_steps:
            await asyncio.sleep(self._costs.commit_s)
            self._version = version
        pause = self._costs.commit_s
        return CommitReport(version, 1, pause, pause, pause, 0.0)

    @concurrent_endpoint
    async def stats(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "generated_tokens": self._tokens,
            "turn_prompt_tokens": 0,
            "turn_cached_tokens": 0,
            "turn_reread_tokens": 0,
            "busy_seconds": self._busy_s,
            "request_seconds": self._request_s,
            "devices": 1,
        }


def completion(versions: list[int]) -> Completion:
    n = len(versions)
    return Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), np.asarray(versions, np.int32), "stop")


class SleepingTrainer(Actor):
    """The simulator's trainer as an actor: it takes batches from the buffer and sleeps in real time."""

    def __init__(self, costs: Costs, devices: int, buffer: Any) -> None:
        self._trainer = SimulatedTrainer(costs, devices, 1, buffer)

    @concurrent_endpoint
    async def update(self, version: int, batch_deadline_s: float) -> dict[str, float]:
        return await self._trainer.update(version, batch_deadline_s)

    @concurrent_endpoint
    async def base_checksums(self, dtype: str) -> tuple[list[Any], list[int]]:
        return await self._trainer.base_checksums(dtype)

    @concurrent_endpoint
    async def owned_spans(self) -> tuple[int, list[Any], list[Any]]:
        return await self._trainer.owned_spans()

    @concurrent_endpoint
    async def weights_setup(self, manifest: Any, settings: Any) -> None: ...

    @concurrent_endpoint
    async def weights_open(self) -> tuple[int, bytes]:
        return await self._trainer.weights_open()

    @concurrent_endpoint
    async def weights_connect(self, addresses: list[bytes], receivers: int) -> None: ...

    @concurrent_endpoint
    async def ready(self) -> None: ...

    @concurrent_endpoint
    async def snapshot(self, version: int, index: int) -> float:
        return await self._trainer.snapshot(version, index)

    @concurrent_endpoint
    async def send(self, version: int, snapshot: int) -> list[int]:
        return await self._trainer.send(version, snapshot)


class SlowlyScoringWorker(RolloutWorker):
    """The real worker, with a score that takes a given time in a scoring process."""

    @concurrent_endpoint
    async def score_takes(self, seconds: float) -> None:
        self._task = slowly_scored(seconds)


def slowly_scored(seconds: float) -> Task:
    """Return :data:`TASK` with a score that takes ``seconds``."""

    def score() -> float:
        time.sleep(seconds)
        return seconds

    async def episode(item: Item, policy: Policy) -> Outcome:
        await policy.reply(item.prompt)
        return await policy.in_scorer(score)

    return ReasoningGym(TASK).with_episode(episode)


async def observe(meshes: dict[str, Any], case: Case) -> tuple[RunMetrics, float]:
    """Run the case; returns its metrics, and the mean seconds of a call during the run."""
    plan, costs, name = case.plan, case.costs, case.name
    buffer = meshes["buffer"].spawn(f"buffer_{name}", Buffer, plan.groups_per_step, plan.buffer)
    trainer = meshes["trainer"].spawn(f"trainer_{name}", SleepingTrainer, costs, plan.trainer_devices, buffer)
    generators = [
        meshes[f"generator{index}"].spawn(f"generator{index}_{name}", SleepingGenerator, costs)
        for index in range(plan.replicas)
    ]
    settings = RolloutSettings(
        workers=plan.workers,
        concurrent_groups=plan.places or 1,
        group_size=plan.group_size,
        max_new_tokens=int(costs.length.maximum),
        seed=plan.seed,
        scorer_processes=plan.scorer_processes,
    )
    worker = meshes["rollout"].spawn(
        f"rollout_{name}", SlowlyScoringWorker, settings, ByValue(slowly_scored(0.0)), str(MODEL)
    )
    await within(DEADLINE_S, worker.setup.call_one(buffer, Dispatcher(generators, DEADLINE_S)), "a worker to set up")
    await within(DEADLINE_S, worker.score_takes.call_one(costs.score.mean), "a worker to note the time of a score")
    workers = ActorPool("rollout worker", "rollout", {0: worker})
    actors = Actors(buffer, trainer, ActorPool("generator", "generator", dict(enumerate(generators))), workers)
    calls: list[float] = []
    async with asyncio.timeout(RUN_S), Run.open(run_settings(plan, DEADLINE_S)) as run:
        await run.begin(actors)
        await within(DEADLINE_S, worker.evaluate.call_one([0]), "a held-out item, so that the scoring processes run")
        calling = asyncio.ensure_future(call_now_and_then(trainer, calls))
        found = await measure(run, STEPS, WARM_UP)
    calling.cancel()
    await within(DEADLINE_S, worker.close.call_one(), "the worker to close")
    return found, float(np.mean(calls))


async def call_now_and_then(actor: Any, seconds: list[float]) -> None:
    """Record the durations of calls that do nothing."""
    while True:
        await asyncio.sleep(0.1)
        asked = now()
        await within(DEADLINE_S, actor.ready.call_one(), "trainer to answer")
        seconds.append(now() - asked)


async def validate(cluster: Cluster) -> dict[str, dict[str, float]]:
    replicas = max(case.plan.replicas for case in CASES)
    meshes = {"buffer": cluster.spawn("buffer", 1), "rollout": cluster.spawn("rollout", 1)}
    meshes["trainer"] = cluster.spawn("trainer", 1)
    meshes |= {f"generator{index}": cluster.spawn(f"generator{index}", 1) for index in range(replicas)}
    results = {}
    for case in CASES:
        seen, call_s = await observe(meshes, case)
        bare = await asyncio.to_thread(predict, case.plan, case.costs, STEPS, WARM_UP, 1)
        costs = replace(case.costs, call_s=call_s)
        foretold = await asyncio.to_thread(predict, case.plan, costs, STEPS, WARM_UP, 1)
        results[case.name] = compare(foretold, seen) | {
            "without_call_s": round(bare.step_s / seen.step_s, 3),
            "call_s": round(call_s, 4),
        }
        print(f"{case.name}: {results[case.name]}", flush=True)
    return results


def compare(foretold: RunMetrics, seen: RunMetrics) -> dict[str, float]:
    pairs = {
        "trainer_idle_share": (foretold.trainer_idle_share, seen.trainer_idle_share),
        "generator_idle_share": (foretold.generator_idle_share, seen.generator_idle_share),
        "running": (foretold.running, seen.running),
        "lag_mean": (foretold.lag_mean, seen.lag_mean),
    }
    found = {"predicted_over_observed_step": foretold.step_s / seen.step_s, "step_s": seen.step_s}
    for name, (predicted, observed) in pairs.items():
        found |= {f"{name}_predicted": predicted, f"{name}_observed": observed}
    found["simulated_times_faster"] = foretold.run_s / foretold.wall_s
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    with launch_cluster() as cluster:
        if cluster is not None:
            print(json.dumps(asyncio.run(validate(cluster))))


if __name__ == "__main__":
    main()
