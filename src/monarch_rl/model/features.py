"""Checks whether a model of a supported family can be built: required and unsupported content of ``config.json``.

This module must not import torch: the same checks run before anything is spawned and when the trainer builds the model.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from monarch_rl.errors import SettingsError
from monarch_rl.model.architecture import Architecture, Config, architecture_of
from monarch_rl.model.folder import num_experts, rope_parameters, sparse_layers

NORM_EPS = 1e-6
"""Epsilon of all norms of a DeepSeek-V3. Hugging Face's latent norms use it whatever ``rms_norm_eps`` is; SGLang's use
``rms_norm_eps``."""
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys that rotary embeddings of type `llama3` need."""
OPTIONAL_SIZES = (
    *("head_dim", "num_key_value_heads", "moe_intermediate_size", "num_experts_per_tok"),
    *("q_lora_rank", "decoder_sparse_step"),
)
"""Keys that may be absent or null where they apply, or that configs of other families may have."""
UNSET_WINDOW = 4096
"""``sliding_window`` of a Mistral whose config leaves it out, as in transformers' MistralConfig."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
MAX_COUNT, MAX_SIZE = 2000, 2**31 - 1
"""Most layers or experts, and most elements per dimension, that a config may state: the tensors of all layers and
experts are listed, so a damaged config must not state more."""
MAX_NUMBER = 1e12
"""Upper bound on numbers of rotary embeddings and routers. Those of real models are below 1e9."""
YARN_ROPE = ("factor", "original_max_position_embeddings")
YARN_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
FLAGS = ("tie_word_embeddings", "norm_topk_prob", "rope_interleave", "use_sliding_window", "attention_bias", "mlp_bias")
DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes in which weights may be saved."""


def check_features(config: Config) -> None:
    """Check that the trainer can build this model, and builds the same model as Hugging Face.

    Raises:
        ValueError: it cannot, or does not; names the key of ``config.json``.
    """
    architecture = architecture_of(config)
    _check_projections(architecture, config)
    _check_window(architecture, config)
    if config.get("quantization_config"):
        raise SettingsError("quantised weights are not supported: convert the folder to bfloat16 or float32 first")
    if config.get("shared_expert_intermediate_size") or (
        config.get("n_shared_experts") and not architecture.shared_experts
    ):
        raise SettingsError(f"shared experts are not supported: {architecture.name} has none")
    if sparse_layers(config) and config.get("output_router_logits"):
        raise SettingsError(
            "output_router_logits asks for Hugging Face's auxiliary load-balancing loss in training, which is not "
            "supported: set it to false in config.json, as Qwen's models do"
        )
    if architecture.latent_attention:
        _check_router(config)
        _check_latent_rope(config)
    else:
        _check_rope(config)


def check_keys(config: Config) -> None:
    """Check that ``config.json`` has every key that the model is built from, with a valid value.

    Raises:
        ValueError: names the key. The message continues the sentence "config.json ...".
    """
    architecture = architecture_of(config)
    lacking = [key for key in _needed(architecture) if key not in config]
    if lacking:
        raise SettingsError(f"lacks {', '.join(lacking)}, without which a {architecture.label} cannot be built")
    for key in architecture.sizes:
        _check_size(key, config[key])
    for key in (*OPTIONAL_SIZES, *EXPERT_COUNTS):
        if config.get(key) is not None:
            _check_size(key, config[key])
    if architecture.windowed and config.get("sliding_window") is not None:
        _check_size("sliding_window", config["sliding_window"])
    eps = config["rms_norm_eps"]
    if not _is_number(eps) or not 0 < eps < 1:
        raise SettingsError(f"has rms_norm_eps {eps!r}, which must be a number above 0 and below 1")
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key) or {}, dict):
            raise SettingsError(f"has {key} {config[key]!r}, which must be an object or null")
    _check_flags(architecture, config)
    for key, kind, items in (("layer_types", str, "words"), ("mlp_only_layers", int, "whole numbers")):
        values = config.get(key) or []
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise SettingsError(f"has {key} {config[key]!r}, which must be a list of {items} or null")
    if architecture.latent_attention:
        _check_dense_layers(config)
    _check_divisions(architecture, config)


def _needed(architecture: Architecture) -> tuple[str, ...]:
    latent = ("first_k_dense_replace", "routed_scaling_factor") if architecture.latent_attention else ()
    return (*architecture.sizes, *architecture.flags, *latent, "rms_norm_eps")


def _check_flags(architecture: Architecture, config: Config) -> None:
    """Raise ValueError for a flag that is not a boolean, and for a dtype that weights cannot have."""
    for key in FLAGS:
        value = config.get(key)
        if not isinstance(value, bool) and (value is not None or key in architecture.flags):
            raise SettingsError(f"has {key} {value!r}, which must be true or false")
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is not None and (not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES):
            raise SettingsError(f"has {key} {value!r}, which must be one of {', '.join(DTYPES)}, or null")


def _check_dense_layers(config: Config) -> None:
    """Check the keys of a DeepSeek-V3 that say which layers have experts and how their outputs are scaled."""
    dense, scale = config["first_k_dense_replace"], config["routed_scaling_factor"]
    if type(dense) is not int or not 0 <= dense <= MAX_COUNT:
        raise SettingsError(f"has first_k_dense_replace {dense!r}, which must be a whole number from 0 to {MAX_COUNT}")
    if not _is_number(scale) or not 0 < scale <= MAX_NUMBER:
        raise SettingsError(f"has routed_scaling_factor {scale!r}, which must be a positive number")
    # SGLang gives experts to every moe_layer_freq-th layer, Hugging Face's model to every layer.
    frequency = config.get("moe_layer_freq", 1)
    if type(frequency) is not int or frequency != 1:
        raise SettingsError(f"has moe_layer_freq {frequency!r}; only 1 is supported")


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a JSON value is a number, NaN and Infinity included."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_size(key: str, value: Any) -> None:
    most = MAX_COUNT if key in ("num_hidden_layers", *EXPERT_COUNTS) else MAX_SIZE
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise SettingsError(f"has {key} {value!r}, which must be a positive integer, at most {most}")


def _check_divisions(architecture: Architecture, config: Config) -> None:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if not architecture.latent_attention:
        if heads % kv_heads:
            raise SettingsError(f"has {heads} num_attention_heads, which {kv_heads} num_key_value_heads do not divide")
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        if head_dim % 2:
            raise SettingsError(
                f"has heads of {head_dim} elements, which must be an even number: rotary embeddings rotate pairs"
            )
    experts = num_experts(config)
    if experts and not config["num_experts_per_tok"] <= experts:
        raise SettingsError(f"has num_experts_per_tok {config['num_experts_per_tok']}, but {experts} experts")


def _check_projections(architecture: Architecture, config: Config) -> None:
    # A Qwen2 always has biases: neither transformers nor SGLang reads its attention_bias.
    if config.get("mlp_bias") or (config.get("attention_bias") and not architecture.biased_heads):
        key = "mlp_bias" if config.get("mlp_bias") else "attention_bias"
        raise SettingsError(
            f"{key} is true, and biases in attention or MLP projections are not supported, except those of queries, "
            "keys and values in a Qwen2: take a model without them"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise SettingsError(
            f"hidden_act {config['hidden_act']!r} is not supported, only 'silu': take a model with 'silu'"
        )


def _check_window(architecture: Architecture, config: Config) -> None:
    """Raise ValueError for attention to only some earlier tokens: the trainer and SGLang attend to all of them."""
    if config.get("use_sliding_window"):
        raise SettingsError("sliding-window attention is not supported: use_sliding_window must be false")
    if other := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise SettingsError(f"layer_types {', '.join(sorted(map(str, other)))} are not supported, only full_attention")
    if config.get("dual_chunk_attention_config"):
        raise SettingsError(
            "dual_chunk_attention_config is not supported: SGLang would follow it, but the trainer, like transformers, "
            "attends to all tokens. Remove it from config.json"
        )
    window, length = config.get("sliding_window", UNSET_WINDOW), config["max_position_embeddings"]
    if architecture.windowed and window is not None and window < length:
        stated = window if "sliding_window" in config else f"{window}, transformers' default for an absent key,"
        raise SettingsError(
            f"sliding_window {stated} is below max_position_embeddings {length}: sliding-window attention is not "
            f"supported. Set max_position_embeddings to {window}, within which the model attends to all tokens, or "
            "take a model whose sliding_window is null"
        )


def _check_rope(config: Config) -> None:
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    _check_rope_numbers(rope, ("rope_theta", *(LLAMA3_ROPE if kind == "llama3" else ())))
    if kind not in ("default", "llama3"):
        raise SettingsError(f"rotary scaling {kind!r} is not supported, only 'default' and 'llama3'")
    if (config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise SettingsError(
            "partial_rotary_factor is not supported: rotary embeddings rotate whole heads. Take a model without it"
        )


def _check_rope_numbers(rope: dict[str, Any], keys: tuple[str, ...]) -> None:
    if by_layer := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise SettingsError(
            f"separate rotary embeddings for {', '.join(by_layer)} are not supported, only one for all layers"
        )
    for key in keys:
        value = rope.get(key)
        if not _is_number(value) or not 0 < value <= MAX_NUMBER:
            raise SettingsError(
                f"rotary embeddings of type {rope['rope_type']} need a positive {key}, at most {MAX_NUMBER:g}, got "
                f"{value!r}"
            )


def _check_router(config: Config) -> None:
    if config.get("scoring_func", "sigmoid") != "sigmoid" or config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise SettingsError(
            "only DeepSeek-V3's own router is supported: scoring_func sigmoid and topk_method noaux_tc, got "
            f"{config.get('scoring_func')} and {config.get('topk_method')}"
        )
    if config["rms_norm_eps"] != NORM_EPS:
        raise SettingsError(f"rms_norm_eps {config['rms_norm_eps']} is not supported for DeepSeek-V3, only {NORM_EPS}")


def _check_latent_rope(config: Config) -> None:
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if not config.get("rope_interleave", True):
        raise SettingsError("rope_interleave must be true: torchtitan's DeepSeek-V3 rotates neighbouring pairs")
    optional = [key for key in YARN_OPTIONAL if rope.get(key)]
    _check_rope_numbers(rope, ("rope_theta", *((*YARN_ROPE, *optional) if kind == "yarn" else ())))
    # With other settings cosines and sines would be scaled, too; torchtitan does not scale them.
    one_scale = rope.get("mscale") and rope.get("mscale") == rope.get("mscale_all_dim")
    if kind != "default" and (kind != "yarn" or not one_scale or rope.get("attention_factor") is not None):
        raise SettingsError(
            f"rotary scaling {rope} is not supported, only 'default', and 'yarn' with mscale and mscale_all_dim, "
            "equal and not 0, and without attention_factor"
        )
