"""A trainer rank that is out of memory: one message with the flags that lower its need, on CPUs and on GPUs."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from monarch_rl.errors import OutOfMemory
from monarch_rl.model.config import read_config
from monarch_rl.trainer.settings import TrainerSettings

LOGITS_BYTES = 24
"""Most bytes per token of a chunk and entry of the vocabulary (``trainer.logprob_chunk``)."""
NEGLIGIBLE = 64 << 20
"""Bytes of logits below which a smaller chunk does not help."""
_WORDS = (
    *("can't allocate memory", "cannot allocate memory", "bad_alloc", "out of memory"),
    *("alloc_failed", "memoryallocation", "cuda calloc"),  # cuBLAS and cuDNN, CUDA, NCCL
)
"""In errors of torch and its libraries that have no type of their own."""


@contextmanager
def naming_flags(settings: TrainerSettings, rank: int, model: Path) -> Iterator[None]:
    """Turn a failed allocation in the block into an error that names the flags of the trainer's memory.

    Args:
        model: the model's Hugging Face folder.

    Raises:
        OutOfMemory: an allocation failed; its cause is the original error.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        advice = advice_for(settings, read_config(model).vocab_size, on_gpu=torch.cuda.is_available())
        raise OutOfMemory(f"trainer rank {rank} is out of memory ({reason.strip()}): {advice}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports a failed allocation, of host or device memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def advice_for(settings: TrainerSettings, vocabulary: int, *, on_gpu: bool) -> str:
    """The flags that lower a rank's need of memory, with their values."""
    chunk = min(settings.logprob_chunk, settings.tokens_per_microbatch)
    logits = LOGITS_BYTES * chunk * vocabulary // settings.tp
    lower = [f"--trainer.tokens-per-microbatch (now {settings.tokens_per_microbatch}, also the limit of an episode)"]
    if logits >= NEGLIGIBLE:
        chunk_flag = (
            f"--trainer.logprob-chunk (now {settings.logprob_chunk}: logits over {vocabulary:,} entries of the "
        )
        lower.insert(0, f"{chunk_flag}vocabulary take up to {logits / 2**30:.1f} GiB)")
    other = ["--trainer.activation-checkpoint full"] if settings.activation_checkpoint != "full" else []
    if not settings.lora.rank and settings.tp == 1:
        other.append("--trainer.lora.rank 16")
    if on_gpu:
        other.append(f"more --trainer.ranks than {settings.ranks}")
    else:
        other.append("a smaller --generator.max-total-tokens, or fewer --generator.replicas, which use the same memory")
    return f"lower {' or '.join(lower)}, or use {', '.join(other)} (docs/memory.md)"
