"""Pause of decoding when new weights are committed, relative to one local copy of them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from speed_generator import Load, ObservedGenerator
from speed_trainer import Training

from monarch_rl.episode.sampling import Sampling
from monarch_rl.generator.dispatcher import Dispatcher
from monarch_rl.pipeline.publishing import Publisher
from monarch_rl.runtime.deadlines import within
from monarch_rl.weights.transport import TransferSettings

DEADLINE_S = 300.0
WARM_UP = 1
"""The first commit also finds the place of each tensor in the engine."""


async def measure(
    training: Training, generator: ObservedGenerator, load: Load, swaps: int, dtype: str, deadline_s: float
) -> dict[str, Any]:
    """Publish ``swaps`` versions, each after an optimiser step, while ``load`` decodes without a break.

    All times are medians over swaps. ``swap_gap_ms`` is measured from outside: the longest time without a new token of
    a streamed request, from the call to publish until the version is served. ``swap_usual_gap_ms`` is the same over an
    equally long time after that, without a swap.
    """
    trainer, buffer = training.trainer, training.buffer
    connect = Publisher.connect(trainer, {0: generator}, buffer, TransferSettings(), dtype)
    publisher = await within(DEADLINE_S, connect, "trainer and generator to connect")
    windows: list[tuple[float, float]] = []
    reports, swap_reports = [], []
    async with keep_busy(generator, load):
        for _ in range(WARM_UP + swaps):
            await training.step(deadline_s)
            started = time.perf_counter()
            await publisher.publish(training.version)
            await publisher.wait_until_served()
            ended = time.perf_counter()
            windows.append((started, ended))
            await asyncio.sleep(ended - started)
            stats = await within(DEADLINE_S, generator.stats.call_one(), "the generator's stats")
            if not stats["requests_in_flight"]:
                raise RuntimeError("nothing was being decoded when the weights were swapped")
            reports.append(stats["last_commit"])
            swap_reports.append(publisher.last)
    emitted = await within(DEADLINE_S, generator.emitted.call_one(), "the times of the tokens")
    copy = await within(DEADLINE_S, generator.local_copy.call_one(), "a local copy of the weights")

    def median(values: list[float]) -> float:
        return statistics.median(values[WARM_UP:])

    paused = median([report["paused_seconds"] for report in reports])
    copied = median([report["copy_seconds"] for report in reports])
    checked = median([report["checksum_seconds"] for report in reports])
    return {
        "swap_over_local_copy": paused / copy,
        "swap_paused_ms": paused * 1e3,
        "swap_local_copy_ms": copy * 1e3,
        "swap_share_copy": copied / paused,
        "swap_share_checksum": checked / paused,
        "swap_share_calls": 1 - (copied + checked) / paused,
        "swap_gap_ms": median([_longest_gap(emitted, since, until) for since, until in windows]) * 1e3,
        "swap_usual_gap_ms": median([_longest_gap(emitted, until, 2 * until - since) for since, until in windows])
        * 1e3,
        "swap_transfer_ms": median([report.transfer_s for report in swap_reports if report]) * 1e3,
        "swap_snapshot_ms": median([report.snapshot_s for report in swap_reports if report]) * 1e3,
        "swap_bytes": reports[-1]["nbytes"],
        "swaps": swaps,
    }


@asynccontextmanager
async def keep_busy(generator: ObservedGenerator, load: Load) -> AsyncIterator[None]:
    """Keep the generator decoding during the block, and record when the tokens of one request arrive."""
    requests = asyncio.create_task(_keep_requests_in_flight(Dispatcher([generator], DEADLINE_S, max_losses=0), load))
    watch = asyncio.ensure_future(generator.watch.call_one(load.prompts(0)[0], load.new_tokens))
    try:
        yield
    finally:
        requests.cancel()
        await asyncio.gather(requests, return_exceptions=True)
    await within(DEADLINE_S, generator.stop_watching.call_one(), "the watch to end")
    await within(DEADLINE_S, watch, "the streamed request to end")
    await _idle(generator)


async def _keep_requests_in_flight(dispatcher: Dispatcher, load: Load) -> None:
    """Keep ``load.requests`` requests in flight; they end one after the other, not all at once."""

    async def place(index: int) -> None:
        sampling = Sampling(max_new_tokens=1 + index * load.new_tokens // load.requests)
        while True:
            await dispatcher.generate(prompts[index], sampling, index)
            sampling = load.sampling

    prompts = load.prompts(0)

    async with asyncio.TaskGroup() as places:
        for index in range(load.requests):
            places.create_task(place(index))


async def _idle(generator: ObservedGenerator) -> None:
    """Wait until the engine has answered all requests."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        stats = await within(DEADLINE_S, generator.stats.call_one(), "the generator's stats")
        if not stats["requests_in_flight"]:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the generator still decodes {DEADLINE_S:g} s after the last request was sent")


def _longest_gap(emitted: list[float], since: float, until: float) -> float:
    """Return the longest time between two tokens that overlaps with the window."""
    pairs = zip(emitted, emitted[1:], strict=False)
    return max(later - earlier for earlier, later in pairs if later > since and earlier < until)
