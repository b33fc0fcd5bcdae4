"""Rate of each transport for weights of each size, relative to the machine's, and the slowdown of everything else.

    python benchmarks/weights.py
    python benchmarks/weights.py --sizes-mb 3 30 --transports collective shared_memory

A real trainer mesh of two ranks and a real engine of one replica hold a random Qwen3 of each size. Versions are
published by each transport in turn, alone, and while the engine decodes. Prints a line per size and, last, everything
as one line of JSON; --plot draws rate against size. benchmarks/README.md describes the keys.
"""

from __future__ import annotations

import monarch_rl  # isort: skip  # noqa: F401  its settings for Monarch count only if it is imported first

import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import weights_raw
from reporting import run_benchmark, short
from speed_generator import Load, ObservedGenerator
from speed_swap import keep_busy
from speed_trainer import Training, make_groups, plan_of

from monarch_rl.generator.commit import CommitReport
from monarch_rl.generator.scheduler_process import quiet_imports
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.pipeline.publishing import Publisher, PublishReport
from monarch_rl.pipeline.start import served_dtype
from monarch_rl.runtime.cluster import Cluster, launch_cluster
from monarch_rl.runtime.deadlines import within
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.transport import TRANSPORTS, TransferSettings, TransportName

DEADLINE_S = 600.0
WIDTHS = ((8e6, 128), (80e6, 512), (400e6, 1024), (float("inf"), 2048))
"""Hidden size of the models, by the maximum number of bytes for which it is used."""
VOCABULARY = 64
NOT_MEASURED = ["several hosts", "several replicas", "ibverbs", "GPUs, where the device is cpu"]


@dataclass(frozen=True)
class Settings:
    """Rates of the transports (see the top of this file)."""

    sizes_mb: tuple[float, ...] = (3, 30, 300, 1000)
    """Bytes of a version, in MB (1e6), about."""
    transports: tuple[TransportName, ...] = tuple(TRANSPORTS)
    """Transports to measure."""
    versions: int = 6
    """Versions per transport, after one that warms up; medians count."""
    requests: int = 8
    """Requests in flight."""
    cache: Path = Path(".cache/benchmark-weights")
    """Folder for the models."""
    plot: Path | None = None
    """PNG file to write."""
    dtype: str = "auto"
    """Served dtype: float32 on CPUs, bfloat16 on GPUs."""
    adapter_rank: int = 8
    """Rank of the LoRA adapters that the first transport also sends, for comparison; 0 omits them."""


def model_of(size_mb: float, cache: Path) -> Path:
    """Make a random Qwen3 whose float32 weights take about this many MB, without a tokenizer."""
    hidden = next(width for limit, width in WIDTHS if size_mb * 1e6 <= limit)
    # 4 query and 2 key heads of 32, and an MLP 3 times as wide.
    layer = 4 * (9 * hidden + 384) * hidden
    layers = max(1, round(size_mb * 1e6 / layer))
    folder = cache / f"{hidden}x{layers}"
    if not folder.exists():
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


async def measure(cluster: Cluster, s: Settings, model: Path, lora: LoraSettings = FULL_TRAINING) -> dict[str, Any]:
    """Measure all transports with one model, or with adapters to it; returns the results by transport."""
    load = Load(s.requests, 32, 48, VOCABULARY)
    groups = make_groups(VOCABULARY, 2, 2, 16, 16)  # steps about as long as transfers
    steps = len(s.transports) * (s.versions + 1) * 4 + 2  # see one_transport
    plan = plan_of(model, TrainerSettings(lora=lora), steps, 16)
    settings = GeneratorSettings(replicas=1, dtype=s.dtype, max_total_tokens=8192)  # type: ignore[arg-type]
    training, generator = await asyncio.gather(
        Training.start(cluster, plan, groups, steps), start_generator(cluster, model, settings, 2, lora)
    )
    dtype = served_dtype(settings, cluster)
    by_transport: dict[str, Any] = {}
    for name in s.transports:
        transfer = TransferSettings(name, deadline_s=DEADLINE_S)
        publisher = await Publisher.connect(training.trainer, {0: generator}, training.buffer, transfer, dtype)
        by_transport[name] = await one_transport(training, generator, publisher, load, s.versions)
    nbytes = publisher.transfer_group.manifest.nbytes
    copy = await within(DEADLINE_S, generator.local_copy.call_one(), "a local copy of the weights")
    await within(DEADLINE_S, generator.shutdown.call_one(), "the generator to end its engine")
    await within(DEADLINE_S, training.trainer.close.call(), "trainer ranks to leave their process group")
    for found in by_transport.values():
        found["decoding_stops_over_copy"] = found["decoding_stops_ms"] / (copy * 1e3)
        found["decoding_stops_goal_ms"] = 1.5 * copy * 1e3 + 5
    return {"bytes": nbytes, "local_copy_ms": copy * 1e3, **by_transport}


async def start_generator(
    cluster: Cluster, model: Path, settings: GeneratorSettings, slot: int, lora: LoraSettings
) -> ObservedGenerator:
    generator = cluster.spawn("generator0", 1, first_device=slot).spawn("generator0", ObservedGenerator)
    await within(DEADLINE_S, generator.setup.call_one(str(model), settings, 0, lora), "the generator to start")
    return generator


async def one_transport(
    training: Training, generator: ObservedGenerator, publisher: Publisher, load: Load, versions: int
) -> dict[str, Any]:
    """Publish versions one after the other: alone, then while the engine decodes, then also during training steps."""
    alone = [await one_version(training, generator, publisher) for _ in range(1 + versions)]
    decoding, idle, steps, steps_during_transfer = [], [], [], []
    async with keep_busy(generator, load):
        for _ in range(1 + versions):
            version = await one_version(training, generator, publisher)
            decoding.append(version)
            idle.append((time.perf_counter(), time.perf_counter() + version.seconds))
            await asyncio.sleep(version.seconds)
            steps.append((await training.step(DEADLINE_S))[0])
            await publisher.publish(training.version)
            steps_during_transfer.append((await training.step(DEADLINE_S))[0])
            await publisher.wait_until_served()
    tokens = await within(DEADLINE_S, generator.emitted.call_one(), "the times of the tokens")
    windows = [(version.started, version.started + version.seconds) for version in decoding]

    def median(values: Iterable[float]) -> float:
        return statistics.median(list(values)[1:])

    seconds, undisturbed = median(version.transfer_s for version in alone), _rate(tokens, idle[1:])
    return {
        "transfer_ms": seconds * 1e3,
        "gb_per_s": publisher.transfer_group.manifest.nbytes / seconds / 1e9,
        "transfer_while_decoding_ms": median(version.transfer_s for version in decoding) * 1e3,
        "snapshot_ms": median(version.swap.snapshot_s for version in alone) * 1e3,
        "pause_ms": median(version.paused_s for version in alone) * 1e3,
        "decoding_stops_ms": median(version.paused_s for version in decoding) * 1e3,
        "share_copy": median(version.commit.copy_seconds / version.paused_s for version in decoding),
        "share_checksum": median(version.commit.verification_share for version in decoding),
        "share_calls": median(version.commit.messages_seconds / version.paused_s for version in decoding),
        "commit_call_ms": median(version.commit.seconds for version in decoding) * 1e3,
        # Within a few short windows there may be no token at all.
        "tokens_during_transfer": _rate(tokens, windows[1:]) / undisturbed if undisturbed else None,
        "step_beside_transfer": median(steps_during_transfer) / median(steps),
    }


@dataclass(frozen=True)
class Version:
    """Cost of publishing a version."""

    started: float
    swap: PublishReport
    commit: CommitReport
    shared: bool
    """Whether the snapshot writes to memory that engines read, and so is the transfer."""

    @property
    def transfer_s(self) -> float:
        return self.swap.transfer_s + (self.swap.snapshot_s if self.shared else 0)

    @property
    def seconds(self) -> float:
        """Seconds of snapshot and transfer."""
        return self.swap.snapshot_s + self.swap.transfer_s

    @property
    def paused_s(self) -> float:
        return self.commit.paused_seconds


async def one_version(training: Training, generator: ObservedGenerator, publisher: Publisher) -> Version:
    """Make a step and publish its version, without a concurrent step."""
    await training.step(DEADLINE_S)
    started = time.perf_counter()
    await publisher.publish(training.version)
    await publisher.wait_until_served()
    assert publisher.last is not None
    stats = await within(DEADLINE_S, generator.stats.call_one(), "the generator's stats")
    commit = CommitReport(**stats["last_commit"])
    return Version(started, publisher.last, commit, publisher.transfer_group.settings.transport == "shared_memory")


def _rate(tokens: list[float], windows: list[tuple[float, float]]) -> float:
    """Return the tokens per second of the streamed request within the windows."""
    seconds = sum(until - since for since, until in windows)
    return sum(since <= token < until for token in tokens for since, until in windows) / seconds


def main(s: Settings) -> None:
    results: list[dict[str, Any]] = []
    quiet_imports()
    for size in s.sizes_mb:
        model = model_of(size, s.cache)
        with launch_cluster() as cluster:
            if cluster is None:
                return
            found = asyncio.run(measure(cluster, s, model.resolve()))
            found["raw"] = raw = weights_raw.measure(cluster, found["bytes"])
            kind = cluster.devices.kind
        if s.adapter_rank:
            with launch_cluster() as cluster:
                assert cluster is not None
                lora, first = LoraSettings(s.adapter_rank), s.transports[:1]
                moved = asyncio.run(measure(cluster, replace(s, transports=first), model.resolve(), lora))
                found["adapter"] = {"bytes": moved["bytes"], "local_copy_ms": moved["local_copy_ms"], **moved[first[0]]}
        for name, goal in (("collective", "gloo"), ("rdma", "rdma"), ("shared_memory", "shared_memory")):
            if name in found:
                found[name]["of_raw"] = found[name]["gb_per_s"] / raw[f"{goal}_gb_per_s"]
        results.append(found)
        print(json.dumps(short(found)), flush=True)
    if s.plot is not None:
        draw(results, s)
    done = {"benchmark": "weights", "device": kind, "cores": os.cpu_count(), "not_measured": NOT_MEASURED}
    print(json.dumps(done | {"sizes": short(results), "settings": asdict(replace(s, cache=None, plot=None))}))  # type: ignore[arg-type]


def draw(results: list[dict[str, Any]], s: Settings) -> None:
    """Plot rate against size: transports with solid lines, references with dashed ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    assert s.plot is not None
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    sizes = [found["bytes"] / 1e6 for found in results]
    for name in s.transports:
        axes.plot(sizes, [found[name]["gb_per_s"] for found in results], "o-", label=name)
    for name in results[0]["raw"]:
        axes.plot(sizes, [found["raw"][name] for found in results], "--", label="raw " + name.removesuffix("_gb_per_s"))
    axes.set(xscale="log", yscale="log", xlabel="MB of a version", ylabel="GB/s", title="Weights, trainer to generator")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(s.plot, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
