"""``config.json`` of a model folder, read and checked once: :class:`ModelConfig`.

This module must not import torch: configs are checked before anything is spawned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from monarch_rl.errors import SettingsError
from monarch_rl.model.architecture import ARCHITECTURES, UNSUPPORTED, Architecture, Json

NORM_EPS = 1e-6
"""Epsilon of all norms of a DeepSeek-V3. Hugging Face's latent norms use it whatever ``rms_norm_eps`` is; SGLang's use
``rms_norm_eps``."""
ORIGINAL_LENGTH = "original_max_position_embeddings"
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH)
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
EXTRA_LAYERS = "num_nextn_predict_layers"
"""Layers for multi-token prediction, which draft tokens for the model. They are ignored, and not saved."""
YARN_ROPE = ("factor", ORIGINAL_LENGTH)
YARN_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
FLAGS = ("tie_word_embeddings", "norm_topk_prob", "rope_interleave", "use_sliding_window", "attention_bias", "mlp_bias")
SGLANG_ONLY = (
    *("dual_chunk_attention_config", "final_logit_softcapping", "bias"),
    *("index_topk", "num_hash_layers", "swiglu_limit"),
    *("mrope_section", "use_fope"),
)
"""Keys, of rotary embeddings, too, by which SGLang's classes of the supported families compute something else, and
transformers' do not."""
NESTED = ("text_config", "thinker_config", "llm_config", "language_config")
"""Keys in which configs of models for images or audio hold that of the language model."""
DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes in which weights may be saved."""
REWARD_MODELS = {
    "Qwen3ForSequenceClassification": "Qwen3ForCausalLM",
    "Qwen2ForSequenceClassification": "Qwen2ForCausalLM",
    "LlamaForSequenceClassification": "LlamaForCausalLM",
}
"""Architecture of the base model, by the reward model's architecture in ``config.json``. A reward model is a base model
with a linear head on the last token in place of the LM head."""
REWARD_LABELS = 2
"""Outputs of a reward head if ``config.json`` does not state the number: transformers' default."""


@dataclass(frozen=True)
class ModelConfig:
    """The content of ``config.json``, with the names that transformers gives to its keys.

    All sizes are positive, except those that may be 0 as stated here. In a config of an unsupported architecture
    (:attr:`supported`), which only :func:`find_config` returns, nothing is checked, and sizes that it does not state
    are 0.
    """

    folder: Path
    """The model folder; empty if the config was not read from one."""
    architecture: Architecture
    vocab_size: int
    """Rows of the embeddings; the tokenizer may have fewer tokens."""
    hidden_size: int
    intermediate_size: int
    """Width of a dense MLP."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Elements of a head's queries, keys and values; without meaning for latent attention."""
    max_position_embeddings: int
    """Maximum tokens per sequence."""
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any]
    """The rotary embeddings in the form of transformers 5: ``rope_type``, ``rope_theta`` and the type's parameters.
    :func:`check_features` checks them."""
    dtype: str
    """Dtype of the saved weights, e.g. ``bfloat16``."""
    num_experts: int = 0
    """Routed experts per sparse layer; 0 for a dense model."""
    sparse_layers: tuple[int, ...] = ()
    """Indices of the layers with experts, in ascending order."""
    num_experts_per_tok: int = 0
    """Experts that the router chooses per token; without meaning for a dense model."""
    moe_intermediate_size: int = 0
    """Width of one expert; without meaning for a dense model."""
    n_shared_experts: int = 0
    """Experts that process every token; 0 if the architecture has none."""
    norm_topk_prob: bool = False
    """Whether the router's weights of the chosen experts are divided by their sum."""
    n_group: int = 0
    """Groups of experts, of which a DeepSeek-V3's router chooses ``topk_group`` per token; 0 for other families."""
    topk_group: int = 0
    routed_scaling_factor: float = 1.0
    """Factor of a DeepSeek-V3's routed experts."""
    q_lora_rank: int = 0
    """Width of the latent vector of the queries; 0 if there is none. This and the four sizes below belong to latent
    attention, and are 0 without it."""
    kv_lora_rank: int = 0
    """Width of the latent vector of keys and values."""
    qk_nope_head_dim: int = 0
    """Elements of a head's queries and keys that rotary embeddings do not rotate."""
    qk_rope_head_dim: int = 0
    """Elements of a head's queries and keys that they rotate."""
    v_head_dim: int = 0
    reward_labels: int = 0
    """Outputs per sequence of a reward model's head; 0 for a model with an LM head."""
    raw: Json = field(default_factory=dict, repr=False)
    """``config.json`` as it was read, for checks of keys from which no model is built."""

    @property
    def supported(self) -> bool:
        """Whether the architecture is supported."""
        return self.architecture is not UNSUPPORTED


# -- reading ----------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> ModelConfig:
    """The config of a model folder.

    Raises:
        ValueError: ``config.json`` is missing, is not a JSON object, names an unsupported architecture, or lacks a key
            or has an invalid value for one; names the file and the key.
    """
    values = _read(folder)
    try:
        architecture_of(values)
    except ValueError as error:
        raise SettingsError(f"{folder}: {error}") from None
    return _parse_file(values, folder)


def read_frozen(folder: Path) -> ModelConfig:
    """The config of a frozen model: of a reward model that of its base model, with ``reward_labels``.

    A reward model has no separate LM head, whatever its ``tie_word_embeddings`` says.

    Raises:
        ValueError: as for :func:`read_config`.
    """
    values, labels = _read(folder), 0
    base = REWARD_MODELS.get(_architecture_name(values))
    if base is not None:
        labels = int(values.get("num_labels") or len(values.get("id2label") or ()) or REWARD_LABELS)
        values |= {"architectures": [base], "tie_word_embeddings": True}
    try:
        architecture_of(values)
    except ValueError as error:
        raise SettingsError(f"{folder}: {error}; as reward models also {', '.join(REWARD_MODELS)}") from None
    return _parse_file(values, folder, labels)


def find_config(model: str) -> ModelConfig | None:
    """The config of a model folder of any architecture; None if ``model`` is not a folder with ``config.json``.

    Raises:
        ValueError: the file is not a JSON object, or lacks a key or has an invalid value for one and the architecture
            is supported; names the file and the key.
    """
    folder = Path(model)
    if not (folder / "config.json").is_file():
        return None
    values = _read(folder)
    if _architecture_name(values) in ARCHITECTURES:
        return _parse_file(values, folder)
    return _build(UNSUPPORTED, values, folder)


def parse_config(values: Json, folder: Path = Path(), reward_labels: int = 0) -> ModelConfig:
    """Check the content of a ``config.json`` and fill in its optional keys.

    Raises:
        ValueError: the architecture is not supported, or a key is missing or has an invalid value. In the latter case
            the message continues the sentence "config.json ...".
    """
    architecture = architecture_of(values)
    _check_keys(architecture, values)
    return _build(architecture, values, folder, reward_labels)


def architecture_of(values: Json) -> Architecture:
    """The family of a model. Raises ValueError if it is not supported."""
    name = _architecture_name(values)
    if name not in ARCHITECTURES:
        raise SettingsError(f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError if the file holds anything else."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not JSON ({error}): copy or download it again") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{path} holds {type(value).__name__} {str(value)[:60]!r}, not a JSON object")
    return value


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        adapter = (folder / "adapter_config.json").is_file()
        reason = "it is an adapter: merge it into its base model" if adapter else "it has no config.json"
        raise SettingsError(f"{folder} is not a model folder: {reason}")
    return read_object(path)


def _parse_file(values: Json, folder: Path, reward_labels: int = 0) -> ModelConfig:
    try:
        return parse_config(values, folder, reward_labels)
    except ValueError as error:
        raise SettingsError(f"{folder / 'config.json'} {error}") from None


def _architecture_name(values: Json) -> str:
    names = values.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "none"


def _build(architecture: Architecture, values: Json, folder: Path, reward_labels: int = 0) -> ModelConfig:
    def size(key: str) -> int:
        value = values.get(key)
        return value if type(value) is int else 0

    layers, heads = size("num_hidden_layers"), size("num_attention_heads")
    experts = architecture.num_experts(values)
    latent = architecture.latent_attention
    return ModelConfig(
        folder=folder,
        architecture=architecture,
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads") or heads,
        head_dim=size("head_dim") or size("hidden_size") // (heads or 1),
        max_position_embeddings=size("max_position_embeddings"),
        rms_norm_eps=values.get("rms_norm_eps", 0.0),
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
        rope_parameters=_rope_parameters(values),
        dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch."),
        num_experts=experts,
        sparse_layers=tuple(layer for layer in range(layers) if experts and architecture.is_sparse(values, layer)),
        num_experts_per_tok=size("num_experts_per_tok"),
        moe_intermediate_size=size("moe_intermediate_size"),
        n_shared_experts=size("n_shared_experts") if architecture.shared_experts else 0,
        norm_topk_prob=bool(values.get("norm_topk_prob")),
        n_group=size("n_group") if latent else 0,
        topk_group=size("topk_group") if latent else 0,
        routed_scaling_factor=values["routed_scaling_factor"] if latent else 1.0,
        q_lora_rank=size("q_lora_rank") if latent else 0,
        kv_lora_rank=size("kv_lora_rank") if latent else 0,
        qk_nope_head_dim=size("qk_nope_head_dim") if latent else 0,
        qk_rope_head_dim=size("qk_rope_head_dim") if latent else 0,
        v_head_dim=size("v_head_dim") if latent else 0,
        reward_labels=reward_labels,
        raw=values,
    )


def _rope_parameters(values: Json) -> dict[str, Any]:
    """Read the form of transformers 5, and that of transformers 4: ``rope_theta`` and ``rope_scaling``."""
    stated = (values.get("rope_scaling"), values.get("rope_parameters"))
    rope = {key: value for part in stated if isinstance(part, dict) for key, value in part.items()}
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_theta"] = rope.get("rope_theta") or values.get("rope_theta") or 10_000.0
    return rope


# -- checks of the keys that a model is built from --------------------------------------------------------------------


def _check_keys(architecture: Architecture, values: Json) -> None:
    lacking = [key for key in _needed(architecture) if key not in values]
    if lacking:
        raise SettingsError(f"lacks {', '.join(lacking)}, without which a {architecture.label} cannot be built")
    for key in architecture.sizes:
        _check_size(key, values[key])
    for key in (*OPTIONAL_SIZES, *EXPERT_COUNTS):
        if values.get(key) is not None:
            _check_size(key, values[key])
    if architecture.windowed and values.get("sliding_window") is not None:
        _check_size("sliding_window", values["sliding_window"])
    eps = values["rms_norm_eps"]
    if not _is_number(eps) or not 0 < eps < 1:
        raise SettingsError(f"has rms_norm_eps {eps!r}, which must be a number above 0 and below 1")
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(values.get(key) or {}, dict):
            raise SettingsError(f"has {key} {values[key]!r}, which must be an object or null")
    _check_flags(architecture, values)
    _check_agreement(values)
    for key, kind, items in (("layer_types", str, "words"), ("mlp_only_layers", int, "whole numbers")):
        listed = values.get(key) or []
        if not isinstance(listed, list) or not all(type(value) is kind for value in listed):
            raise SettingsError(f"has {key} {values[key]!r}, which must be a list of {items} or null")
    types, layers = values.get("layer_types"), values["num_hidden_layers"]
    if types is not None and len(types or ()) != layers:
        raise SettingsError(f"has {len(types or ())} layer_types for {layers} num_hidden_layers: correct one of them")
    _check_padding(values)
    if architecture.latent_attention:
        _check_dense_layers(values)
    _check_divisions(architecture, values)


def _needed(architecture: Architecture) -> tuple[str, ...]:
    latent = ("first_k_dense_replace", "routed_scaling_factor") if architecture.latent_attention else ()
    return (*architecture.sizes, *architecture.flags, *latent, "rms_norm_eps")


def _check_flags(architecture: Architecture, values: Json) -> None:
    """Raise ValueError for a flag that is not a boolean, and for a dtype that weights cannot have."""
    for key in FLAGS:
        value = values.get(key)
        if not isinstance(value, bool) and (value is not None or key in architecture.flags):
            raise SettingsError(f"has {key} {value!r}, which must be true or false")
    for key in ("dtype", "torch_dtype"):
        value = values.get(key)
        if value is not None and (not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES):
            raise SettingsError(f"has {key} {value!r}, which must be one of {', '.join(DTYPES)}, or null")


def _check_padding(values: Json) -> None:
    """Raise ValueError for a padding token without an embedding, with which transformers does not build the model."""
    value, vocabulary = values.get("pad_token_id"), values["vocab_size"]
    if value is not None and (type(value) is not int or not -vocabulary <= value < vocabulary):
        raise SettingsError(
            f"has pad_token_id {value!r}, which is not one of the model's {vocabulary} ids: give one of them, or null"
        )


def _check_agreement(values: Json) -> None:
    """Raise ValueError for two keys of one meaning with different values: transformers, SGLang and their versions
    differ in which one they read."""
    dtypes = [str(values[key]).removeprefix("torch.") if values.get(key) else None for key in ("dtype", "torch_dtype")]
    scaling, rope = values.get("rope_scaling") or None, values.get("rope_parameters") or None
    stated = [
        ("dtype", dtypes[0], "torch_dtype", dtypes[1]),
        ("num_experts", values.get("num_experts"), "num_local_experts", values.get("num_local_experts")),
    ]
    if scaling and rope and _whole_rope(scaling, values) != _whole_rope(rope, values):
        stated.append(("rope_scaling", scaling, "rope_parameters", rope))
    for name, of in (("rope_scaling", scaling or {}), ("rope_parameters", rope or {})):
        keys = ("rope_theta", ORIGINAL_LENGTH)
        stated += [(key, values.get(key), f"{name}.{key}", of.get(key)) for key in keys]
    for key, value, other, its_value in stated:
        if value is not None and its_value is not None and value != its_value:
            raise SettingsError(
                f"has {key} {value!r:.80} and {other} {its_value!r:.80}, which contradict each other: remove the wrong "
                "one"
            )


def _whole_rope(rope: Json, values: Json) -> Json:
    """Rotary embeddings as transformers completes them, in the spelling of transformers 5."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    own = {key: value for key, value in rope.items() if key != "type"}
    return {"rope_theta": values.get("rope_theta"), **own, "rope_type": kind}


def _check_dense_layers(values: Json) -> None:
    """Check the keys of a DeepSeek-V3 that say which layers have experts and how their outputs are scaled."""
    dense, scale = values["first_k_dense_replace"], values["routed_scaling_factor"]
    if type(dense) is not int or not 0 <= dense <= MAX_COUNT:
        raise SettingsError(f"has first_k_dense_replace {dense!r}, which must be a whole number from 0 to {MAX_COUNT}")
    if not _is_number(scale) or not 0 < scale <= MAX_NUMBER:
        raise SettingsError(f"has routed_scaling_factor {scale!r}, which must be a positive number")
    # SGLang gives experts to every moe_layer_freq-th layer, Hugging Face's model to every layer.
    frequency = values.get("moe_layer_freq", 1)
    if type(frequency) is not int or frequency != 1:
        raise SettingsError(f"has moe_layer_freq {frequency!r}; only 1 is supported")


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a JSON value is a number, NaN and Infinity included."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_size(key: str, value: Any) -> None:
    most = MAX_COUNT if key in ("num_hidden_layers", *EXPERT_COUNTS) else MAX_SIZE
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise SettingsError(f"has {key} {value!r}, which must be a positive integer, at most {most}")


def _check_divisions(architecture: Architecture, values: Json) -> None:
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    if not architecture.latent_attention:
        if heads % kv_heads:
            raise SettingsError(f"has {heads} num_attention_heads, which {kv_heads} num_key_value_heads do not divide")
        head_dim = values.get("head_dim") or values["hidden_size"] // heads
        if head_dim % 2:
            raise SettingsError(
                f"has heads of {head_dim} elements, which must be an even number: rotary embeddings rotate pairs"
            )
    experts = architecture.num_experts(values)
    if experts and not values["num_experts_per_tok"] <= experts:
        raise SettingsError(f"has num_experts_per_tok {values['num_experts_per_tok']}, but {experts} experts")


# -- unsupported features ---------------------------------------------------------------------------------------------


def check_features(config: ModelConfig) -> None:
    """Check that the trainer builds the model that transformers would build from this config for inference, and SGLang
    the same one.

    This is a list of features that one of them would follow and another not, for the transformers and SGLang of the
    locks. A key that is not in it is ignored, as transformers' classes ignore keys that they do not read: there are too
    many harmless ones to refuse the unknown. So a new version of either that reads another key needs an entry here.
    Keys that only change training are no features of the model: ``attention_dropout`` is ignored,
    ``output_router_logits`` refused. The shapes of the weights are checked by
    :func:`~monarch_rl.model.tensors.check_weights`, and a run measures how far trainer and engine differ
    (``trainer/mismatch_k3_on_policy``), as does ``tools/parity.py`` for a folder.

    Raises:
        ValueError: it cannot, or does not; names the key of ``config.json``.
    """
    architecture, raw = config.architecture, config.raw
    _check_projections(architecture, raw)
    _check_window(config)
    _check_sglang_only(config)
    kind = raw.get("model_type", architecture.model_type)
    if kind != architecture.model_type:
        raise SettingsError(
            f"model_type {kind!r} contradicts architectures {architecture.name}: transformers follows the former, "
            f"SGLang the latter. Set model_type to {architecture.model_type}, if that is what the weights are"
        )
    if not raw.get("is_causal", True):
        raise SettingsError(
            f"is_causal {raw['is_causal']} is not supported: transformers would attend to later tokens, trainer and "
            "SGLang would not. Take a model that generates text"
        )
    if nested := [key for key in NESTED if key in raw]:
        raise SettingsError(
            f"{nested[0]} is not supported: transformers and SGLang take the keys in it for the model's own. Remove it "
            "from config.json, or take a model for text alone"
        )
    if any(raw.get(key) is not None for key in ("quantization_config", "compression_config")):
        raise SettingsError(
            "quantised weights are not supported: convert the folder to bfloat16 or float32 first, and remove "
            "quantization_config and compression_config"
        )
    if raw.get("shared_expert_intermediate_size") or (raw.get("n_shared_experts") and not architecture.shared_experts):
        raise SettingsError(f"shared experts are not supported: {architecture.name} has none")
    if config.sparse_layers and raw.get("output_router_logits"):
        raise SettingsError(
            "output_router_logits asks for Hugging Face's auxiliary load-balancing loss in training, which is not "
            "supported: set it to false in config.json, as Qwen's models do"
        )
    if architecture.latent_attention:
        _check_router(config)
        _check_latent_rope(config)
    else:
        _check_rope(config)


def _check_projections(architecture: Architecture, raw: Json) -> None:
    # A Qwen2 always has biases: neither transformers nor SGLang reads its attention_bias.
    if raw.get("mlp_bias") or (raw.get("attention_bias") and not architecture.biased_heads):
        key = "mlp_bias" if raw.get("mlp_bias") else "attention_bias"
        raise SettingsError(
            f"{key} is true, and biases in attention or MLP projections are not supported, except those of queries, "
            "keys and values in a Qwen2: take a model without them"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise SettingsError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu': take a model with 'silu'")


def _check_window(config: ModelConfig) -> None:
    """Raise ValueError for attention to only some earlier tokens: the trainer and SGLang attend to all of them."""
    raw = config.raw
    if raw.get("use_sliding_window"):
        raise SettingsError("sliding-window attention is not supported: use_sliding_window must be false")
    if other := set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise SettingsError(f"layer_types {', '.join(sorted(map(str, other)))} are not supported, only full_attention")
    window, length = raw.get("sliding_window", UNSET_WINDOW), config.max_position_embeddings
    if config.architecture.windowed and window is not None and window < length:
        stated = window if "sliding_window" in raw else f"{window}, transformers' default for an absent key,"
        raise SettingsError(
            f"sliding_window {stated} is below max_position_embeddings {length}: sliding-window attention is not "
            f"supported. Set max_position_embeddings to {window}, within which the model attends to all tokens, or "
            "take a model whose sliding_window is null"
        )


def _check_sglang_only(config: ModelConfig) -> None:
    values = {**config.rope_parameters, **config.raw}
    found = [key for key in SGLANG_ONLY if values.get(key)]
    if not values.get("rope_is_neox_style", True):
        found.append("rope_is_neox_style")
    if found:
        raise SettingsError(
            f"{found[0]} {values[found[0]]!r:.80} is not supported: SGLang would follow it, but the trainer, like "
            "transformers, would not. Remove it from config.json"
        )


def _check_rope(config: ModelConfig) -> None:
    rope = config.rope_parameters
    kind = rope["rope_type"]
    _check_rope_numbers(rope, ("rope_theta", *(LLAMA3_ROPE if kind == "llama3" else ())))
    if kind not in ("default", "llama3"):
        raise SettingsError(f"rotary scaling {kind!r} is not supported, only 'default' and 'llama3'")
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise SettingsError(
            f"rotary embeddings have high_freq_factor {rope['high_freq_factor']}, which must be above low_freq_factor "
            f"{rope['low_freq_factor']}: the frequencies between would be infinite"
        )
    if (config.raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise SettingsError(
            "partial_rotary_factor is not supported: rotary embeddings rotate whole heads. Take a model without it"
        )


def _check_rope_numbers(rope: Mapping[str, Any], keys: tuple[str, ...]) -> None:
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


def _check_router(config: ModelConfig) -> None:
    raw = config.raw
    if raw.get("scoring_func", "sigmoid") != "sigmoid" or raw.get("topk_method", "noaux_tc") != "noaux_tc":
        raise SettingsError(
            "only DeepSeek-V3's own router is supported: scoring_func sigmoid and topk_method noaux_tc, got "
            f"{raw.get('scoring_func')} and {raw.get('topk_method')}"
        )
    if config.rms_norm_eps != NORM_EPS:
        raise SettingsError(f"rms_norm_eps {config.rms_norm_eps} is not supported for DeepSeek-V3, only {NORM_EPS}")


def _check_latent_rope(config: ModelConfig) -> None:
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if not config.raw.get("rope_interleave", True):
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
