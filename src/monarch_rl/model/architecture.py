"""One record per model family: its keys in ``config.json``, and what SGLang and the trainer require of it.

A family touches these files; CONTRIBUTING.md, "A model", has its tests:

    model/architecture.py                the record here
    model/config.py                      the keys that only this family has, and in ``check_features`` unsupported ones
    model/tensors.py                     names and shapes of its tensors
    trainer/families.py                  the record of its torchtitan modules
    trainer/modules.py, attention.py     a computation that torchtitan lacks
    generator/sglang_models/trained.py   SGLang's class, and the same computation
    generator/cpu/                       replacements of SGLang's kernels on CPUs, if it uses others

This module must not import torch: it is used before anything is spawned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch_rl.errors import SettingsError

Json = Mapping[str, Any]
"""``config.json`` of a model folder as it was read. Everything but its checks and these records reads
:class:`~monarch_rl.model.config.ModelConfig`."""

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
GROUPED_QUERY_SIZES = (*SIZES, "num_key_value_heads")
EXPERT_SIZES = ("moe_intermediate_size", "num_experts_per_tok")
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _no_experts(_config: Json) -> int:
    return 0


def _no_sparse_layer(_config: Json, _layer: int) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class Architecture:
    """A family of models."""

    name: str
    """The family's name in ``architectures`` of ``config.json``."""
    model_type: str
    """The family's ``model_type`` there."""
    label: str
    """The family's name in messages to users."""
    num_experts: Callable[[Json], int] = _no_experts
    """Experts per sparse layer; 0 for a dense model. Raises ValueError if the config does not state the number."""
    is_sparse: Callable[[Json, int], bool] = _no_sparse_layer
    """Whether the layer with this index has experts; asked only of a model with experts."""
    shared_experts: bool = False
    """Every token also goes to experts that no router chooses."""
    needed_keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys that SGLang needs in ``config.json`` besides those of every model, with the values of the family's own
    models."""
    lora_unsupported: str = ""
    """Why its projections cannot have low-rank adapters; empty if they can."""
    float32_only: str = ""
    """Why it can be served in float32 only; empty if it can be served in other dtypes."""
    cpu_needs_scaled_rope: bool = False
    """On a CPU SGLang serves it only with scaled rotary embeddings."""
    normed_heads: bool = False
    """Queries and keys are normalised per head."""
    biased_heads: bool = False
    """The projections to queries, keys and values have biases, whatever ``attention_bias`` says."""
    windowed: bool = False
    """A token attends to the last ``sliding_window`` tokens, itself included, or to all if that is null."""
    latent_attention: bool = False
    """Keys and values are computed from a latent vector (multi-head latent attention)."""
    sizes: tuple[str, ...] = GROUPED_QUERY_SIZES
    """Required keys of ``config.json``, each a positive integer."""
    flags: tuple[str, ...] = ()
    """Further required keys, each true or false."""
    needs_lm_head: bool = False
    """SGLang fills a separate LM head from ``lm_head.weight``, even with ``tie_word_embeddings``."""


def _qwen3_moe_experts(config: Json) -> int:
    experts = config.get("num_experts", config.get("num_local_experts"))  # transformers 4's name, and 5's
    if experts is None:
        raise SettingsError("has neither num_experts nor num_local_experts")
    return int(experts)


def _qwen3_moe_is_sparse(config: Json, layer: int) -> bool:
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    return layer not in dense and (layer + 1) % step == 0


# head_dim is required: where it is missing, transformers and SGLang take 128, others hidden_size / num_attention_heads.
_QWEN3_SIZES = (*GROUPED_QUERY_SIZES, "head_dim")
QWEN3 = Architecture("Qwen3ForCausalLM", "qwen3", "Qwen3", normed_heads=True, sizes=_QWEN3_SIZES)
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    "Qwen3-MoE",
    num_experts=_qwen3_moe_experts,
    is_sparse=_qwen3_moe_is_sparse,
    normed_heads=True,
    sizes=(*_QWEN3_SIZES, *EXPERT_SIZES),
    needs_lm_head=True,
)
QWEN2 = Architecture("Qwen2ForCausalLM", "qwen2", "Qwen2", biased_heads=True)
# Without num_key_value_heads a Llama has as many as query heads, as in transformers' LlamaConfig.
LLAMA = Architecture("LlamaForCausalLM", "llama", "Llama", sizes=SIZES)
MISTRAL = Architecture("MistralForCausalLM", "mistral", "Mistral", windowed=True)
DEEPSEEK_V3 = Architecture(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    "DeepSeek-V3",
    num_experts=lambda config: int(config["n_routed_experts"]),
    is_sparse=lambda config, layer: layer >= int(config["first_k_dense_replace"]),
    shared_experts=True,
    latent_attention=True,
    sizes=(
        *(*SIZES, *EXPERT_SIZES, *LATENT_SIZES),
        *("n_routed_experts", "n_shared_experts", "n_group", "topk_group"),
    ),
    flags=("norm_topk_prob",),
    needed_keys={"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    lora_unsupported="adapters on the latent attention of DeepSeek-V3 are not supported",
    float32_only="SGLang keeps its router's bias in float32, and a version has one dtype",
    cpu_needs_scaled_rope=True,
)

ARCHITECTURES = {family.name: family for family in (QWEN3, QWEN3_MOE, QWEN2, LLAMA, MISTRAL, DEEPSEEK_V3)}
"""Supported families, by their name in ``config.json``."""
UNSUPPORTED = Architecture("", "", "model of another family", sizes=())
"""Stands for all other families: SGLang may serve their models, but nothing else here knows them."""
