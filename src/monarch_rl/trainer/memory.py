"""The memory of a trainer rank, planned: bytes by purpose, from a model's sizes and the settings (docs/memory.md).

Arithmetic only: nothing is allocated, and no torch is needed.
"""

from __future__ import annotations

from monarch_rl.algorithms.packing import KEYS_PER_TOKEN
from monarch_rl.model.sizes import ModelSizes, TrainedModel
from monarch_rl.runtime.devices import GPU_CONTEXT, NARROW_COMMUNICATOR, NCCL_COMMUNICATOR
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.weights.endpoint import SNAPSHOTS, TransferSettings

MASTER = 4
"""Bytes of a master weight, and of its gradient and its optimiser states: float32."""
LOGITS = 5
"""Arrays of a chunk's logits at one time: they, their probabilities, what entropy is made of, and gradients."""
LOGITS_OF_PARTS = 4
"""The same where tensor-parallel ranks divide the vocabulary: they keep exponentials, not logits, and most are there
in the forward pass, before the chunk's own gradients."""


def trainer_memory(
    model: TrainedModel,
    settings: TrainerSettings,
    weights: TransferSettings,
    *,
    on_gpu: bool,
    served: int,
    keys: int = KEYS_PER_TOKEN,
) -> dict[str, int]:
    """Bytes by purpose at the peak of the trainer rank that takes most, rank 0, in a step of several micro-batches of
    ``tokens_per_microbatch``.

    Args:
        model: what is trained.
        settings: of the trainer.
        weights: how versions travel.
        on_gpu: whether it computes on a GPU.
        served: bytes of a weight as it is sent.
        keys: that are gathered for each token: as many as a micro-batch may, or 1 where episodes share no prefixes.
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
    kept, again = _activations(sizes, settings, item, on_gpu, keys)
    at_the_head, in_a_block = _at_the_head(sizes, settings, item), _in_a_block(sizes, settings, item)
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


def checkpoint_bytes(model: TrainedModel, settings: TrainerSettings) -> int:
    """Bytes in a host's memory, for each trainer rank on it, of the copy that a checkpoint is written from: weights and
    the optimizer's two moments in float32, of LoRA alone with LoRA; and those of a critic. Pinned where it computes on
    a GPU. They are taken with the first checkpoint and kept for the next one."""
    critic = critic_elements(model.sizes) if settings.critic.enabled else 0
    return 3 * MASTER * -(-((model.lora or model.sizes.elements) + critic) // settings.ranks)


def critic_elements(sizes: ModelSizes) -> int:
    """Weights of a critic, which has a head of one row instead of an LM head; as many again are its gradients, and
    twice as many its optimiser states."""
    return sizes.elements - sizes.lm_head + sizes.width


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


def saved_bytes(
    sizes: ModelSizes, item: int, on_gpu: bool, *, sparse: bool, tokens: int, keys: int, tp: int = 1
) -> int:
    """Bytes of a token that a block keeps for its backward pass, without checkpointing.

    Args:
        sizes: of the model.
        item: bytes of an element that is computed.
        on_gpu: norms are one kernel there, and flash attention, which takes half precision, writes its result once.
        sparse: the block has experts.
        tokens: of the micro-batch.
        keys: that are gathered for each token, with as many values. Attention keeps them. Above 1 episodes share
            prefixes.
        tp: ranks that divide heads, rows and, beside attention and MLP, tokens. Each has what both take of all tokens.
    """
    query, key, width, flash = sizes.query, sizes.key, sizes.width, on_gpu and item < MASTER
    normed = 2 * width + (query + key if sizes.normed_heads else 0)
    # In float32 on a GPU each head of queries gets keys of its own (``trainer/attention.py``).
    inputs = (2 if flash else 3) * query + 2 * keys * (query if on_gpu and not flash else key)
    if sparse:
        inputs += 4 * sizes.expert_hidden + 2 * sizes.chosen * width
    else:
        inputs += 4 * sizes.hidden
    norms = normed * item if on_gpu else 2 * normed * MASTER
    # What answers add to a prompt has, together, at most half of the row's tokens as queries and as other keys.
    masks = 0 if flash or keys == 1 else tokens * item // 4
    return 2 * width * item + 2 * sizes.head * MASTER + masks + (inputs * item + norms) // tp


def _saved_bytes(
    sizes: ModelSizes, settings: TrainerSettings, item: int, on_gpu: bool, *, sparse: bool, keys: int
) -> int:
    """Bytes of a token that a block keeps until its backward pass, as ``trainer.activation_checkpoint`` says."""
    tp, width = settings.tp, sizes.width
    if settings.activation_checkpoint == "none":
        tokens = settings.tokens_per_microbatch
        return saved_bytes(sizes, item, on_gpu, sparse=sparse, tokens=tokens, keys=keys, tp=tp)
    if settings.activation_checkpoint == "full":
        return width * item // tp
    # torchtitan's choice: every second product of matrices but those of experts, and on GPUs attention's result.
    kept = width + (2 if on_gpu else 1) * sizes.query + sizes.key
    if sparse:
        return kept * item
    # With several ranks the second width is a sum's part, of all tokens; and what sums are divided into is kept.
    sums = 2 * width if tp > 1 else 0
    return (width + (kept + sizes.hidden + sums) // tp) * item


def _activations(sizes: ModelSizes, settings: TrainerSettings, item: int, on_gpu: bool, keys: int) -> tuple[int, int]:
    """Bytes that all blocks keep, and what one block computes again for its backward pass."""
    tokens, kinds = settings.tokens_per_microbatch, {True: sizes.sparse, False: sizes.layers - sizes.sparse}
    kept = {
        sparse: _saved_bytes(sizes, settings, item, on_gpu, sparse=sparse, keys=keys)
        for sparse, n in kinds.items()
        if n
    }
    whole = {
        sparse: saved_bytes(sizes, item, on_gpu, sparse=sparse, tokens=tokens, keys=keys, tp=settings.tp)
        for sparse in kept
    }
    # Beside the blocks: the embeddings' output, and what the last norm takes and gives.
    ends = (item + (item + (item if on_gpu else 2 * MASTER)) // settings.tp) * sizes.width
    again = max(whole[sparse] - kept[sparse] for sparse in kept)
    return tokens * (ends + sum(kept[sparse] * kinds[sparse] for sparse in kept)), tokens * again


def _at_the_head(sizes: ModelSizes, settings: TrainerSettings, item: int) -> dict[str, int]:
    """Bytes that the LM head takes while it makes its gradient, beside what is kept all the time."""
    # Tensor-parallel ranks divide the vocabulary.
    embeddings, vocabulary = sizes.embeddings // settings.tp, sizes.vocabulary // settings.tp
    weight = MASTER * embeddings
    chunk = min(settings.logprob_chunk, settings.tokens_per_microbatch)
    # The sum so far, and a chunk's.
    gradients = 2 if settings.tokens_per_microbatch > chunk and settings.tp == 1 else 1
    arrays = LOGITS if settings.tp == 1 else LOGITS_OF_PARTS
    return {
        "unsharded weights": item * embeddings,
        "LM head in fp32": (weight if item < MASTER else 0) + (0 if settings.lora.rank else gradients * weight),
        "logits": arrays * chunk * vocabulary * MASTER,
    }


def _in_a_block(sizes: ModelSizes, settings: TrainerSettings, item: int) -> dict[str, int]:
    """Bytes that the backward pass of a block takes, beside what is kept all the time."""
    block = sizes.largest_layer // settings.tp + sizes.layer_experts // settings.expert_parallel
    gradients = 0 if settings.lora.rank else item + MASTER  # as they are computed, and as they are reduced
    hidden = max(sizes.hidden if sizes.sparse < sizes.layers else 0, sizes.expert_hidden)
    tokens = settings.tokens_per_microbatch
    # The gradients are the MLP's. Attention's, of gathered keys too, come when what the MLP kept has gone, which is
    # more in every published shape that GPUs can serve here.
    return {
        "unsharded weights": 2 * item * block + gradients * block,  # of this block and of the next one
        "gradients of activations": tokens * item * 2 * (hidden // settings.tp + sizes.width),
    }
