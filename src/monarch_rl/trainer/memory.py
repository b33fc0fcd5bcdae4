"""The memory of a trainer rank, planned: bytes by purpose, from a model's sizes and the settings (docs/memory.md).

Arithmetic only: nothing is allocated, and no torch is needed.
"""

from __future__ import annotations

from monarch_rl.model.sizes import ModelSizes, TrainedModel
from monarch_rl.runtime.devices import GPU_CONTEXT, NARROW_COMMUNICATOR, NCCL_COMMUNICATOR
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.endpoint import SNAPSHOTS, TransferSettings

MASTER = 4
"""Bytes of a master weight, and of its gradient and its optimiser states: float32."""
LOGITS = 5
"""Arrays of a chunk's logits at one time: they, their probabilities, what entropy is made of, and gradients."""


def trainer_memory(
    model: TrainedModel, settings: TrainerSettings, weights: TransferSettings, *, on_gpu: bool, served: int
) -> dict[str, int]:
    """Bytes by purpose at the peak of the trainer rank that takes most, rank 0, in a step of several micro-batches of
    ``tokens_per_microbatch``.

    Args:
        model: what is trained.
        settings: of the trainer.
        weights: how versions travel.
        on_gpu: whether it computes on a GPU.
        served: bytes of a weight as it is sent.
    """
    sizes, ranks = model.sizes, settings.ranks
    item = 2 if settings.computes_in(on_gpu) == "bfloat16" else 4
    states = -(-(model.lora or sizes.elements) // ranks)
    needed = {
        "parameters": (-(-sizes.elements // ranks) + -(-model.lora // ranks)) * MASTER,
        "gradients": states * MASTER,
        "optimiser states": 2 * states * MASTER,
        "rotary cache": rotary_bytes(model, settings),
        "snapshots": snapshot_bytes(-(-model.version // ranks) * served, model.version * served, weights),
    }
    # Tensor-parallel ranks divide what is computed: rows, heads and the vocabulary.
    kept, again = (nbytes // settings.tp for nbytes in _activations(sizes, settings, item, on_gpu))
    at_the_head, in_a_block = (
        {purpose: nbytes // settings.tp for purpose, nbytes in part.items()}
        for part in (_at_the_head(sizes, settings, item), _in_a_block(sizes, settings, item))
    )
    # The peak is at the head or in the last block, when all activations are there.
    if sum(at_the_head.values()) > again + sum(in_a_block.values()):
        needed |= {"activations": kept} | at_the_head
    else:
        needed |= {"activations": kept + again} | in_a_block
    if on_gpu:
        needed["CUDA context"] = GPU_CONTEXT
        groups = NARROW_COMMUNICATOR if weights.way in ("collective", "auto") else 0
        needed["NCCL buffers"] = NCCL_COMMUNICATOR * (ranks > 1) + groups
    return {purpose: nbytes for purpose, nbytes in needed.items() if nbytes}


def snapshot_bytes(shards: int, version: int, weights: TransferSettings) -> int:
    """Bytes that rank 0 keeps of versions to send.

    Args:
        shards: bytes of a rank's part of a version.
        version: bytes of all of it.
        weights: how versions travel. ``shared_memory`` keeps them whole in rank 0's memory, which engines read.
    """
    sent = version if weights.way == "shared_memory" else shards
    if weights.way == "auto":
        sent = max(shards, version)  # while it is measured
    kept = SNAPSHOTS * sent
    return kept + (SNAPSHOTS + 1) * shards if weights.delta else kept


def rotary_bytes(model: TrainedModel, settings: TrainerSettings) -> int:
    """Bytes of the rotary cache that all layers share: sine and cosine of each position and element, float32."""
    return min(settings.tokens_per_microbatch, model.positions) * 2 * model.sizes.head * MASTER


def saved_bytes(sizes: ModelSizes, item: int, on_gpu: bool, *, sparse: bool) -> int:
    """Bytes of a token that a block keeps for its backward pass, without checkpointing.

    Args:
        sizes: of the model.
        item: bytes of an element that is computed.
        on_gpu: norms are one kernel there, and attention writes its result once.
        sparse: the block has experts.
    """
    query, key, width = sizes.query, sizes.key, sizes.width
    normed = 2 * width + (query + key if sizes.normed_heads else 0)
    inputs = 2 * width + (2 if on_gpu else 3) * query + 2 * key
    if sparse:
        inputs += 4 * sizes.expert_hidden + 2 * sizes.chosen * width
    else:
        inputs += 4 * sizes.hidden
    norms = normed * item if on_gpu else 2 * normed * MASTER
    return inputs * item + norms + 2 * sizes.head * MASTER


def _kept_bytes(sizes: ModelSizes, settings: TrainerSettings, item: int, on_gpu: bool, *, sparse: bool) -> int:
    """Bytes of a token that a block keeps until its backward pass, as ``trainer.activation_checkpoint`` says."""
    if settings.activation_checkpoint == "none":
        return saved_bytes(sizes, item, on_gpu, sparse=sparse)
    if settings.activation_checkpoint == "full":
        return sizes.width * item
    # torchtitan's choice: every second product of matrices but those of experts, and on GPUs attention's result.
    kept = sizes.width + (2 if on_gpu else 1) * sizes.query + sizes.key
    return (kept if sparse else kept + sizes.hidden + sizes.width) * item


def _activations(sizes: ModelSizes, settings: TrainerSettings, item: int, on_gpu: bool) -> tuple[int, int]:
    """Bytes that all blocks keep, and what one block computes again for its backward pass."""
    tokens, kinds = settings.tokens_per_microbatch, {True: sizes.sparse, False: sizes.layers - sizes.sparse}
    kept = {sparse: _kept_bytes(sizes, settings, item, on_gpu, sparse=sparse) for sparse, n in kinds.items() if n}
    whole = {sparse: saved_bytes(sizes, item, on_gpu, sparse=sparse) for sparse in kept}
    # Beside the blocks: the embeddings' output, and what the last norm takes and gives.
    ends = (2 * item + (item if on_gpu else 2 * MASTER)) * sizes.width
    again = max(whole[sparse] - kept[sparse] for sparse in kept)
    return tokens * (ends + sum(kept[sparse] * kinds[sparse] for sparse in kept)), tokens * again


def _at_the_head(sizes: ModelSizes, settings: TrainerSettings, item: int) -> dict[str, int]:
    """Bytes that the LM head takes while it makes its gradient, beside what is kept all the time."""
    weight = MASTER * sizes.embeddings
    chunk = min(settings.logprob_chunk, settings.tokens_per_microbatch)
    gradients = 2 if settings.tokens_per_microbatch > chunk else 1  # the sum so far, and a chunk's
    return {
        "unsharded weights": item * sizes.embeddings,
        "LM head in fp32": (weight if item < MASTER else 0) + (0 if settings.lora.rank else gradients * weight),
        "logits": LOGITS * chunk * sizes.vocabulary * MASTER,
    }


def _in_a_block(sizes: ModelSizes, settings: TrainerSettings, item: int) -> dict[str, int]:
    """Bytes that the backward pass of a block takes, beside what is kept all the time."""
    block = sizes.largest_layer + sizes.layer_experts // settings.expert_parallel
    gradients = 0 if settings.lora.rank else item + MASTER  # as they are computed, and as they are reduced
    hidden = max(sizes.hidden if sizes.sparse < sizes.layers else 0, sizes.expert_hidden)
    return {
        "unsharded weights": 2 * item * block + gradients * block,  # of this block and of the next one
        "gradients of activations": settings.tokens_per_microbatch * item * (2 * hidden + 2 * sizes.width),
    }
