"""Memory plan of a replica: bytes by purpose on its first engine rank, which needs most (docs/memory.md).

Arithmetic only: nothing is allocated, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from monarch_rl.errors import SettingsError
from monarch_rl.generator.settings import CPU_KV_TOKENS, ENGINE_RESERVE, GeneratorSettings, resolve_dtype
from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import LoraSettings
from monarch_rl.model.sizes import CacheSizes, ModelSizes, TrainedModel, cache_sizes, trained_model
from monarch_rl.runtime.devices import GPU_CONTEXT, NARROW_COMMUNICATOR, NCCL_COMMUNICATOR
from monarch_rl.runtime.machine_memory import check_free
from monarch_rl.weights.transport import TransferSettings

WEIGHTS, ADAPTERS, CACHE, VERSIONS = "weights", "adapters", "KV cache", "versions that arrive"
STATIC = (WEIGHTS, ADAPTERS, CACHE)
"""Purposes covered by ``generator.memory_fraction``; all others use the rest of the GPU's memory."""
PREFILL_CHUNKS = ((20, 2048), (35, 4096), (160, 8192))
"""Maximum prompt tokens per batch on GPUs with less than so many GiB: (GiB, tokens), as in SGLang 0.5.23
(``arg_groups/memory_hook.py``)."""
LARGEST_CHUNK, CPU_CHUNK = 16_384, 4096
"""The same, on larger GPUs and on CPUs."""
DECODE_GRAPH, PREFILL_GRAPHS = 2 << 20, 58 * (8 << 20)
"""Bytes of CUDA graphs, as reserved by SGLang (the same file): per sequence of the largest decoding batch, and of all
graphs for prompts."""
LOGIT_ARRAYS = 4
"""float32 arrays of vocabulary size per running sequence during sampling: logits, probabilities, and those needed to
sort them for truncated sampling."""
LORA_ENTRIES = 2
"""Entries of SGLang's adapter pool: the policy's, and one without an adapter."""


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
    """Peak bytes by purpose on the first engine rank of a replica, including the actor that receives versions.

    Args:
        model: the served model and its versions.
        settings: settings of the replicas.
        weights: settings of the transport.
        on_gpu: whether the engine has GPUs.
        tokens: tokens in the KV cache.
        senders: number of trainer ranks; with a transport that uses NCCL the actor has a communicator with each.
        device_bytes: memory of a GPU, on which the size of prompt batches depends.
    """
    sizes, item, tp = model.sizes, item_bytes(settings, on_gpu), settings.tp
    requests = settings.running_requests(on_gpu)
    # On GPUs not min(..., tokens): a plan computed again from the number of tokens that it found must be the same.
    batch = _prefill_chunk(device_bytes, on_gpu) if on_gpu else min(CPU_CHUNK, tokens)
    # Elements per token that a layer holds at one time, in attention and in the MLP.
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
        # Contexts of the engine rank, of the actor, and of the other engine ranks, which read versions on this GPU.
        needed["CUDA contexts"] = (1 + tp) * GPU_CONTEXT
        groups = senders * NARROW_COMMUNICATOR if any(t.nccl for t in weights.candidates) else 0
        needed["NCCL buffers"] = NCCL_COMMUNICATOR * (tp > 1) + groups
    return {purpose: nbytes for purpose, nbytes in needed.items() if nbytes}


def automatic_fraction(needed: Mapping[str, int], room: int, device_bytes: int) -> float:
    """The ``generator.memory_fraction`` that leaves enough memory for everything but weights and KV cache, rounded down
    to three digits.

    Args:
        needed: bytes by purpose, from :func:`replica_memory`.
        room: bytes of the GPU that the replica may use.
        device_bytes: memory of the GPU. SGLang takes its share of the memory that is free at its start, a little less.
    """
    others = sum(nbytes for purpose, nbytes in needed.items() if purpose not in STATIC)
    return share(max(0, room - others), device_bytes)


def share(nbytes: int, device_bytes: int) -> float:
    """These bytes as a share of a GPU's memory, rounded down to three digits.

    If that is up to a thousandth of the GPU less than needed, SGLang's cache holds a few tokens less.
    """
    return 1000 * nbytes // device_bytes / 1000


def cache_tokens(model: TrainedModel, needed: Mapping[str, int], settings: GeneratorSettings, room: int) -> int:
    """Tokens of KV cache for which ``room`` bytes of a GPU suffice besides everything else; negative if the rest alone
    does not fit."""
    rest = room - sum(nbytes for purpose, nbytes in needed.items() if purpose != CACHE)
    return rest // kv_token_bytes(model.sizes.cache, settings, on_gpu=True)


def kv_token_bytes(cache: CacheSizes, settings: GeneratorSettings, on_gpu: bool) -> int:
    """Bytes of a token in the KV cache of one engine rank."""
    # If there are more ranks than KV heads, several ranks hold the same heads.
    return cache.layers * cache.width // min(settings.tp, cache.kv_heads) * item_bytes(settings, on_gpu)


def item_bytes(settings: GeneratorSettings, on_gpu: bool) -> int:
    """Bytes of a weight, key or value."""
    return 2 if resolve_dtype(settings.dtype, on_gpu) == "bfloat16" else 4


def longest_sequence(settings: GeneratorSettings, positions: int, episode: int) -> int:
    """Minimum tokens in the KV cache: those of the longest sequence.

    Args:
        settings: settings of the replicas.
        positions: the model's own limit of tokens per sequence.
        episode: tokens of the longest episode that is trained.
    """
    if settings.max_total_tokens:
        return settings.max_total_tokens
    return min(settings.context_length or positions, episode) + ENGINE_RESERVE


def version_bytes(version: int, weights: TransferSettings) -> int:
    """Bytes that a replica needs for arriving versions and transfer buckets.

    Args:
        version: bytes of one version.
        weights: settings of the transport.
    """
    arriving = max(
        t.received_versions * version + min(t.received_buckets * weights.bucket_bytes, version)
        for t in weights.candidates
    )
    # With delta also the version that updates are applied to, and the area into which it is then copied.
    return arriving + (2 * version if weights.delta else 0)


def _weight_elements(sizes: ModelSizes, tp: int) -> int:
    """Elements on one engine rank. If there are fewer KV heads than ranks, they are repeated."""
    repeated = 0
    if 1 < sizes.cache.kv_heads < tp:
        repeated = 2 * sizes.layers * sizes.key * sizes.width * (tp // sizes.cache.kv_heads - 1)
    return -(-(sizes.elements + repeated) // tp)


def _prefill_chunk(device_bytes: int, on_gpu: bool) -> int:
    """Maximum prompt tokens per batch."""
    if not on_gpu:
        return CPU_CHUNK
    return next((chunk for gib, chunk in PREFILL_CHUNKS if device_bytes < gib << 30), LARGEST_CHUNK)


def cpu_tokens(settings: GeneratorSettings) -> int:
    """Tokens in a replica's KV cache on a CPU."""
    return settings.max_total_tokens or CPU_KV_TOKENS


def check_cache(config: ModelConfig, settings: GeneratorSettings, memory_bytes: int) -> None:
    """Check that a machine without GPUs has enough memory for the KV caches of all replicas.

    Args:
        settings: settings of the replicas.
        memory_bytes: memory of the machine.

    Raises:
        ValueError: it has not; states how many tokens fit.
    """
    tokens = cpu_tokens(settings)
    token_bytes = settings.tp * kv_token_bytes(cache_sizes(config), settings, on_gpu=False)
    if settings.replicas * tokens * token_bytes > memory_bytes:
        fitting = memory_bytes // (settings.replicas * token_bytes)
        raise SettingsError(
            f"generator.max-total-tokens {tokens} needs a KV cache of {tokens * token_bytes / 2**30:.1f} GiB for each "
            f"of {settings.replicas} replicas, but this machine has {memory_bytes / 2**30:.1f} GiB: give less than "
            f"{fitting}"
        )


def cpu_memory(config: ModelConfig, settings: GeneratorSettings, lora: LoraSettings) -> dict[str, int]:
    """Bytes by purpose over all ranks of an engine, on a machine without GPUs."""
    model, tokens = trained_model(config, lora), cpu_tokens(settings)
    planned = replica_memory(model, settings, TransferSettings(), on_gpu=False, tokens=tokens)
    return {
        "the weights": settings.tp * planned[WEIGHTS],  # all engine ranks are on this machine
        f"a KV cache of {tokens} tokens (generator.max-total-tokens)": settings.tp * planned[CACHE],
        "the versions that arrive": model.version * item_bytes(settings, on_gpu=False),
    }


def check_memory(
    config: ModelConfig, settings: GeneratorSettings, lora: LoraSettings, free_bytes: int, engines: int = 1
) -> None:
    """Check that a machine without GPUs has enough free memory to start engines.

    Args:
        settings: settings of the replicas.
        lora: LoRA settings, which decide what a version contains: all weights, adapters, or weights with adapters
            merged in.
        free_bytes: free memory of the machine before the engines start.
        engines: number of engines that start on this machine at once. They are checked together, because each alone
            would find the same memory free.

    Raises:
        RuntimeError: it has not; states the needed bytes by purpose.
    """
    check_free(cpu_memory(config, settings, lora), free_bytes, engines)
