"""Time of a publication that does not depend on the size of the weights: its calls, one by one.

    python benchmarks/weights_messages.py

Two trainer ranks and a replica have a model so small that its bytes take almost no time. The calls that
pipeline/publishing.py makes for a version are made and timed here in the same order, with nothing else running. Prints
the times last, as one line of JSON; benchmarks/README.md describes the keys.
"""

from __future__ import annotations

import monarch_rl  # isort: skip  # noqa: F401  its settings for Monarch count only if it is imported first

import asyncio
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reporting import run_benchmark, short
from speed_generator import ObservedGenerator
from speed_trainer import Training, make_groups, plan_of
from weights import DEADLINE_S, VOCABULARY, model_of, start_generator

from monarch_rl.generator.scheduler_process import quiet_imports
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.lora import FULL_TRAINING
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.pipeline.start import served_dtype
from monarch_rl.runtime.cluster import Cluster, launch_cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.runtime.endpoint import members
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.checksum import add_checksums
from monarch_rl.weights.transport import SNAPSHOTS, TRANSPORTS, TransferSettings, TransportName


@dataclass(frozen=True)
class Settings:
    """The calls of a publication (see the top of this file)."""

    size_mb: float = 3.0
    """Bytes of a version, in MB (1e6), about."""
    transports: tuple[TransportName, ...] = tuple(TRANSPORTS)
    """Transports to measure."""
    versions: int = 20
    """Versions per transport, after two that warm up; medians count."""
    cache: Path = Path(".cache/benchmark-weights")
    """Folder for the model."""


class Stopwatch:
    """Milliseconds of calls, by name."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = defaultdict(list)

    async def time(self, name: str, *calls: Awaitable[Any]) -> list[Any]:
        """Await all ``calls`` concurrently; returns their answers."""
        started = time.perf_counter()
        answers = await within(DEADLINE_S, asyncio.gather(*calls), name)
        self.note(name, time.perf_counter() - started)
        return answers

    def note(self, name: str, seconds: float) -> None:
        self.taken[name].append(seconds * 1e3)


async def one_version(watch: Stopwatch, training: Training, generator: ObservedGenerator) -> None:
    """Make a step, and the calls of its publication."""
    await training.step(DEADLINE_S)
    trainer, ranks, version = training.trainer, members(training.trainer), training.version
    slot = version % SNAPSHOTS
    await watch.time("call_ms", generator.ready.call_one())
    (copied,) = await watch.time("snapshot_ms", trainer.snapshot.call(version, slot))
    watch.note("snapshot_in_actor_ms", max(copied.values()))
    await watch.time("ready_ms", *(actor.ready.call_one() for actor in (*ranks, generator)))
    sends = [rank.send.call_one(version, slot) for rank in ranks]
    *sums, _ = await watch.time("transfer_ms", *sends, generator.receive.call_one(version, slot))
    (report,) = await watch.time("commit_ms", generator.commit.call_one(version, slot, add_checksums(sums)))
    watch.note("commit_in_actor_ms", report.seconds)
    watch.note("commit_pause_ms", report.paused_seconds)
    await watch.time("published_ms", training.buffer.published.call_one(version))


async def measure(cluster: Cluster, s: Settings, model: Path) -> dict[str, Any]:
    """Return medians by transport, in milliseconds."""
    steps = len(s.transports) * (s.versions + 2)
    plan = plan_of(model, TrainerSettings(), steps, 16)
    settings = GeneratorSettings(replicas=1, max_total_tokens=8192)
    training, generator = await asyncio.gather(
        Training.start(cluster, plan, make_groups(VOCABULARY, 2, 2, 16, 16), steps),
        start_generator(cluster, model, settings, 2, FULL_TRAINING),
    )
    dtype = served_dtype(settings, cluster)
    by_transport: dict[str, Any] = {}
    for name in s.transports:
        transfer = TransferSettings(name, deadline_s=DEADLINE_S)
        publisher = await Publisher.connect(training.trainer, {0: generator}, training.buffer, transfer, dtype)
        watch = Stopwatch()
        for _ in range(2 + s.versions):
            await one_version(watch, training, generator)
        by_transport[name] = {called: statistics.median(taken[2:]) for called, taken in watch.taken.items()}
    nbytes = publisher.transfer_group.manifest.nbytes
    await within(DEADLINE_S, generator.shutdown.call_one(), "the generator to end its engine")
    await within(DEADLINE_S, training.trainer.close.call(), "trainer ranks to leave their process group")
    return {"bytes": nbytes, **by_transport}


def main(s: Settings) -> None:
    quiet_imports()
    model = model_of(s.size_mb, s.cache).resolve()
    with launch_cluster() as cluster:
        if cluster is None:
            return
        result = asyncio.run(measure(cluster, s, model))
        kind = cluster.devices.kind
    done = {"benchmark": "weights_messages", "device": kind, "cores": os.cpu_count(), "versions": s.versions}
    print(json.dumps(done | short(result)))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
