"""Plans the memory of a run before anything is spawned: how much each role needs, whether it fits, and what would fit.

    trainer_memory(), replica_memory()     bytes by purpose of a trainer rank, of a replica's first engine rank
    plan_memory()                          both on their GPUs, or on one; what is left is the KV cache
    check_gpu_memory()                     refuses a run that does not fit, and names settings with which it does

Arithmetic only: nothing is allocated. A purpose is an entry of the dictionary that one of the first two returns, and a
row in docs/memory.md; sums, checks and messages read the dictionaries. ``tools/memory.py`` prints plans for models and
GPUs.

Not included: summing the outputs of a token's experts on a GPU sorts one index per token and chosen expert, which takes
about 48 bytes each for a moment (3 MiB for 8 experts and 8,192 tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice
from math import ceil
from typing import Any, NamedTuple

from monarch_rl.algorithms.packing import KEYS_PER_TOKEN
from monarch_rl.errors import SettingsError
from monarch_rl.generator.settings import (
    CPU_KV_TOKENS,
    ENGINE_RESERVE,
    UNLIMITED_FRACTION,
    GeneratorSettings,
    check_served,
    resolve_dtype,
)
from monarch_rl.model.config import ModelConfig
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.model.sizes import CacheSizes, ModelSizes, TrainedModel, cache_sizes, trained_model
from monarch_rl.runtime.devices import Devices
from monarch_rl.trainer.settings import TrainerSettings, check_experts
from monarch_rl.weights.transport import SNAPSHOTS, TRANSPORTS, TransferSettings, Transport

SAFETY_FACTOR = 0.95
"""Share of a GPU's nominal memory that a plan may use: the only margin. Only :func:`room` applies it.

The rest is for what no plan can count, because it depends on the order of allocations: blocks that torch's and SGLang's
allocators hold but cannot use (fragmentation), and what the driver reserves. It is an assumption; no plan was compared
with a GPU (docs/memory.md).

Everything else is a purpose with its bytes: CUDA contexts, NCCL buffers, and the memory that SGLang reserves for CUDA
graphs. Free memory of a machine without GPUs is compared without a factor: it is measured when engines start instead of
nominal, and the kernel evicts or swaps pages before it refuses memory. Two constants of ``generator/settings.py`` look
like margins and are none: ``UNLIMITED_FRACTION`` turns off SGLang's own limit where the number of tokens is given, and
``ENGINE_RESERVE`` is a number of tokens that SGLang withholds from each sequence."""

# -- what is planned for
TRAINER, REPLICA = "a trainer rank", "a generator replica"
BOTH = f"{TRAINER} with {REPLICA}"
"""Both on one device."""

# -- any process on a GPU
GPU_CONTEXT = 640 << 20
"""Bytes of GPU memory that a process uses before its first tensor: CUDA's context, torch's kernels, cuBLAS's workspace.
An assumption: 0.5 to 0.6 GiB are reported for H100."""
NCCL_COMMUNICATOR = 256 << 20
"""Bytes of the buffers of an NCCL communicator. An assumption, for a few ranks on one machine."""
NARROW_COMMUNICATOR = 96 << 20
"""The same for a communicator of weights, which has 8 channels (``weights/broadcast_group.py``). An assumption: 6 MiB
per channel and direction, of which 4 are NCCL's documented default (``NCCL_BUFFSIZE``)."""

# -- a trainer rank
STATES, HEAD = ("parameters", "reference", "gradients", "optimiser states", "critic"), "logits"
"""Purposes that do not depend on the tokens of a micro-batch; and of a chunk's logits, which depend on few."""
MASTER = 4
"""Bytes of a float32 master weight, of its gradient, and of each of its optimiser states."""
LOGITS = 5
"""Tensors of the size of a chunk's logits at a time: logits, probabilities, entropy terms, and gradients."""
LOGITS_OF_PARTS = 4
"""The same if tensor-parallel ranks divide the vocabulary: they keep exponentials instead of logits, and the peak is in
the forward pass, before the chunk's own gradients."""

# -- a replica
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
LOGPROB_ROWS, LOGPROB_ARRAYS = 2048, 3
"""Prompt tokens whose log-probs SGLang computes at once (``SGLANG_LOGPROB_CHUNK_SIZE``), and float32 arrays of the
vocabulary's size for each: logits, logits divided by the temperature, and one to normalise them."""

# -- suggestions of an error
NAMED = 3
"""Maximum number of settings that an error suggests."""
FEWEST_TOKENS, FEWEST_LOGITS, FEWEST_REQUESTS = 1024, 64, 16
"""Smallest suggested values: lower ones free next to nothing, and cost much speed."""
MOST_RANKS, MOST_TP = 128, 16
LORA_RANK = 16


def room(device_bytes: int) -> int:
    """Bytes of a GPU that may be planned with."""
    return int(SAFETY_FACTOR * device_bytes)


# -- a trainer rank ----------------------------------------------------------------------------------------------------


def trainer_memory(
    model: TrainedModel,
    settings: TrainerSettings,
    weights: TransferSettings,
    *,
    on_gpu: bool,
    served: int,
    keys: int = KEYS_PER_TOKEN,
) -> dict[str, int]:
    """Bytes by purpose at the peak of rank 0, the trainer rank that needs most, in a step of several micro-batches of
    ``tokens_per_microbatch``.

    Args:
        model: sizes of the trained model.
        settings: settings of the trainer.
        weights: settings of the weight transfer.
        on_gpu: whether the trainer computes on a GPU.
        served: bytes per weight as it is sent to generators.
        keys: keys that attention gathers per token: the most that a micro-batch may gather, or 1 if episodes share no
            prefixes.
    """
    sizes, ranks = model.sizes, settings.ranks
    item = 2 if settings.computes_in(on_gpu) == "bfloat16" else 4
    states = -(-(model.lora or sizes.elements) // ranks)
    needed = {
        "parameters": (-(-sizes.elements // ranks) + -(-model.lora // ranks)) * MASTER,
        "reference": 0 if model.lora or not settings.reference else -(-sizes.elements // ranks) * MASTER,
        "gradients": states * MASTER,
        "optimiser states": 2 * states * MASTER,
        "critic": 4 * -(-critic_elements(sizes) // ranks) * MASTER if settings.critic.enabled else 0,
        "rotary cache": rotary_bytes(model, settings),
        "snapshots": snapshot_bytes(-(-model.version // ranks) * served, model.version * served, weights),
    }
    saved, recomputed = _activations(sizes, settings, item, on_gpu, keys)
    at_the_head, in_a_block = _at_the_head(sizes, settings, item), _in_a_block(sizes, settings, item)
    # The peak is at the head or in the last block, when all activations are in memory.
    if sum(at_the_head.values()) > recomputed + sum(in_a_block.values()):
        needed |= {"activations": saved} | at_the_head
    else:
        needed |= {"activations": saved + recomputed} | in_a_block
    if on_gpu:
        needed["CUDA context"] = GPU_CONTEXT
        groups = NARROW_COMMUNICATOR if any(t.nccl for t in weights.candidates) else 0
        needed["NCCL buffers"] = NCCL_COMMUNICATOR * (ranks > 1) + groups
    return {purpose: nbytes for purpose, nbytes in needed.items() if nbytes}


def check_cpu_trainer(
    config: ModelConfig,
    settings: TrainerSettings,
    weights: TransferSettings,
    memory_bytes: int,
    ranks: int,
    engine_bytes: int = 0,
) -> None:
    """Refuse trainer ranks that cannot have enough memory on a machine without GPUs, whatever the episodes.

    Activations are not counted, because micro-batches of short episodes have fewer tokens than they may.

    Args:
        memory_bytes: memory of the machine, or less if a process may not use all of it.
        ranks: trainer ranks on the machine.
        engine_bytes: what generators on the machine take of its memory, for the message: ``memory_bytes`` is without.

    Raises:
        SettingsError: they have not; states what each rank needs by purpose, and the largest chunk of logits that fits.
    """
    model = trained_model(config, settings.lora)
    planned = trainer_memory(model, settings, weights, on_gpu=False, served=4)
    needed = {purpose: planned[purpose] for purpose in STATES if purpose in planned}
    states, token = sum(needed.values()), _at_the_head(model.sizes, replace(settings, logprob_chunk=1), MASTER)[HEAD]
    chunk = min(settings.logprob_chunk, settings.tokens_per_microbatch)
    needed[HEAD] = chunk * token
    if ranks * sum(needed.values()) <= memory_bytes:
        return
    fitting = (memory_bytes // ranks - states) // token
    advice = f"give --trainer.logprob-chunk at most {fitting}" if fitting >= FEWEST_LOGITS else "use a smaller model"
    if fitting < FEWEST_LOGITS and not settings.lora.rank:
        advice += ", or LoRA (--trainer.lora.rank 16)"
    besides = f", besides {_gib(engine_bytes)} GiB for the weights of generators" if engine_bytes else ""
    raise SettingsError(
        f"{ranks} trainer ranks need {_gib(sum(needed.values()))} GiB each, without activations ({describe(needed)}; "
        f"logits of {chunk} tokens x {config.vocab_size:,} entries of the vocabulary), but "
        f"{_gib(memory_bytes)} GiB of this machine may be used{besides}: {advice}"
        + (", or fewer --trainer.ranks" if ranks > 1 else "")
        + (", or fewer --generator.replicas" if engine_bytes else "")
    )


def checkpoint_bytes(model: TrainedModel, settings: TrainerSettings) -> int:
    """Bytes of host memory, per trainer rank, for the copy that a checkpoint is written from: weights and the
    optimiser's two moments in float32 (with LoRA, of LoRA only), and those of a critic. The memory is pinned if the
    trainer computes on a GPU. It is allocated with the first checkpoint and kept for the next ones."""
    critic = critic_elements(model.sizes) if settings.critic.enabled else 0
    return 3 * MASTER * -(-((model.lora or model.sizes.elements) + critic) // settings.ranks)


def critic_elements(sizes: ModelSizes) -> int:
    """Number of weights of a critic, which has a head of one row instead of an LM head. It has as many gradients, and
    twice as many optimiser states."""
    return sizes.elements - sizes.lm_head + sizes.width


def snapshot_bytes(shards: int, version: int, weights: TransferSettings) -> int:
    """Bytes of the snapshots of versions that rank 0 keeps for sending.

    Args:
        shards: bytes of a rank's part of a version.
        version: bytes of a whole version.
        weights: settings of the weight transfer.
    """
    kept = SNAPSHOTS * max(version if t.sends_from_rank_0 else shards for t in weights.candidates)
    return kept + (SNAPSHOTS + 1) * shards if weights.delta else kept


def rotary_bytes(model: TrainedModel, settings: TrainerSettings) -> int:
    """Bytes of the rotary cache that all layers share: float32 sine and cosine of each position and element."""
    return min(settings.tokens_per_microbatch, model.positions) * 2 * model.sizes.head * MASTER


def saved_bytes(
    sizes: ModelSizes, item: int, on_gpu: bool, *, sparse: bool, tokens: int, keys: int, tp: int = 1
) -> int:
    """Bytes per token that a block saves for its backward pass, without activation checkpointing.

    Args:
        sizes: sizes of the model.
        item: bytes of an element of the compute dtype.
        on_gpu: whether the trainer computes on a GPU: a norm is a single kernel there, and flash attention, which needs
            half precision, writes its result once.
        sparse: whether the block has experts.
        tokens: tokens of the micro-batch.
        keys: keys, and as many values, that attention gathers and keeps per token. Above 1 episodes share prefixes.
        tp: tensor-parallel ranks. They divide heads and rows, and outside attention and MLP also tokens; the inputs of
            attention and MLP are of all tokens on each rank.
    """
    query, key, width, flash = sizes.query, sizes.key, sizes.width, on_gpu and item < MASTER
    normed = 2 * width + (query + key if sizes.normed_heads else 0)
    # In float32 on a GPU keys are repeated for each head of queries (``trainer/attention.py``).
    inputs = (2 if flash else 3) * query + 2 * keys * (query if on_gpu and not flash else key)
    if sparse:
        inputs += 4 * sizes.expert_hidden + 2 * sizes.chosen * width
    else:
        inputs += 4 * sizes.hidden
    norms = normed * item if on_gpu else 2 * normed * MASTER
    # Masks: queries of answers x keys of their prompt, most if each of both is half of the row's tokens.
    masks = 0 if flash or keys == 1 else tokens * item // 4
    return 2 * width * item + 2 * sizes.head * MASTER + masks + (inputs * item + norms) // tp


def _saved_bytes(
    sizes: ModelSizes, settings: TrainerSettings, item: int, on_gpu: bool, *, sparse: bool, keys: int
) -> int:
    """Bytes per token that a block saves until its backward pass, given ``trainer.activation_checkpoint``."""
    tp, width = settings.tp, sizes.width
    if settings.activation_checkpoint == "none":
        tokens = settings.tokens_per_microbatch
        return saved_bytes(sizes, item, on_gpu, sparse=sparse, tokens=tokens, keys=keys, tp=tp)
    if settings.activation_checkpoint == "full":
        return width * item // tp
    # torchtitan's policy: every second matrix product except those of experts, and on GPUs attention's result.
    saved = width + (2 if on_gpu else 1) * sizes.query + sizes.key
    if sparse:
        return saved * item
    # With several ranks the second width is a partial sum over all tokens, and the scattered sums are saved, too.
    sums = 2 * width if tp > 1 else 0
    return (width + (saved + sizes.hidden + sums) // tp) * item


def _activations(sizes: ModelSizes, settings: TrainerSettings, item: int, on_gpu: bool, keys: int) -> tuple[int, int]:
    """Bytes that all blocks save, and bytes that one block recomputes for its backward pass."""
    tokens, kinds = settings.tokens_per_microbatch, {True: sizes.sparse, False: sizes.layers - sizes.sparse}
    saved = {
        sparse: _saved_bytes(sizes, settings, item, on_gpu, sparse=sparse, keys=keys)
        for sparse, n in kinds.items()
        if n
    }
    whole = {
        sparse: saved_bytes(sizes, item, on_gpu, sparse=sparse, tokens=tokens, keys=keys, tp=settings.tp)
        for sparse in saved
    }
    # Outside the blocks: the embeddings' output, and input and output of the last norm.
    ends = (item + (item + (item if on_gpu else 2 * MASTER)) // settings.tp) * sizes.width
    recomputed = max(whole[sparse] - saved[sparse] for sparse in saved)
    return tokens * (ends + sum(saved[sparse] * kinds[sparse] for sparse in saved)), tokens * recomputed


def _at_the_head(sizes: ModelSizes, settings: TrainerSettings, item: int) -> dict[str, int]:
    """Bytes that the LM head needs while it computes its gradient, besides what is always in memory."""
    # Tensor-parallel ranks divide the vocabulary.
    embeddings, vocabulary = sizes.embeddings // settings.tp, sizes.vocabulary // settings.tp
    weight = MASTER * embeddings
    chunk = min(settings.logprob_chunk, settings.tokens_per_microbatch)
    # The accumulated gradient, and a chunk's.
    gradients = 2 if settings.tokens_per_microbatch > chunk and settings.tp == 1 else 1
    arrays = LOGITS if settings.tp == 1 else LOGITS_OF_PARTS
    return {
        "unsharded weights": item * embeddings,
        "LM head in fp32": (weight if item < MASTER else 0) + (0 if settings.lora.rank else gradients * weight),
        HEAD: arrays * chunk * vocabulary * MASTER,
    }


def _in_a_block(sizes: ModelSizes, settings: TrainerSettings, item: int) -> dict[str, int]:
    """Bytes that the backward pass of a block needs, besides what is always in memory."""
    block = sizes.largest_layer // settings.tp + sizes.layer_experts // settings.expert_parallel
    gradients = 0 if settings.lora.rank else item + MASTER  # in the compute dtype, and reduced in fp32
    hidden = max(sizes.hidden if sizes.sparse < sizes.layers else 0, sizes.expert_hidden)
    tokens = settings.tokens_per_microbatch
    # The peak is in the MLP. Attention's gradients, including those of gathered keys, are computed after the
    # activations of the MLP were freed, which are larger in every published shape that GPUs can serve here.
    return {
        "unsharded weights": 2 * item * block + gradients * block,  # this block and the prefetched next one
        "gradients of activations": tokens * item * 2 * (hidden // settings.tp + sizes.width),
    }


# -- a replica ---------------------------------------------------------------------------------------------------------


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
    batch = _prefill_chunk(device_bytes) if on_gpu else min(CPU_CHUNK, tokens)
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


def automatic_fraction(needed: Mapping[str, int], available: int, device_bytes: int) -> float:
    """The ``generator.memory_fraction`` that leaves enough memory for everything but weights and KV cache, rounded down
    to three digits.

    Args:
        needed: bytes by purpose, from :func:`replica_memory`.
        available: bytes of the GPU that the replica may use.
        device_bytes: memory of the GPU. SGLang takes its share of the memory that is free at its start, a little less.
    """
    _, other = _static_and_other(needed)
    return share(max(0, available - other), device_bytes)


def _static_and_other(needed: Mapping[str, int]) -> tuple[int, int]:
    """Bytes that ``generator.memory_fraction`` covers, and all others."""
    static = sum(needed.get(purpose, 0) for purpose in STATIC)
    return static, sum(needed.values()) - static


def share(nbytes: int, device_bytes: int) -> float:
    """These bytes as a share of a GPU's memory, rounded down to three digits.

    If that is up to a thousandth of the GPU less than needed, SGLang's cache holds a few tokens less.
    """
    return 1000 * nbytes // device_bytes / 1000


def cache_tokens(model: TrainedModel, needed: Mapping[str, int], settings: GeneratorSettings, available: int) -> int:
    """Tokens of KV cache for which ``available`` bytes of a GPU suffice besides everything else; negative if the rest
    alone does not fit."""
    rest = available - sum(nbytes for purpose, nbytes in needed.items() if purpose != CACHE)
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


def _prefill_chunk(device_bytes: int) -> int:
    """Maximum prompt tokens per batch on a GPU."""
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


ENGINE_WEIGHTS = "the weights"
"""Purpose of memory in :func:`cpu_memory`."""


def cpu_weights(config: ModelConfig, settings: GeneratorSettings, lora: LoraSettings) -> int:
    """Bytes of the weights of all replicas on a machine without GPUs. The KV cache takes memory only as it fills."""
    return settings.replicas * cpu_memory(config, settings, lora)[ENGINE_WEIGHTS]


def cpu_memory(config: ModelConfig, settings: GeneratorSettings, lora: LoraSettings) -> dict[str, int]:
    """Bytes by purpose over all ranks of an engine, on a machine without GPUs."""
    model, tokens = trained_model(config, lora), cpu_tokens(settings)
    planned = replica_memory(model, settings, TransferSettings(), on_gpu=False, tokens=tokens)
    return {
        ENGINE_WEIGHTS: settings.tp * planned[WEIGHTS],  # all engine ranks are on this machine
        f"a KV cache of {tokens} tokens (generator.max-total-tokens)": settings.tp * planned[CACHE],
        "the versions that arrive": model.version * item_bytes(settings, on_gpu=False),
    }


# -- an engine of a frozen model ---------------------------------------------------------------------------------------


def frozen_memory(config: ModelConfig, engine: GeneratorSettings, device_bytes: int) -> dict[str, int]:
    """Peak bytes by purpose on the first engine rank. As for a generator, but without incoming versions, and with the
    log-probs of prompts."""
    model = trained_model(config, FULL_TRAINING)
    tokens = longest_sequence(engine, model.positions, model.positions)
    needed = replica_memory(
        model, engine, TransferSettings(), on_gpu=True, tokens=tokens, senders=0, device_bytes=device_bytes
    )
    needed.pop(VERSIONS, None)
    return needed | {"log-probs of prompts": LOGPROB_ROWS * model.sizes.vocabulary * 4 * LOGPROB_ARRAYS}


def frozen_fraction(config: ModelConfig, engine: GeneratorSettings, device_bytes: int) -> float:
    """The share of a GPU for weights and KV cache that leaves enough for everything else.

    Raises:
        ValueError: an engine does not fit its GPUs; lists the memory needed by purpose.
    """
    needed, available = frozen_memory(config, engine, device_bytes), room(device_bytes)
    if sum(needed.values()) > available:
        raise SettingsError(
            f"a replica needs {_gib(sum(needed.values()))} GiB at its peak ({describe(needed)}), but a GPU here has "
            f"{_gib(available)} GiB available: raise frozen.tp, lower frozen.context-length or "
            "frozen.max-running-requests, or use a smaller model"
        )
    return automatic_fraction(needed, available, device_bytes)


# -- both, and whether they fit ----------------------------------------------------------------------------------------


class Sides(NamedTuple):
    """The settings that determine how much memory a run needs."""

    trainer: TrainerSettings
    generator: GeneratorSettings
    weights: TransferSettings
    colocate: bool = False
    """Whether a trainer rank and a replica share a device."""
    trained: bool = True
    """Whether there are trainer ranks, which send versions to the replicas."""

    @property
    def num_devices(self) -> int:
        """Devices that trainer ranks and replicas take together: the first ones of the launch."""
        trainer_ranks = self.trainer.ranks if self.trained else 0
        engine_ranks = self.generator.replicas * self.generator.tp
        return max(trainer_ranks, engine_ranks) if self.colocate else trainer_ranks + engine_ranks


@dataclass(frozen=True)
class MemoryPlan:
    """Memory needs of a trainer rank and of a replica, in bytes by purpose, each on its fullest device."""

    trainer: Mapping[str, int]
    replica: Mapping[str, int]
    """The KV cache is counted with its minimum size."""
    room: int
    """Usable bytes of a device."""
    cache_tokens: int
    """Tokens that fit in the replica's KV cache."""
    memory_fraction: float
    """``generator.memory_fraction`` that leaves enough memory for everything else."""

    def needed(self, who: str) -> Mapping[str, int]:
        """Bytes by purpose for :data:`TRAINER`, :data:`REPLICA`, or :data:`BOTH` together."""
        if who == BOTH:
            sides = ((TRAINER, self.trainer), (REPLICA, self.replica))
            return {f"{purpose} of {side}": nbytes for side, needed in sides for purpose, nbytes in needed.items()}
        return self.trainer if who == TRAINER else self.replica

    def fits(self, who: str) -> bool:
        """Whether ``who`` fits on a device."""
        return sum(self.needed(who).values()) <= self.room


def plan_memory(config: ModelConfig, s: Sides, device_bytes: int) -> MemoryPlan:
    """Plan the memory of a run on GPUs.

    Args:
        s: the settings to plan for.
        device_bytes: memory of a GPU.
    """
    return _plan(trained_model(config, s.trainer.lora), s, device_bytes)


def _plan(model: TrainedModel, s: Sides, device_bytes: int) -> MemoryPlan:
    generator, available = s.generator, room(device_bytes)
    served = item_bytes(generator, on_gpu=True)
    trainer = trainer_memory(model, s.trainer, s.weights, on_gpu=True, served=served)
    tokens = longest_sequence(generator, model.positions, s.trainer.tokens_per_microbatch)
    replica = replica_memory(
        model,
        generator,
        s.weights,
        on_gpu=True,
        tokens=tokens,
        senders=s.trainer.ranks,
        device_bytes=device_bytes,
    )
    left = available - sum(trainer.values()) if s.colocate else available
    # On a shared device SGLang is given tokens instead of a share, which would refer to the memory that is free at its
    # start and thus depend on the trainer's progress.
    automatic = UNLIMITED_FRACTION if s.colocate else automatic_fraction(replica, left, device_bytes)
    fraction = generator.memory_fraction or automatic
    _, other = _static_and_other(replica)
    if generator.memory_fraction and not s.colocate:
        left = min(left, int(generator.memory_fraction * device_bytes) + other)
    fitting = cache_tokens(model, replica, generator, left)
    return MemoryPlan(trainer, replica, available, generator.max_total_tokens or max(0, fitting), fraction)


def check_gpu_memory(config: ModelConfig, s: Sides, offered: Devices) -> None:
    """Refuse a run that does not fit its GPUs.

    Args:
        s: the settings to check.
        offered: the devices of the launch; nothing is checked if their memory is unknown.

    Raises:
        ValueError: lists the memory needed by purpose, and settings that would make it fit.
    """
    if not offered.memory:
        return
    plan = plan_memory(config, s, offered.memory)
    for who in (BOTH,) if s.colocate else (TRAINER, REPLICA) if s.trained else (REPLICA,):
        if not plan.fits(who):
            needed, ladders = plan.needed(who), [] if who == REPLICA else _trainer_ladders(config, s, offered)
            ladders += [] if who == TRAINER else _replica_ladders(config, s, offered, lora=who == REPLICA)
            raise SettingsError(
                f"{who} needs {_gib(sum(needed.values()))} GiB at its peak ({describe(needed)}), but a GPU here has "
                f"{_gib(plan.room)} GiB available: {_advice(config, ladders, offered.memory, who, s)}"
            )
    static, other = _static_and_other(plan.replica)
    if s.generator.memory_fraction and not s.colocate and other > (1 - s.generator.memory_fraction) * offered.memory:
        most = automatic_fraction(plan.replica, plan.room, offered.memory)
        raise SettingsError(
            f"generator.memory-fraction {s.generator.memory_fraction:g} leaves "
            f"{_gib((1 - s.generator.memory_fraction) * offered.memory)} GiB of a GPU to everything but weights and KV "
            f"cache, which needs {_gib(other)} GiB "
            f"({describe({p: n for p, n in plan.replica.items() if p not in STATIC})}): give at most {most:g}, or 0 to "
            "have it computed"
        )
    # Rounded in the same way as the automatic share, so that a planned share is never refused.
    if s.generator.memory_fraction and not s.colocate and share(static, offered.memory) > s.generator.memory_fraction:
        tokens = s.generator.max_total_tokens
        cache = f"the {tokens} tokens of generator.max-total-tokens" if tokens else "a cache for one sequence"
        raise SettingsError(
            f"generator.memory-fraction {s.generator.memory_fraction:g} gives weights and KV cache "
            f"{_gib(s.generator.memory_fraction * offered.memory)} GiB of a GPU, but they need {_gib(static)} GiB with "
            f"{cache}: give at least {ceil(1000 * static / offered.memory) / 1000:g}, or 0 to have it computed"
        )


def describe(needed: Mapping[str, int]) -> str:
    """Purposes with their sizes in GiB, the largest first."""
    return ", ".join(f"{purpose} {_gib(nbytes)}" for purpose, nbytes in sorted(needed.items(), key=lambda x: -x[1]))


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f}"


class _Change(NamedTuple):
    """A change of one setting: its text in messages, and a function that applies it."""

    text: str
    apply: Callable[[Sides], Sides]


_Ladder = list[_Change]
"""Changes of one setting, each of which frees more memory than the previous one."""


def _of_trainer(flag: str, **values: Any) -> _Change:
    return _Change(flag, lambda s: s._replace(trainer=replace(s.trainer, **values)))


def _of_generator(flag: str, **values: Any) -> _Change:
    return _Change(flag, lambda s: s._replace(generator=replace(s.generator, **values)))


def _of_weights(flag: str, **values: Any) -> _Change:
    return _Change(flag, lambda s: s._replace(weights=replace(s.weights, **values)))


def _halves(value: int, fewest: int) -> list[int]:
    """Half of a value, a quarter of it, and so on."""
    return [value >> n for n in range(1, 32) if value >> n >= fewest]


def _doubles(value: int, most: int) -> list[int]:
    return [value << n for n in range(1, 32) if value << n <= most]


def _trainer_ladders(config: ModelConfig, s: Sides, offered: Devices) -> list[_Ladder]:
    """Changes that could make a trainer rank fit, the cheapest first."""
    t = s.trainer
    weaker = {"none": ["selective", "full"], "selective": ["full"], "full": []}[t.activation_checkpoint]
    tokens, chunks = _halves(t.tokens_per_microbatch, FEWEST_TOKENS), _halves(t.logprob_chunk, FEWEST_LOGITS)
    others = 0 if s.colocate else s.generator.replicas * s.generator.tp
    most = min(MOST_RANKS, offered.total - others)
    ranks = [n for n in _doubles(t.ranks, most) if _accepted(check_experts, config, replace(t, ranks=n))]
    ladders = [
        [_of_trainer(f"trainer.activation-checkpoint {kind}", activation_checkpoint=kind) for kind in weaker],
        [_of_trainer(f"trainer.ranks {n}", ranks=n) for n in ranks],
        [_of_trainer(f"trainer.tokens-per-microbatch {n}", tokens_per_microbatch=n) for n in tokens],
        [_of_trainer(f"trainer.logprob-chunk {n}", logprob_chunk=n) for n in chunks],
        *_weights_ladders(s, lambda transport: transport.sends_from_rank_0),
        _lora_ladder(s),
    ]
    return [ladder for ladder in ladders if ladder]


def _replica_ladders(config: ModelConfig, s: Sides, offered: Devices, lora: bool) -> list[_Ladder]:
    """Changes that could make a replica fit, the cheapest first."""
    g = s.generator
    longest = _halves(g.max_total_tokens or g.context_length or config.max_position_embeddings, FEWEST_TOKENS)
    flag = "max-total-tokens" if g.max_total_tokens else "context-length"
    requests = _halves(g.running_requests(on_gpu=True), FEWEST_REQUESTS)
    leanest = [  # transports for which a replica holds no versions
        name
        for name, t in TRANSPORTS.items()
        if not t.received_versions
        and name != s.weights.resolved_transport
        and (s.num_devices <= offered.per_host or not t.one_host)
    ]
    others = 0 if s.colocate or not s.trained else s.trainer.ranks
    most = min(MOST_TP, (offered.total - others) // g.replicas)
    divided = [n for n in _doubles(g.tp, most) if _accepted(check_served, config, replace(g, tp=n), True)]
    ladders = [
        *_weights_ladders(s, lambda transport: transport.received_versions),
        [_of_generator(f"generator.tp {n}", tp=n) for n in divided],
        [_of_weights(f"weights.transport {name}", transport=name) for name in leanest],
        [_of_generator(f"generator.max-running-requests {n}", max_running_requests=n) for n in requests],
        [_of_generator(f"generator.{flag} {n}", **{flag.replace("-", "_"): n}) for n in longest],
        _lora_ladder(s) if lora else [],
    ]
    return [ladder for ladder in ladders if ladder]


def _weights_ladders(s: Sides, held: Callable[[Transport], int]) -> list[_Ladder]:
    """Changes of the weight transfer. ``held`` compares the versions that a transport holds on this side."""
    ladders = []
    if s.weights.delta:
        ladders.append([_of_weights("weights.delta False", delta=False)])
    if max(map(held, s.weights.candidates)) > held(TRANSPORTS["collective"]) and not s.colocate:
        ladders.append([_of_weights("weights.transport collective", transport="collective")])
    return ladders


def _lora_ladder(s: Sides) -> _Ladder:
    if s.trainer.lora.rank or s.trainer.tp > 1:
        return []
    return [_of_trainer(f"trainer.lora.rank {LORA_RANK}", lora=LoraSettings(rank=LORA_RANK))]


def _accepted(check: Callable[..., None], *arguments: Any) -> bool:
    try:
        check(*arguments)
    except ValueError:
        return False
    return True


def _advice(config: ModelConfig, ladders: list[_Ladder], device_bytes: int, who: str, s: Sides) -> str:
    """Up to three changes each of which makes ``who`` fit; if there are none, two or three that do so together. None of
    them makes the other side too large."""
    other = {TRAINER: REPLICA, REPLICA: TRAINER, BOTH: BOTH}[who]
    other_fits = plan_memory(config, s, device_bytes).fits(other)
    models: dict[LoraSettings, TrainedModel] = {}

    def fitting(*changes: _Change) -> bool:
        changed = s
        for change in changes:
            changed = change.apply(changed)
        lora = changed.trainer.lora
        if lora not in models:
            models[lora] = trained_model(config, lora)
        plan = _plan(models[lora], changed, device_bytes)
        return plan.fits(who) and plan.fits(other) >= other_fits

    found = (next((change.text for change in ladder if fitting(change)), None) for ladder in ladders)
    if alone := list(islice(filter(None, found), NAMED)):
        return f"it fits with {' or '.join(alone)}"
    for count in range(2, NAMED + 1):
        for together in combinations(ladders, count):
            if fitting(*(ladder[-1] for ladder in together)):
                return f"it fits with {' and '.join(change.text for change in _relaxed(together, fitting))}"
    return f"no {NAMED} settings make it fit; use a smaller model, or GPUs with more memory"


def _relaxed(ladders: tuple[_Ladder, ...], fitting: Callable[..., bool]) -> list[_Change]:
    """The smallest change of each ladder with which it still fits."""
    chosen = [ladder[-1] for ladder in ladders]
    for index, ladder in enumerate(ladders):
        for change in ladder:
            if fitting(*chosen[:index], change, *chosen[index + 1 :]):
                chosen[index] = change
                break
    return chosen
