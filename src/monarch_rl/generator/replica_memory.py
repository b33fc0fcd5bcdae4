"""The memory of a replica, planned: bytes by purpose on its first engine rank, which takes most (docs/memory.md).

Arithmetic only: nothing is allocated, and no torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch_rl.generator.settings import CPU_KV_TOKENS, ENGINE_RESERVE, GeneratorSettings, resolve_dtype
from monarch_rl.model.lora import LoraSettings
from monarch_rl.model.sizes import CacheSizes, ModelSizes, TrainedModel, cache_sizes, trained_model
from monarch_rl.runtime.devices import GPU_CONTEXT, NARROW_COMMUNICATOR, NCCL_COMMUNICATOR
from monarch_rl.weights.endpoint import SNAPSHOTS, TransferSettings

WEIGHTS, ADAPTERS, CACHE, VERSIONS = "weights", "adapters", "KV cache", "versions that arrive"
STATIC = (WEIGHTS, ADAPTERS, CACHE)
"""What ``generator.memory_fraction`` is for; the rest comes out of what it leaves."""
PREFILL_CHUNKS = ((20, 2048), (35, 4096), (160, 8192))
"""GiB below which a GPU is given batches of at most so many tokens of prompts (SGLang 0.5.23,
``arg_groups/memory_hook.py``)."""
LARGEST_CHUNK, CPU_CHUNK = 16_384, 4096
"""The same, of larger GPUs and of CPUs."""
DECODE_GRAPH, PREFILL_GRAPHS = 2 << 20, 58 * (8 << 20)
"""Bytes of the CUDA graphs: for each sequence of the largest batch that is decoded, and of all those for prompts: what
SGLang keeps for them (the same file)."""
LOGIT_ARRAYS = 4
"""float32 arrays of the vocabulary for each running sequence, while tokens are drawn: logits, probabilities, and what
sorting them for a truncated draw takes."""
LORA_ENTRIES = 2
"""Of SGLang's pool: the policy's, and one without an adapter."""
BUCKETS = {"collective": (1, 2), "shared_memory": (0, 0), "rdma": (SNAPSHOTS, 4), "auto": (SNAPSHOTS, 4)}
"""By transport: versions and buckets that a replica keeps. ``auto`` tries all."""
DELTA_BUCKET = 4 << 20
"""Bytes to which ``weights.delta`` limits buckets."""


def replica_memory(
    model: TrainedModel,
    settings: GeneratorSettings,
    weights: TransferSettings,
    *,
    on_gpu: bool,
    tokens: int,
    senders: int = 1,
    device_bytes: int = 0,
) -> dict[str, int]:
    """Bytes by purpose at the peak of the first engine rank of a replica, with the actor that receives versions.

    Args:
        model: what is served, and sent.
        settings: of the replicas.
        weights: how versions arrive.
        on_gpu: whether the engine has GPUs.
        tokens: in the KV cache.
        senders: trainer ranks, with each of which the actor has a communicator under ``collective``.
        device_bytes: of a GPU, on which the batches of prompts depend.
    """
    sizes, item, tp = model.sizes, item_bytes(settings, on_gpu), settings.tp
    requests = settings.running_requests(on_gpu)
    # On GPUs not min(..., tokens): a plan that is checked again with the tokens that it has found must come out alike.
    batch = _prefill_chunk(device_bytes, on_gpu) if on_gpu else min(CPU_CHUNK, tokens)
    # In attention, and in an MLP: what a layer has of each token at one time.
    attention = 2 * sizes.width + (2 * sizes.query + 2 * sizes.key) // tp
    hidden = max(sizes.hidden if sizes.sparse < sizes.layers else 0, sizes.expert_hidden)
    mlp = (3 + sizes.chosen) * sizes.width + 3 * hidden // tp
    needed = {
        WEIGHTS: _weight_elements(sizes, tp) * item,
        ADAPTERS: LORA_ENTRIES * model.served_lora * item // tp,
        CACHE: tokens * kv_token_bytes(sizes.cache, settings, on_gpu),
        VERSIONS: version_bytes(model.version * item, weights),
        "activations": batch * max(attention, mlp) * item,
        "logits": min(requests, batch) * sizes.vocabulary * 4 * LOGIT_ARRAYS,
    }
    if on_gpu:
        needed["CUDA graphs"] = requests * DECODE_GRAPH + PREFILL_GRAPHS
        # The engine's, the actor's, and those of the other engine ranks, which read versions on this GPU.
        needed["CUDA contexts"] = (1 + tp) * GPU_CONTEXT
        groups = senders * NARROW_COMMUNICATOR if weights.way in ("collective", "auto") else 0
        needed["NCCL buffers"] = NCCL_COMMUNICATOR * (tp > 1) + groups
    return {purpose: nbytes for purpose, nbytes in needed.items() if nbytes}


def automatic_fraction(needed: Mapping[str, int], room: int, device_bytes: int) -> float:
    """``generator.memory_fraction`` that leaves what is not weights and KV cache free, to three digits.

    Args:
        needed: by :func:`replica_memory`.
        room: bytes of the GPU that the replica may have.
        device_bytes: of the GPU. SGLang takes its share of what is free when it starts, which is a little less.
    """
    beside = sum(nbytes for purpose, nbytes in needed.items() if purpose not in STATIC)
    return share(max(0, room - beside), device_bytes)


def share(nbytes: int, device_bytes: int) -> float:
    """The share of a GPU that these bytes are, rounded down to three digits. With up to a thousandth of the GPU less
    than it needs, SGLang's cache has a few tokens less."""
    return 1000 * nbytes // device_bytes / 1000


def cache_tokens(model: TrainedModel, needed: Mapping[str, int], settings: GeneratorSettings, room: int) -> int:
    """Tokens for which a GPU has room beside everything else; negative where the rest does not fit."""
    rest = room - sum(nbytes for purpose, nbytes in needed.items() if purpose != CACHE)
    return rest // kv_token_bytes(model.sizes.cache, settings, on_gpu=True)


def kv_token_bytes(cache: CacheSizes, settings: GeneratorSettings, on_gpu: bool) -> int:
    """Bytes of a token in the KV cache of one engine rank. More ranks than there are heads hold the same ones."""
    return cache.layers * cache.width // min(settings.tp, cache.kv_heads) * item_bytes(settings, on_gpu)


def item_bytes(settings: GeneratorSettings, on_gpu: bool) -> int:
    """Bytes of a weight, key or value."""
    return 2 if resolve_dtype(settings.dtype, on_gpu) == "bfloat16" else 4


def longest_sequence(settings: GeneratorSettings, positions: int, episode: int) -> int:
    """Tokens that the KV cache must hold at least: those of the longest episode.

    Args:
        positions: the model's own limit.
        episode: tokens of the longest episode that is trained.
    """
    if settings.max_total_tokens:
        return settings.max_total_tokens
    return min(settings.context_length or positions, episode) + ENGINE_RESERVE


def version_bytes(version: int, weights: TransferSettings) -> int:
    """Bytes that a replica keeps for versions that arrive, and for what they arrive in.

    Args:
        version: bytes of one.
        weights: how they travel.
    """
    bucket = min(weights.bucket_bytes, DELTA_BUCKET) if weights.delta else weights.bucket_bytes
    areas, buckets = BUCKETS[weights.way]
    if weights.delta:
        areas += 2
    return areas * version + min(buckets * bucket, version)


def _weight_elements(sizes: ModelSizes, tp: int) -> int:
    """Elements of one engine rank. Key and value heads that are fewer than ranks are repeated."""
    repeated = 0
    if 1 < sizes.cache.kv_heads < tp:
        repeated = 2 * sizes.layers * sizes.key * sizes.width * (tp // sizes.cache.kv_heads - 1)
    return -(-(sizes.elements + repeated) // tp)


def _prefill_chunk(device_bytes: int, on_gpu: bool) -> int:
    """Tokens of prompts that are computed at once."""
    if not on_gpu:
        return CPU_CHUNK
    return next((chunk for gib, chunk in PREFILL_CHUNKS if device_bytes < gib << 30), LARGEST_CHUNK)


def cpu_tokens(settings: GeneratorSettings) -> int:
    """Tokens of a replica's KV cache on a CPU."""
    return settings.max_total_tokens or CPU_KV_TOKENS


def check_cache(config: dict[str, Any], settings: GeneratorSettings, memory_bytes: int) -> None:
    """Refuse KV caches that a machine without GPUs has no memory for.

    Args:
        config: the model's ``config.json``.
        memory_bytes: of the machine.

    Raises:
        ValueError: says how many tokens fit.
    """
    tokens = cpu_tokens(settings)
    token_bytes = settings.tp * kv_token_bytes(cache_sizes(config), settings, on_gpu=False)
    if settings.replicas * tokens * token_bytes > memory_bytes:
        fitting = memory_bytes // (settings.replicas * token_bytes)
        raise ValueError(
            f"generator.max-total-tokens {tokens} is a KV cache of {tokens * token_bytes / 2**30:.1f} GiB for each of "
            f"{settings.replicas} replicas, and this machine has {memory_bytes / 2**30:.1f} GiB: give less "
            f"than {fitting}"
        )


def cpu_memory(config: dict[str, Any], settings: GeneratorSettings, lora: LoraSettings) -> dict[str, int]:
    """Bytes by purpose of all ranks of an engine, on a machine without GPUs."""
    model, tokens = trained_model(config, lora), cpu_tokens(settings)
    planned = replica_memory(model, settings, TransferSettings(), on_gpu=False, tokens=tokens)
    return {
        "the weights": settings.tp * planned[WEIGHTS],  # all engine ranks are on this machine
        f"a KV cache of {tokens} tokens (generator.max-total-tokens)": settings.tp * planned[CACHE],
        "the versions that arrive": model.version * item_bytes(settings, on_gpu=False),
    }


def check_memory(
    config: dict[str, Any], settings: GeneratorSettings, lora: LoraSettings, free_bytes: int, engines: int = 1
) -> None:
    """Refuse to start engines that a machine without GPUs has no memory for now.

    Args:
        config: the model's ``config.json``.
        settings: of the replicas.
        lora: decides what a version is: all weights, adapters, or weights that they are merged into.
        free_bytes: of the machine, before the engines start.
        engines: that start on this machine at once. Each for itself would find the same memory free.

    Raises:
        RuntimeError: says what is needed for what.
    """
    needed = cpu_memory(config, settings, lora)
    total = sum(needed.values())
    if engines * total > free_bytes:
        parts = ", ".join(f"{nbytes / 2**30:.2f} for {what}" for what, nbytes in needed.items() if nbytes)
        together = f", {engines} of them {engines * total / 2**30:.2f} GiB" if engines > 1 else ""
        raise RuntimeError(
            f"an engine needs {total / 2**30:.2f} GiB of memory ({parts}){together}, and {free_bytes / 2**30:.2f} GiB "
            "of this machine are free: end what else takes memory here, or use a smaller KV cache, or fewer "
            "generator.replicas"
        )
