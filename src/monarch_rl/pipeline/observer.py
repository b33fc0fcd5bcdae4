"""Gathers the metrics of a step from all actors, and from the engines of frozen models."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from monarch_rl.buffer.actor import Buffer
from monarch_rl.buffer.ledger import Counts
from monarch_rl.checkpoint.journal import LOST
from monarch_rl.generator.actor import Generator, GeneratorStats
from monarch_rl.generator.frozen import FrozenStats
from monarch_rl.observe.registry import full_name
from monarch_rl.pipeline.actor_pool import ActorPool, last_line
from monarch_rl.pipeline.frozen import FrozenPool
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.rollout.statistics import StageTime, WorkerStats, summed
from monarch_rl.rollout.worker import RolloutWorker
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, now, within

logger = logging.getLogger("monarch_rl")


class Observer:
    """Gathers the metrics of a step from all actors. Rates and shares refer to the time since the last step.

    Args:
        epoch: training items of the task, after which they repeat; None if they do not, or their number is not known.
    """

    def __init__(
        self, publisher: Publisher, workers: ActorPool[RolloutWorker], buffer: Buffer, epoch: int | None = None
    ) -> None:
        self._publisher = publisher
        self._workers = workers
        self._buffer = buffer
        self._epoch = epoch
        self._last_step_at = 0.0
        self._engines: dict[int, _Engine] = {}
        """Totals of each replica at the last step, by index."""
        self._stats: dict[tuple[str, int], WorkerStats] = {}
        """Newest stats of every worker process so far, by name and pid."""
        self._stages: dict[str, StageTime] = {}
        """Total time of groups in each stage at the last step."""
        self._ended = (0, 0)
        """Episodes that had failed because of infrastructure, and all that had ended, at the last step."""
        self._sampled, self._device_s = 0, 0.0
        """Tokens sampled by all replicas, and seconds that their devices were busy, over the whole run."""

    async def begin(self) -> None:
        """Start the clock: the rates and shares of the first step refer to the time since this call."""
        self._last_step_at, self._engines = now(), await self._ask_engines()

    async def _ask_engines(self) -> dict[int, _Engine]:
        """Totals of the replicas, by index. A lost replica is left out; handling its loss is up to the publisher."""

        async def ask(index: int, generator: Generator) -> tuple[int, _Engine] | None:
            try:
                call, name = generator.stats.call_one(), f"generator {index}"
                stats = await within(CALL_DEADLINE_S, call, f"the stats of {name}", on=name)
            except Exception as error:
                logger.warning("no stats of generator %d: %s", index, last_line(error))
                return None
            return index, _Engine.of(stats)

        asked = [ask(index, generator) for index, generator in self._publisher.replicas.handles.items()]
        return dict(answer for answer in await asyncio.gather(*asked) if answer)

    async def step(self, trained: list[dict[str, float]]) -> dict[str, float]:
        """Metrics of one step, named as in docs/metrics.md.

        Args:
            trained: the metrics that each trainer rank returned from the update.
        """
        report = self._publisher.last
        counts, stats = await asyncio.gather(
            within(CALL_DEADLINE_S, self._buffer.counts.call_one(), "the counts of the buffer", on="buffer"),
            self._workers.ask(CALL_DEADLINE_S, "to return its stats", lambda _, worker: worker.stats.call_one()),
        )
        self._note_stats(stats)
        engines = await self._ask_engines()
        moment = now()
        elapsed = moment - self._last_step_at
        values = {full_name(name): value for name, value in trained[0].items()}
        if LOST in values:
            values[LOST] = sum(rank[LOST] for rank in trained)
        values["time/step_s"] = elapsed
        computing = float(np.mean([rank["step_s"] for rank in trained])) + (report.snapshot_s if report else 0.0)
        values["trainer/idle_share"] = max(0.0, 1.0 - computing / elapsed)
        values |= self._generation(engines, elapsed)
        if report is not None:
            values["weights/swap_ms"] = report.paused_s * 1e3
            values["weights/verify_share"] = report.verify_share
            values["weights/transfer_ms"] = report.transfer_s * 1e3
            values["weights/snapshot_ms"] = report.snapshot_s * 1e3
            values["weights/sent_share"] = report.max_received_bytes / report.nbytes
            values["weights/served_version"] = report.version
        values |= self._of_buffer(counts)
        workers = list(self._stats.values())
        values["length/full_contexts"] = sum(worker.full_contexts for worker in workers)
        values["length/turn_limits"] = sum(worker.turn_limits for worker in workers)
        values["length/without_turn"] = sum(worker.without_turn for worker in workers)
        values |= self._infrastructure(workers)
        values |= self._stage_times() | self._lost(counts, workers)
        self._last_step_at = moment
        self._engines |= engines  # the next step counts an unresponsive replica from its last answer
        return values

    def without_rollouts(self, trained: list[dict[str, float]], counts: Counts) -> dict[str, float]:
        """Metrics of a step replayed from the journal, or of a supervised one: those of the update and of the buffer.

        Args:
            trained: the metrics that each trainer rank returned from the update.
        """
        values = {full_name(name): value for name, value in trained[0].items()} | self._of_buffer(counts)
        values["time/step_s"] = max(rank["step_s"] for rank in trained)
        return values | self._lost(counts, list(self._stats.values()))

    async def failed(self) -> Counter[str]:
        """Numbers of training episodes that have failed so far, by reason. Never raises: workers that do not answer are
        left out."""
        what = "to return its stats"
        self._note_stats(await self._workers.ask(CALL_DEADLINE_S, what, lambda _, worker: worker.stats.call_one()))
        return _failed(self._stats.values())

    def counters(self) -> dict[str, Any]:
        """Run totals that no actor keeps, to be stored in checkpoints and passed to :meth:`restore`."""
        return {"drawn": self._sampled, "device_s": self._device_s, "workers": asdict(summed(self._stats.values()))}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Continue counting from a checkpoint's :meth:`counters`.

        A counter that an earlier version did not write counts from 0, and one that this version does not have is left
        out: no metric is worth refusing a checkpoint.
        """
        self._sampled, self._device_s = counters.get("drawn", 0), counters.get("device_s", 0.0)
        known = {of_worker.name for of_worker in fields(WorkerStats)}
        workers = {name: count for name, count in counters.get("workers", {}).items() if name in known}
        earlier = replace(summed(()), **workers)
        self._stats[earlier.worker, earlier.pid] = earlier

    def _note_stats(self, stats: Mapping[int, WorkerStats]) -> None:
        self._stats |= {(of_worker.worker, of_worker.pid): of_worker for of_worker in stats.values()}

    def _stage_times(self) -> dict[str, float]:
        """Mean times per stage, over the groups that have passed it since the last step."""
        sums: dict[str, StageTime] = {}
        for worker in self._stats.values():
            for name, time in worker.stages.items():
                sums[name] = sums.get(name, StageTime()).plus(*time)
        values: dict[str, float] = {}
        for name, (groups, waited_s, seconds) in sums.items():
            before = self._stages.get(name, StageTime())
            passed = max(groups - before.groups, 1)
            values[f"stage/{name}/seconds"] = (seconds - before.seconds) / passed
            values[f"stage/{name}/waited_s"] = (waited_s - before.waited_s) / passed
        self._stages = sums
        return values

    def _of_buffer(self, counts: Counts) -> dict[str, float]:
        values: dict[str, float] = {
            "buffer/admitted": counts.admitted,
            "buffer/trained": counts.trained,
            "buffer/playing": counts.playing,
            "buffer/complete": counts.complete,
            "buffer/mib": counts.nbytes / 2**20,
            "buffer/order_waits": counts.order_waits,
            "buffer/order_wait_s": counts.order_wait_s,
        }
        return values if self._epoch is None else values | {"data/epochs": counts.cursor / self._epoch}

    def _generation(self, engines: dict[int, _Engine], elapsed: float) -> dict[str, float]:
        """Generation metrics of the ``elapsed`` seconds since the last step."""
        since = [engine.since(self._engines.get(index)) for index, engine in engines.items()]
        tokens, busy_s = sum(engine.tokens for engine in since), sum(engine.busy_s for engine in since)
        self._sampled += tokens
        self._device_s += sum(engine.busy_s * engine.devices for engine in since)
        return {
            "generator/idle_share": max(0.0, 1.0 - busy_s / (elapsed * max(len(since), 1))),
            "generator/running": sum(engine.request_s for engine in since) / busy_s if busy_s else 0.0,
            "generator/replicas": float(len(self._publisher.replicas)),
            "tokens_per_second": tokens / elapsed,
        } | _later_turns(since)

    def _infrastructure(self, workers: list[WorkerStats]) -> dict[str, float]:
        """The share of the episodes since the last step that failed because of infrastructure."""
        failed = sum(worker.infrastructure for worker in workers)
        ended = sum(one.episodes + one.without_turn + sum(one.failed.values()) for one in workers)
        (before, all_before), self._ended = self._ended, (failed, ended)
        return {"recovery/infrastructure_failures": (failed - before) / max(ended - all_before, 1)}

    def _lost(self, counts: Counts, workers: list[WorkerStats]) -> dict[str, float]:
        """What was sampled but not trained: groups and episodes by reason, tokens, and their device-seconds."""
        lost = Counter(counts.dropped)
        lost.update({f"episode {reason}": count for reason, count in _failed(workers).items()})
        tokens = sum(counts.wasted_tokens.values()) + sum(worker.failed_tokens for worker in workers)
        values = {f"dropped/{reason}": float(count) for reason, count in lost.items()}
        values |= {f"wasted/{reason}_tokens".replace(" ", "_"): float(n) for reason, n in counts.wasted_tokens.items()}
        return values | {"wasted/tokens": tokens, "wasted/seconds": tokens * self._device_s / max(self._sampled, 1)}


def _failed(workers: Iterable[WorkerStats]) -> Counter[str]:
    """Numbers of failed episodes, by reason."""
    failed: Counter[str] = Counter()
    for worker in workers:
        failed.update(worker.failed)
    return failed


@dataclass(frozen=True, slots=True)
class _Engine:
    """Totals of a replica since its start."""

    pid: int
    tokens: int
    busy_s: float
    request_s: float
    """Integral over busy time of the number of requests in the engine, in seconds."""
    devices: int
    turn_reads: tuple[int, int, int]
    """Prompt tokens of turns after the first: all, those found in the prefix cache, those recomputed after a commit."""

    @classmethod
    def of(cls, stats: GeneratorStats) -> _Engine:
        """The totals in a replica's stats."""
        turn_reads = stats["turn_prompt_tokens"], stats["turn_cached_tokens"], stats["turn_reread_tokens"]
        did = stats["generated_tokens"], stats["busy_seconds"], stats["request_seconds"]
        return cls(stats["pid"], *did, stats["devices"], turn_reads)

    def since(self, before: _Engine | None) -> _Engine:
        """The difference to ``before``; the totals themselves if that was another process."""
        if before is None or before.pid != self.pid:
            return self
        did = self.tokens - before.tokens, self.busy_s - before.busy_s, self.request_s - before.request_s
        all_tokens, cached, reread = (now - then for now, then in zip(self.turn_reads, before.turn_reads, strict=True))
        return _Engine(self.pid, *did, self.devices, (all_tokens, cached, reread))


def _later_turns(engines: Sequence[_Engine]) -> dict[str, float]:
    """Prefix-cache metrics of turns that continue a conversation; empty if there were none."""
    tokens, cached, reread = (sum(engine.turn_reads[part] for engine in engines) for part in range(3))
    return {"generator/turn_cached_share": cached / tokens, "generator/turn_reread_tokens": reread} if tokens else {}


# -- the engines of frozen models -------------------------------------------------------------------------------------


class FrozenMeter:
    """Totals of the engines of frozen models over the run.

    Args:
        pools: the pools of all models.
    """

    def __init__(self, pools: Sequence[FrozenPool]) -> None:
        self._pools = pools
        self._newest: dict[str, dict[tuple[int, int], FrozenStats]] = {pool.model.name: {} for pool in pools}
        """Newest stats of every engine process so far, by model, then by replica and pid: pids recur on other hosts."""

    async def metrics(self) -> dict[str, float]:
        """Metrics, named as in docs/metrics.md."""
        for pool in self._pools:
            answers = await pool.ask(CALL_DEADLINE_S, "to return its stats", lambda _, engine: engine.stats.call_one())
            self._newest[pool.model.name] |= {(index, stats["pid"]): stats for index, stats in answers.items()}
        values: dict[str, float] = {}
        for name, stats in self._newest.items():
            each = stats.values()
            values |= {
                f"frozen/{name}/requests": sum(engine["requests"] for engine in each),
                f"frozen/{name}/read_tokens": sum(engine["read_tokens"] for engine in each),
                f"frozen/{name}/drawn_tokens": sum(engine["drawn_tokens"] for engine in each),
                f"frozen/{name}/device_s": sum(engine["busy_seconds"] * engine["devices"] for engine in each),
            }
        versions = {f"frozen/{pool.model.name}/version": pool.version for pool in self._pools}
        refused = {
            f"frozen/{pool.model.name}/refused_snapshots": float(pool.refused_snapshots)
            for pool in self._pools
            if pool.plan.snapshot_every
        }
        return values | refused | {name: version for name, version in versions.items() if version is not None}
