"""How fast weights move, by each transport and size, beside what the machine can do; and what else feels it.

    python benchmarks/weights.py
    python benchmarks/weights.py --sizes-mb 3 30 --transports collective shared_memory

A real trainer mesh of two ranks and a real engine of one replica hold a random Qwen3 of each size. While the engine
decodes, versions are published by each transport in turn. Prints a line per size and transport and, last, all figures
as one line of JSON; --plot draws rate against size. benchmarks/README.md says what each figure means.
"""

from __future__ import annotations

import monarch_rl  # isort: skip  # noqa: F401  its settings for Monarch count only if it is imported first

import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro
import weights_raw
from speed_generator import GeneratorBeside, Load
from speed_swap import keep_busy
from speed_trainer import Training, make_groups, plan_of

from monarch_rl import pipeline
from monarch_rl.generator.scheduler_process import quiet_imports
from monarch_rl.generator.settings import GeneratorSettings
from monarch_rl.publishing import Publisher
from monarch_rl.runtime.cluster import Cluster, launch
from monarch_rl.runtime.deadlines import within
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.transport import TransferSettings, TransportName

DEADLINE_S = 600.0
WIDTHS = ((8e6, 128), (80e6, 512), (400e6, 1024), (float("inf"), 2048))
"""Hidden size of the models up to so many bytes."""
VOCABULARY = 64
NOT_MEASURED = ["several hosts", "several replicas", "ibverbs", "GPUs, where the device is cpu"]


@dataclass(frozen=True)
class Settings:
    """Weights on the move (see the top of this file)."""

    sizes_mb: tuple[float, ...] = (3, 30, 300, 1000)
    """Bytes of a version, in MB (1e6), about."""
    transports: tuple[TransportName, ...] = ("collective", "rdma", "shared_memory")
    """Which to measure."""
    versions: int = 6
    """Versions published by each, after one that warms up; medians are taken."""
    requests: int = 8
    """Requests that are kept in flight."""
    cache: Path = Path(".cache/benchmark-weights")
    """Folder for the models."""
    plot: Path | None = None
    """PNG file to draw."""
    dtype: str = "auto"
    """Served dtype: float32 on CPUs, bfloat16 on GPUs."""


def model_of(size_mb: float, cache: Path) -> Path:
    """A random Qwen3 whose float32 weights take about so many MB; it needs no tokenizer."""
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


async def measure(cluster: Cluster, s: Settings, model: Path) -> dict[str, Any]:
    """All transports with one model; their figures by name, and the yardsticks as ``raw``."""
    load = Load(s.requests, 32, 48, VOCABULARY)
    groups = make_groups(VOCABULARY, 2, 4, 32, 32)
    steps = len(s.transports) * (s.versions + 1) * 2 + 2
    plan = plan_of(model, TrainerSettings(), steps, 32)
    settings = GeneratorSettings(replicas=1, dtype=s.dtype, max_total_tokens=8192)  # type: ignore[arg-type]
    training, generator = await asyncio.gather(
        Training.start(cluster, plan, groups, steps), start_generator(cluster, model, settings, 2)
    )
    dtype = pipeline.served_dtype(settings, cluster)
    figures: dict[str, Any] = {}
    async with keep_busy(generator, load):
        for name in s.transports:
            transfer = TransferSettings(name, deadline_s=DEADLINE_S)
            publisher = await Publisher.connect(training.trainer, [generator], training.buffer, transfer, dtype)
            figures[name] = await one_transport(training, generator, publisher, s.versions)
    nbytes = publisher.manifest.nbytes
    copy = await within(DEADLINE_S, generator.local_copy.call_one(), "a local copy of the weights")
    await within(DEADLINE_S, generator.shutdown.call_one(), "the generator to end its engine")
    await within(DEADLINE_S, training.trainer.close.call(), "trainer ranks to leave their world")
    for found in figures.values():
        found["decoding_stops_over_copy"] = found["decoding_stops_ms"] / (copy * 1e3)
        found["decoding_stops_goal_ms"] = 1.5 * copy * 1e3 + 5
    return {"bytes": nbytes, "local_copy_ms": copy * 1e3, **figures}


async def start_generator(cluster: Cluster, model: Path, settings: GeneratorSettings, slot: int) -> Any:
    generator = cluster.spawn("generator0", 1, first_slot=slot).spawn("generator0", GeneratorBeside)
    await within(DEADLINE_S, generator.setup.call_one(str(model), settings, 0), "the generator to start")
    return generator


async def one_transport(training: Training, generator: Any, publisher: Publisher, versions: int) -> dict[str, float]:
    """Publish after every step; steps alone and steps beside a transfer, in turn."""
    alone, beside, reports, swaps = [], [], [], []
    during, idle = [], []
    for _ in range(1 + versions):
        seconds, _ = await training.step(DEADLINE_S)
        alone.append(seconds)
        started = time.perf_counter()
        await publisher.publish(training.version)
        seconds, _ = await training.step(DEADLINE_S)
        beside.append(seconds)
        await publisher.settled()
        assert publisher.last is not None
        swaps.append(publisher.last)
        during.append((started, started + publisher.last.snapshot_s + publisher.last.transfer_s))
        idle.append((started - alone[-1], started))
        stats = await within(DEADLINE_S, generator.stats.call_one(), "the generator's figures")
        reports.append(stats["last_commit"])
    tokens = await within(DEADLINE_S, generator.emitted.call_one(), "the times of the tokens")

    def median(values: Any) -> float:
        return statistics.median(list(values)[1:])

    paused = median(report["paused_seconds"] for report in reports)
    moved = publisher.manifest.nbytes
    # What a snapshot writes is where the engines read: there it is the transport.
    seconds = median(
        swap.transfer_s + (swap.snapshot_s if publisher.settings.transport == "shared_memory" else 0) for swap in swaps
    )
    return {
        "transfer_ms": seconds * 1e3,
        "gb_per_s": moved / seconds / 1e9,
        "snapshot_ms": median(swap.snapshot_s for swap in swaps) * 1e3,
        "decoding_stops_ms": paused * 1e3,
        "share_copy": median(report["copy_seconds"] for report in reports) / paused,
        "share_checksum": median(report["checksum_seconds"] for report in reports) / paused,
        "share_calls": 1 - median(r["copy_seconds"] + r["checksum_seconds"] for r in reports) / paused,
        "commit_call_ms": median(report["seconds"] for report in reports) * 1e3,
        "tokens_during_transfer": _rate(tokens, during[1:]) / max(_rate(tokens, idle[1:]), 1e-9),
        "step_beside_transfer": median(beside) / median(alone),
    }


def _rate(tokens: list[float], windows: list[tuple[float, float]]) -> float:
    """Tokens a second of the streamed request within the windows."""
    seconds = sum(until - since for since, until in windows)
    return sum(since <= token < until for token in tokens for since, until in windows) / seconds


def main(s: Settings) -> None:
    figures: list[dict[str, Any]] = []
    quiet_imports()
    for size in s.sizes_mb:
        model = model_of(size, s.cache)
        with launch() as cluster:
            if cluster is None:
                return
            found = asyncio.run(measure(cluster, s, model.resolve()))
            found["raw"] = raw = weights_raw.measure(cluster, found["bytes"])
            kind = cluster.devices.kind
        for name, goal in (("collective", "gloo"), ("rdma", "rdma"), ("shared_memory", "shared_memory")):
            if name in found:
                found[name]["of_raw"] = found[name]["gb_per_s"] / raw[f"{goal}_gb_per_s"]
        figures.append(found)
        print(json.dumps(_short(found)), flush=True)
    if s.plot is not None:
        draw(figures, s)
    done = {"benchmark": "weights", "device": kind, "cores": os.cpu_count(), "not_measured": NOT_MEASURED}
    print(json.dumps(done | {"sizes": _short(figures), "settings": asdict(replace(s, cache=None, plot=None))}))  # type: ignore[arg-type]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_short(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def draw(figures: list[dict[str, Any]], s: Settings) -> None:
    """Rate against size, transports with solid lines and yardsticks with dashed ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    assert s.plot is not None
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    sizes = [found["bytes"] / 1e6 for found in figures]
    for name in s.transports:
        axes.plot(sizes, [found[name]["gb_per_s"] for found in figures], "o-", label=name)
    for name in figures[0]["raw"]:
        axes.plot(sizes, [found["raw"][name] for found in figures], "--", label="raw " + name.removesuffix("_gb_per_s"))
    axes.set(xscale="log", yscale="log", xlabel="MB of a version", ylabel="GB/s", title="Weights, trainer to generator")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(s.plot, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        main(tyro.cli(Settings, description=__doc__))
    except ValueError as error:
        sys.exit(f"error: {error}")
