"""torchtitan's configs of a model and its parallelism, from a :class:`ModelConfig` and the settings.

``config.json`` itself is read in ``model/config.py``.
"""

from __future__ import annotations

from torchtitan.config import ParallelismConfig
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.decoder import Decoder

from monarch_rl.model.config import ModelConfig, check_features
from monarch_rl.trainer.families import FAMILIES, norm_config
from monarch_rl.trainer.modules import LOADED, ZEROS, LogprobHead, ValueHead
from monarch_rl.trainer.settings import TrainerSettings

SPMD_BACKEND = "partial_dtensor"
"""torchtitan's default backend fails in ``fully_shard`` with torch 2.13; this one runs with 2.13 and 2.14."""


def parallelism_config(settings: TrainerSettings) -> ParallelismConfig:
    """Tensor parallelism over ``tp`` neighbouring ranks, and FSDP2 over ranks that hold the same tensor-parallel part;
    expert parallelism over ``expert_parallel`` ranks, and FSDP2 over ranks that hold the same experts."""
    return ParallelismConfig(
        spmd_backend=SPMD_BACKEND,
        tensor_parallel_degree=settings.tp,
        expert_parallel_degree=settings.expert_parallel,
    )


def model_config(
    hf: ModelConfig, *, logprob_chunk: int, longest: int, half_on_gpu: bool, values: bool = False
) -> Decoder.Config:
    """torchtitan's model config for a Hugging Face ``config.json``.

    Args:
        logprob_chunk: tokens whose logits are in memory at a time.
        longest: most tokens of an episode, the length of the rotary cache.
        half_on_gpu: the model computes in half precision on a GPU.
        values: replace the LM head by a zero-initialised head with one output.

    Raises:
        ValueError: the model has a feature that is not supported.
    """
    family = FAMILIES[hf.architecture]
    check_features(hf)
    dim, vocabulary = hf.hidden_size, hf.vocab_size
    head: Linear.Config = ValueHead.Config(in_features=dim, out_features=1, param_init=ZEROS)
    if not values:
        head = LogprobHead.Config(in_features=dim, out_features=vocabulary, param_init=LOADED, chunk=logprob_chunk)
    return family.model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=norm_config(hf, dim),
        enable_weight_tying=not values and hf.tie_word_embeddings,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=dim,
            param_init=LOADED,
        ),
        lm_head=head,
        layers=family.layers(hf, longest=longest, half_on_gpu=half_on_gpu),
    )
