"""Memory plan of a trainer rank: bytes by purpose, from a model's sizes and the settings (docs/memory.md).

Arithmetic only: it allocates nothing, and does not need torch.
"""

from __future__ import annotations

from monarch_rl.algorithms.packing import KEYS_PER_TOKEN
from monarch_rl.model.sizes import ModelSizes, TrainedModel
from monarch_rl.runtime.devices import GPU_CONTEXT, NARROW_COMMUNICATOR, NCCL_COMMUNICATOR
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.transport import SNAPSHOTS, TransferSettings

MASTER = 4
"""Bytes of a float32 master weight, of its gradient, and of each of its optimiser states."""
LOGITS = 5
"""Tensors of the size of a chunk's logits at a time: logits, probabilities, entropy terms, and gradients."""
LOGITS_OF_PARTS = 4
"""The same if tensor-parallel ranks divide the vocabulary: they keep exponentials instead of logits, and the peak is in
the forward pass, before the chunk's own gradients."""


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


def checkpoint_bytes(model: TrainedModel, settings: TrainerSettings) -> int:
    """Bytes of host memory, per trainer rank, for the copy that a checkpoint is written from: weights and the
    optimizer's two moments in float32 (with LoRA, of LoRA only), and those of a critic. The memory is pinned if the
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
        "logits": arrays * chunk * vocabulary * MASTER,
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
