"""The metrics of a step, gathered from all actors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.ledger import Counts
from monarch_rl.generator.actor import Generator
from monarch_rl.observe.registry import full_name
from monarch_rl.pipeline.actor_pool import ActorPool, last_line
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.rollout.statistics import WorkerStats
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, now, within

logger = logging.getLogger("monarch_rl")


class Observer:
    """Gathers the metrics of a step from all actors. Rates and shares are over the time since the last step.

    Args:
        rollouts: the file to which sampled rollouts are appended.
    """

    def __init__(self, publisher: Publisher, workers: ActorPool[RolloutWorker], buffer: Buffer, rollouts: Path) -> None:
        self._publisher = publisher
        self._workers = workers
        self._buffer = buffer
        self._rollouts = rollouts
        self._last_step_at = 0.0
        self._engines: dict[int, _Engine] = {}
        """What each replica had done at the last step, by index."""
        self._stats: dict[tuple[str, int], WorkerStats] = {}
        """The newest of each process that was a worker, by name and pid."""
        self._drawn, self._device_s = 0, 0.0
        """Tokens drawn by all replicas, and seconds that their devices were busy, since ``begin``."""

    async def begin(self) -> None:
        """Start the clock: rates and shares of the first step count from here."""
        self._last_step_at, self._engines = now(), await self._ask_engines()

    async def _ask_engines(self) -> dict[int, _Engine]:
        """By index. A replica that is lost meanwhile is left out: the publisher decides what happens to it."""

        async def ask(index: int, generator: Generator) -> tuple[int, _Engine] | None:
            try:
                call, name = generator.stats.call_one(), f"generator {index}"
                stats = await within(CALL_DEADLINE_S, call, f"the stats of {name}", on=name)
            except Exception as error:
                logger.warning("no stats of generator %d: %s", index, last_line(error))
                return None
            tokens, busy_s, request_s = stats["generated_tokens"], stats["busy_seconds"], stats["request_seconds"]
            return index, _Engine(stats["pid"], tokens, busy_s, request_s, stats["devices"])

        asked = [ask(index, generator) for index, generator in self._publisher.generators.items()]
        return dict(answer for answer in await asyncio.gather(*asked) if answer)

    async def step(self, trained: list[dict[str, float]]) -> dict[str, float]:
        """Metrics of one step, by the names of docs/metrics.md; also appends sampled rollouts to their file.

        Args:
            trained: what the update returned, of each trainer rank.
        """
        swap = self._publisher.last
        counts, stats, samples = await asyncio.gather(
            within(CALL_DEADLINE_S, self._buffer.counts.call_one(), "the counts of the buffer", on="buffer"),
            self._workers.ask(CALL_DEADLINE_S, "to return its stats", lambda _, worker: worker.stats.call_one()),
            self._workers.ask(CALL_DEADLINE_S, "to return rollouts", lambda _, worker: worker.samples.call_one(8)),
        )
        self._note_stats(stats)
        engines = await self._ask_engines()
        moment = now()
        elapsed = moment - self._last_step_at
        values = {full_name(name): value for name, value in trained[0].items()}
        values["time/step_s"] = elapsed
        computing = float(np.mean([rank["step_s"] for rank in trained])) + (swap.snapshot_s if swap else 0.0)
        values["trainer/idle_share"] = max(0.0, 1.0 - computing / elapsed)
        values |= self._generation(engines, elapsed)
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
        values["length/full_contexts"] = sum(worker.full_contexts for worker in self._stats.values())
        values |= self._lost(counts, list(self._stats.values()))
        self._last_step_at = moment
        self._engines |= engines  # a replica that did not answer is counted from its last answer
        with self._rollouts.open("a") as file:
            file.writelines(json.dumps(sample) + "\n" for batch in samples.values() for sample in batch)
        return values

    async def failed(self) -> Counter[str]:
        """Training episodes that have failed so far, by reason. Raises nothing: workers that do not answer are left
        out."""
        what = "to return its stats"
        self._note_stats(await self._workers.ask(CALL_DEADLINE_S, what, lambda _, worker: worker.stats.call_one()))
        return _failed(self._stats.values())

    def _note_stats(self, stats: Mapping[int, WorkerStats]) -> None:
        self._stats |= {(of_worker.worker, of_worker.pid): of_worker for of_worker in stats.values()}

    def _generation(self, engines: dict[int, _Engine], elapsed: float) -> dict[str, float]:
        """What the replicas did in the ``elapsed`` seconds since the last step."""
        since = [engine.since(self._engines.get(index)) for index, engine in engines.items()]
        tokens, busy_s = sum(engine.tokens for engine in since), sum(engine.busy_s for engine in since)
        self._drawn += tokens
        self._device_s += sum(engine.busy_s * engine.devices for engine in since)
        return {
            "generator/idle_share": max(0.0, 1.0 - busy_s / (elapsed * max(len(since), 1))),
            "generator/running": sum(engine.request_s for engine in since) / busy_s if busy_s else 0.0,
            "generator/replicas": float(len(self._publisher.generators)),
            "tokens_per_second": tokens / elapsed,
        }

    def _lost(self, counts: Counts, workers: list[WorkerStats]) -> dict[str, float]:
        """What was drawn and is not trained: groups and episodes by reason, tokens, and their device-seconds."""
        lost = Counter(counts.dropped)
        lost.update({f"episode {reason}": count for reason, count in _failed(workers).items()})
        tokens = sum(counts.wasted_tokens.values()) + sum(worker.failed_tokens for worker in workers)
        values = {f"dropped/{reason}": float(count) for reason, count in lost.items()}
        values |= {f"wasted/{reason}_tokens".replace(" ", "_"): float(n) for reason, n in counts.wasted_tokens.items()}
        return values | {"wasted/tokens": tokens, "wasted/seconds": tokens * self._device_s / max(self._drawn, 1)}


def _failed(workers: Iterable[WorkerStats]) -> Counter[str]:
    """Episodes that failed, by reason."""
    failed: Counter[str] = Counter()
    for worker in workers:
        failed.update(worker.failed)
    return failed


@dataclass(frozen=True, slots=True)
class _Engine:
    """What a replica has done since its start."""

    pid: int
    tokens: int
    busy_s: float
    request_s: float
    """Busy seconds, each multiplied by the requests that were in the engine."""
    devices: int

    def since(self, before: _Engine | None) -> _Engine:
        """What it did since ``before``; everything if that was another process."""
        if before is None or before.pid != self.pid:
            return self
        busy_s, request_s = self.busy_s - before.busy_s, self.request_s - before.request_s
        return _Engine(self.pid, self.tokens - before.tokens, busy_s, request_s, self.devices)
