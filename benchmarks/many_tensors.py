"""Cost of a version with many small tensors: messages, kernels and milliseconds.

    python benchmarks/many_tensors.py
    python benchmarks/many_tensors.py --layers 4 --parts counts

The model is a Qwen3-MoE with the layers and experts of a Qwen3-30B-A3B and a tiny width: 18,867 tensors, most of 4 KB.
``counts`` runs the trainer's and the engine's code in one process, the engine's on a module with SGLang's parameters;
``actors`` runs a real trainer mesh of two ranks and a real engine that decodes. Prints the measurements last, as one
line of JSON; benchmarks/README.md describes them.
"""

from __future__ import annotations

import monarch_rl  # isort: skip  # noqa: F401  its settings for Monarch count only if it is imported first

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from reporting import run_benchmark, short
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_rl.weights.manifest import Manifest, make_manifest
from monarch_rl.weights.transport import TRANSPORTS, TransferSettings, TransportName

WIDTH, EXPERTS, EXPERT_WIDTH, VOCABULARY = 32, 128, 32, 512
HEADS, HEAD = 2, 16
Part = Literal["counts", "actors"]


@dataclass(frozen=True)
class Settings:
    """A version of many small tensors (see the top of this file)."""

    layers: int = 48
    """Layers of the model; each has 393 tensors."""
    parts: tuple[Part, ...] = ("counts", "actors")
    """Parts to measure."""
    transports: tuple[TransportName, ...] = tuple(TRANSPORTS)
    """Transports to measure between actors."""
    versions: int = 6
    """Versions, after one that warms up; medians count."""
    cache: Path = Path(".cache/benchmark-weights")
    """Folder for the model."""


# ---- the model -----------------------------------------------------------------------------------------------


def shapes_of(layers: int) -> dict[str, tuple[int, ...]]:
    """The tensors by their Hugging Face names; for each projection, those of all experts in sequence."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        block = f"model.layers.{layer}."
        shapes |= {f"{block}self_attn.{x}_proj.weight": (HEADS * HEAD, WIDTH) for x in "qkv"}
        shapes[f"{block}self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD)
        shapes |= {f"{block}self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}
        shapes |= {f"{block}{x}_layernorm.weight": (WIDTH,) for x in ("input", "post_attention")}
        shapes[f"{block}mlp.gate.weight"] = (EXPERTS, WIDTH)
        for part, shape in (("gate", (EXPERT_WIDTH, WIDTH)), ("up", (EXPERT_WIDTH, WIDTH))):
            shapes |= {f"{block}mlp.experts.{e}.{part}_proj.weight": shape for e in range(EXPERTS)}
        shapes |= {f"{block}mlp.experts.{e}.down_proj.weight": (WIDTH, EXPERT_WIDTH) for e in range(EXPERTS)}
    return shapes | {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}


def make_model(layers: int, cache: Path) -> Path:
    """Make a folder with random weights in float32, without a tokenizer."""
    folder = cache / f"moe{layers}"
    if (folder / "model.safetensors").exists():
        return folder
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": EXPERT_WIDTH,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape)
        for name, shape in shapes_of(layers).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- in one process ------------------------------------------------------------------------------------------


class Kernels(TorchDispatchMode):
    """Counts the operations of the calling thread that are more than a view."""

    VIEWS = ("as_strided", "view", "slice", "select", "split", "split_with_sizes", "detach", "alias", "unsqueeze", "t")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self.VIEWS
        return func(*args, **(kwargs or {}))


def cost(call: Callable[[], object], versions: int) -> dict[str, float]:
    """Return the kernels of a call, and its median milliseconds and CPU milliseconds, after one that warms up."""
    call()
    taken, cpu = [], []
    for _ in range(versions):
        started, cpu_started = time.perf_counter(), time.thread_time()
        call()
        taken.append(time.perf_counter() - started)
        cpu.append(time.thread_time() - cpu_started)
    with Kernels() as kernels:
        call()
    return {
        "kernels": kernels.count,
        "ms": statistics.median(taken) * 1e3,
        "cpu_ms": statistics.median(cpu) * 1e3,
    }


class Fused(torch.nn.Module):
    """Parameters in the layout of an engine: q, k and v in one, the experts of a layer in two."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.places: dict[str, torch.Tensor] = {}
        """Map a tensor's name to its view of a parameter."""
        shapes = {spec.name: spec.shape for spec in manifest.tensors}
        for name, shape in shapes.items():
            block, _, leaf = name.rpartition(".self_attn.")
            if leaf == "q_proj.weight":
                parts = [f"{block}.self_attn.{x}_proj.weight" for x in "qkv"]
                self._hold(parts, (sum(shapes[part][0] for part in parts), shape[1]))
            elif ".experts.0.gate_proj" in name:
                names = [name.replace(".experts.0.", f".experts.{e}.") for e in range(EXPERTS)]
                w13 = self._parameter(name, (EXPERTS, 2 * shape[0], shape[1]))
                w2 = self._parameter(name.replace("gate", "down"), (EXPERTS, shape[1], shape[0]))
                for e, gate in enumerate(names):
                    self.places[gate], self.places[gate.replace("gate", "up")] = w13[e].split(shape[0])
                    self.places[gate.replace("gate", "down")] = w2[e]
            elif leaf not in ("k_proj.weight", "v_proj.weight") and ".experts." not in name:
                self._hold([name], shape)

    def _parameter(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        value = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.register_parameter(name.replace(".", "_"), value)
        return value

    def _hold(self, names: list[str], shape: tuple[int, ...]) -> None:
        value = self._parameter(names[0], shape)
        self.places |= dict(zip(names, value.split(shape[0] // len(names)), strict=True))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            self.places[name].data.copy_(value)


def whole_manifest(layers: int) -> Manifest:
    """Return the manifest of a single trainer rank, which owns everything."""
    shapes = shapes_of(layers)
    return make_manifest(
        [(name, shape, torch.float32) for name, shape in shapes.items()],
        [[(name, 0, torch.Size(shape).numel()) for name, shape in shapes.items()]],
    )


def messages(layers: int) -> dict[str, int]:
    """Count the messages of a version from two trainer ranks, each with half of the experts and half of all other
    rows."""
    from monarch_rl.weights.collective import ALONE_BYTES
    from monarch_rl.weights.manifest import plan_buckets
    from monarch_rl.weights.rdma import plan_snapshot

    shapes, owned = shapes_of(layers), list[list[tuple[str, int, int]]]([[], []])
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        if ".experts." in name:
            owned[int(name.split(".")[5]) >= EXPERTS // 2].append((name, 0, numel))
        else:
            for rank in range(2):
                owned[rank].append((name, rank * numel // 2, numel // 2))
    manifest = make_manifest([(name, shape, torch.float32) for name, shape in shapes.items()], owned)
    size = TransferSettings().bucket_bytes
    plans = [plan_buckets(manifest, rank, size, ALONE_BYTES) for rank in range(2)]
    return {
        "broadcasts": sum(1 + len(plan) for plan in plans),  # each rank begins with a header
        "copies_at_arrival": sum(len(bucket) for plan in plans for bucket in plan if len(bucket) > 1),
        # The header before the data and after it.
        "reads": sum(2 + len(plan_snapshot(manifest, rank, size).reads) for rank in range(2)),
    }


def counts(s: Settings) -> dict[str, Any]:
    """Measure the parts of a version, each alone on one thread."""
    manifest = whole_manifest(s.layers)
    flat, target = torch.randn(manifest.nbytes // 4), torch.zeros(manifest.nbytes // 4)
    costs: dict[str, Any] = {"tensors": len(manifest.tensors), "bytes": manifest.nbytes}
    costs["local_copy"] = cost(lambda: target.copy_(flat), s.versions)
    costs |= trainer_side(s, make_model(s.layers, s.cache))
    costs |= engine_side(s, manifest) | {"two_ranks": messages(s.layers)}
    return costs


def trainer_side(s: Settings, folder: Path) -> dict[str, Any]:
    """Measure snapshot and checksums of one rank that owns everything, and the broadcasts of ``collective``."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from monarch_rl.trainer.policy import Policy
    from monarch_rl.trainer.settings import TrainerSettings
    from monarch_rl.weights.checksum import ShardChecksums
    from monarch_rl.weights.collective import ALONE_BYTES
    from monarch_rl.weights.manifest import plan_buckets, shard_bytes

    policy = Policy(folder.resolve(), TrainerSettings(ranks=1), total_steps=1)
    published = policy.published
    tensors = [(name, shape, torch.float32) for name, shape in published.tensors()]
    manifest = make_manifest(tensors, [published.owned_spans()])
    memory = torch.zeros(shard_bytes(manifest, 0), dtype=torch.uint8)
    views = list(memory.split([4 * shard.numel for shard in manifest.shards[0]]))
    plan, sums = published.plan_snapshot(manifest, views), ShardChecksums(manifest, 0, views)
    buckets = plan_buckets(manifest, 0, TransferSettings().bucket_bytes, ALONE_BYTES)
    costs = {
        "snapshot": cost(lambda: published.snapshot(plan), s.versions) | {"copies": len(plan.copies)},
        "trainer_checksums": cost(sums.take, s.versions),
        # Each transfer begins with a header.
        "collective": {"broadcasts": 1 + len(buckets), "copies_at_arrival": sum(len(b) for b in buckets if len(b) > 1)},
    }
    policy.close()
    return costs


def engine_side(s: Settings, manifest: Manifest) -> dict[str, Any]:
    """Measure a commit, as in the engine's process."""
    from monarch_rl.generator import load_report, load_staged
    from monarch_rl.generator.load_report import LoadSheet
    from monarch_rl.weights.area import Area
    from monarch_rl.weights.checksum import tensor_checksum

    area, model = Area(manifest.nbytes), Fused(manifest)
    area.buffer.view(torch.float32).normal_()
    expected = np.array([int(tensor_checksum(spec.view(area.buffer))) for spec in manifest.tensors])
    sheets = [LoadSheet(manifest, 1) for _ in range(2)]
    started = time.perf_counter()
    for sheet in sheets:
        sheet.ask(expected)
    asked = time.perf_counter() - started

    def commit() -> None:
        sheets.reverse()
        order = load_staged.write_order(0, area.handle, sheets[0].handle, 0)
        load_staged.load(model, [(order, torch.empty(0))])

    commit()
    found = cost(commit, s.versions)
    refusal = sheets[0].judge()
    assert refusal is None, refusal
    copy, checksum = (
        sheets[0].state[0, column] / 1e6 for column in (load_report.COPY_NANOSECONDS, load_report.CHECKSUM_NANOSECONDS)
    )
    judge = cost(sheets[0].judge, s.versions)
    return {"commit": found | {"judge_ms": judge["ms"], "ask_ms": asked * 500}}


# ---- actors --------------------------------------------------------------------------------------------------


def actors(s: Settings) -> dict[str, Any]:
    """Publish versions by each transport from two trainer ranks to a replica that decodes."""
    from monarch_rl.generator.scheduler_process import quiet_imports
    from monarch_rl.runtime.cluster import launch_cluster

    quiet_imports()
    model = make_model(s.layers, s.cache).resolve()
    with launch_cluster() as cluster:
        assert cluster is not None
        return asyncio.run(_published(cluster, s, model))


async def _published(cluster: Any, s: Settings, model: Path) -> dict[str, Any]:
    import weights
    from speed_generator import Load
    from speed_swap import keep_busy
    from speed_trainer import Training, make_groups, plan_of

    from monarch_rl.generator.settings import GeneratorSettings
    from monarch_rl.model.lora import FULL_TRAINING
    from monarch_rl.pipeline.publishing import Publisher
    from monarch_rl.runtime.deadlines import within
    from monarch_rl.trainer.settings import TrainerSettings

    steps = len(s.transports) * (1 + s.versions) + 1
    settings = GeneratorSettings(replicas=1, max_total_tokens=8192, start_deadline_s=weights.DEADLINE_S)
    training, generator = await asyncio.gather(
        Training.start(
            cluster, plan_of(model, TrainerSettings(), steps, 16), make_groups(VOCABULARY, 1, 2, 4, 4), steps
        ),
        weights.start_generator(cluster, model, settings, 2, FULL_TRAINING),
    )
    by_transport: dict[str, Any] = {}
    for name in s.transports:
        transfer = TransferSettings(name, deadline_s=weights.DEADLINE_S)
        publisher = await Publisher.connect(training.trainer, {0: generator}, training.buffer, transfer, "float32")
        versions = [await weights.one_version(training, generator, publisher)]
        first_ms = versions.pop().paused_s * 1e3
        async with keep_busy(generator, Load(4, 8, 48, VOCABULARY)):
            versions += [await weights.one_version(training, generator, publisher) for _ in range(s.versions)]
        by_transport[name] = {
            "first_commit_ms": first_ms,
            "snapshot_ms": statistics.median(version.swap.snapshot_s for version in versions) * 1e3,
            "transfer_ms": statistics.median(version.swap.transfer_s for version in versions) * 1e3,
            "decoding_stops_ms": statistics.median(version.paused_s for version in versions) * 1e3,
            "decoding_stops_least_ms": min(version.paused_s for version in versions) * 1e3,
            "copy_ms": statistics.median(version.commit.copy_seconds for version in versions) * 1e3,
            "checksum_ms": statistics.median(version.commit.checksum_seconds for version in versions) * 1e3,
            "calls_ms": statistics.median(version.commit.messages_seconds for version in versions) * 1e3,
        }
    await within(weights.DEADLINE_S, generator.shutdown.call_one(), "the generator to end its engine")
    await within(weights.DEADLINE_S, training.trainer.close.call(), "trainer ranks to leave their process group")
    return by_transport


def main(s: Settings) -> None:
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "many_tensors", "cores": os.cpu_count(), "layers": s.layers}
    for part in s.parts:
        result[part] = {"counts": counts, "actors": actors}[part](s)
        print(json.dumps(short({part: result[part]})), flush=True)
    print(json.dumps(short(result)))


if __name__ == "__main__":
    run_benchmark(main, Settings, __doc__)
