"""The metrics of a step, gathered from all actors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from monarch_rl.buffer.ledger import Counts
from monarch_rl.pipeline.actor_pool import ActorPool
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.rollout.statistics import WorkerStats
from monarch_rl.runtime.deadlines import CALL_DEADLINE_S, now, within

logger = logging.getLogger("monarch_rl")


class Observer:
    """Gathers the figures of a step from all actors. Rates and shares are over the time since the last step."""

    def __init__(self, publisher: Publisher, workers: ActorPool, buffer: Any, rollouts: Path) -> None:
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
        # Names with a slash are final; the update's own figures, and those of its objective, go under trainer/.
        values = {name if "/" in name else f"trainer/{name}": value for name, value in trained[0].items()}
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
