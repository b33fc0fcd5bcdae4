"""The tensors of a model folder: those that ``config.json`` requires, and those that the file headers list.

Only headers are read: a few MB even for a 60 GB model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from monarch_rl.errors import SettingsError
from monarch_rl.model.config import ModelConfig, check_features, read_object
from monarch_rl.model.folder import MISTRALS_OWN

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
"""Shapes by Hugging Face tensor name."""

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the dtypes in which weights may be saved, by safetensors name."""
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes' names in ``config.json`` by those of safetensors."""
COMPARED_BYTES = 16 << 20
"""Bytes of two tensors that are compared at a time."""
LISTED = 3
"""How many tensors an error message lists."""


def check_weights(config: ModelConfig) -> None:
    """Check that a model's folder holds every tensor of the model exactly once, complete and in its shape.

    Raises:
        ValueError: a tensor is missing, duplicated, unknown, damaged or misshapen, or the LM head is not the embeddings
            that it is tied to; names the file and the tensor.
    """
    folder, expected = config.folder, expected_tensors(config)
    indexed = _indexed_files(folder)
    found: dict[str, tuple[Path, Shape]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path)
        if path.name.startswith(MISTRALS_OWN) and not header.keys() & expected.keys():
            continue
        for name, shape in header.items():
            if name in found:
                raise SettingsError(
                    f"{name} is in {found[name][0]} and in {path}: keep the files that {INDEX} lists, and move the "
                    "others away"
                )
            found[name] = path, shape
    if unlisted := sorted({path for path, _ in found.values() if indexed and path.name not in indexed}):
        raise SettingsError(
            f"{unlisted[0]} is not among the files that {INDEX} lists, and transformers and SGLang read only those: "
            "move it away, or write the index anew"
        )
    if missing := [name for name in expected if name not in found]:
        raise SettingsError(
            f"{folder} lacks {_some(missing)}, of the {len(expected)} tensors that its config.json requires: a file is "
            "missing, or config.json belongs to another model"
        )
    for name, (path, shape) in found.items():
        if name in expected and shape != expected[name]:
            raise SettingsError(
                f"{path}: {name} has shape {list(shape)}, but config.json requires {list(expected[name])}"
            )
    if unknown := [name for name in found if name not in expected and not _is_ignored(name, config)]:
        raise SettingsError(
            f"{found[unknown[0]][0]} holds {_some(unknown)}, which a {config.architecture.name} with this "
            "config.json does not have: ignoring them would load a different model"
        )
    if config.tie_word_embeddings and not config.reward_labels and HEAD in found:
        head, embeddings = found[HEAD][0], found[EMBEDDINGS][0]
        if not _same_bytes(head, HEAD, embeddings, EMBEDDINGS):
            raise SettingsError(
                f"{head}: {HEAD} differs from {EMBEDDINGS}, but config.json has tie_word_embeddings true: SGLang "
                "would use the embeddings as LM head, and transformers would not. Set tie_word_embeddings to false, or "
                "remove the tensor"
            )


def expected_tensors(config: ModelConfig) -> Shapes:
    """The shapes of all tensors of a model, by the names that they have in a model folder."""
    vocabulary, width = config.vocab_size, config.hidden_size
    tensors: Shapes = {EMBEDDINGS: (vocabulary, width), "model.norm.weight": (width,)}
    if not config.tie_word_embeddings:
        tensors[HEAD] = (vocabulary, width)
    if config.reward_labels:
        tensors["score.weight"] = (config.reward_labels, width)
    latent, sparse = config.architecture.latent_attention, set(config.sparse_layers)
    for layer in range(config.num_hidden_layers):
        parts = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            **(_latent_attention(config) if latent else _grouped_query_attention(config)),
            **(_experts(config) if layer in sparse else _mlp("mlp", width, config.intermediate_size)),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
        if latent and layer in sparse:
            tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = (config.num_experts,)
        if config.architecture.biased_heads:
            biased = ((name, parts[f"self_attn.{name}"][0]) for name in ("q_proj", "k_proj", "v_proj"))
            tensors |= {f"model.layers.{layer}.self_attn.{name}.bias": (rows,) for name, rows in biased}
    return tensors


def _grouped_query_attention(config: ModelConfig) -> Shapes:
    width, head = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    projections = {
        "self_attn.q_proj": (heads * head, width),
        "self_attn.k_proj": (kv_heads * head, width),
        "self_attn.v_proj": (kv_heads * head, width),
        "self_attn.o_proj": (width, heads * head),
    }
    normed = config.architecture.normed_heads
    return projections | ({"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)} if normed else {})


def _latent_attention(config: ModelConfig) -> Shapes:
    width, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    query = heads * (nope + rope)
    tensors: Shapes = {
        "self_attn.kv_a_proj_with_mqa": (latent + rope, width),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (heads * (nope + value), latent),
        "self_attn.o_proj": (width, heads * value),
    }
    if rank := config.q_lora_rank:
        return tensors | {
            "self_attn.q_a_proj": (rank, width),
            "self_attn.q_a_layernorm": (rank,),
            "self_attn.q_b_proj": (query, rank),
        }
    return tensors | {"self_attn.q_proj": (query, width)}


def _mlp(name: str, width: int, hidden: int) -> Shapes:
    return {
        f"{name}.gate_proj": (hidden, width),
        f"{name}.up_proj": (hidden, width),
        f"{name}.down_proj": (width, hidden),
    }


def _experts(config: ModelConfig) -> Shapes:
    width, hidden, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    tensors: Shapes = {"mlp.gate": (experts, width)}
    for expert in range(experts):
        tensors |= _mlp(f"mlp.experts.{expert}", width, hidden)
    if config.architecture.shared_experts:
        tensors |= _mlp("mlp.shared_experts", width, hidden * config.n_shared_experts)
    return tensors


def model_bytes(config: ModelConfig) -> int:
    """Bytes of a model's weight files, computed from its config."""
    nbytes = {name: ITEM_BYTES[dtype] for dtype, name in DTYPE_NAMES.items()}[config.dtype]
    return nbytes * sum(map(math.prod, expected_tensors(config).values()))


def saved_dtype(config: ModelConfig) -> str:
    """Dtype in which a model is saved again, such as ``bfloat16``: the one that its config states, or else that of its
    embeddings, which transformers takes then."""
    if config.raw.get("dtype") or config.raw.get("torch_dtype"):
        return config.dtype
    for path in config.folder.glob("*.safetensors"):
        if EMBEDDINGS in read_header(path):
            with path.open("rb") as file:
                return DTYPE_NAMES[_seek(file, EMBEDDINGS)[0]]
    return config.dtype


def read_header(path: Path) -> Shapes:
    """The shapes of the tensors in a safetensors file, read from its header.

    The file starts with 8 bytes that hold the header's length; the header (JSON) and the tensors follow.

    Raises:
        ValueError: the file is not a safetensors file, its size is not what its header requires, or its elements are
            not floating-point numbers of 16 bits or more.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise SettingsError("its header is longer than the file")
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(map(_count, entry["shape"])) for name, entry in tensors.items()}
        places = {name: (_count(e["data_offsets"][0]), _count(e["data_offsets"][1])) for name, e in tensors.items()}
        dtypes = {name: str(entry["dtype"]) for name, entry in tensors.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise SettingsError(f"{path} is not a safetensors file ({error!r}): copy or download it again") from error
    end = max((place[1] for place in places.values()), default=0)
    if size != 8 + length + end:
        last = max(places, key=lambda name: places[name][1], default="nothing")
        kind = "truncated" if size < 8 + length + end else "damaged"
        raise SettingsError(
            f"{path} is {kind}: it has {size} bytes, but its header, whose last tensor is {last}, requires "
            f"{8 + length + end}. Copy or download it again"
        )
    for name, dtype in dtypes.items():
        if dtype not in ITEM_BYTES:
            raise SettingsError(f"{path}: {name} is saved as {dtype}; only {', '.join(ITEM_BYTES)} are supported")
        span = places[name][1] - places[name][0]
        if span != math.prod(shapes[name]) * ITEM_BYTES[dtype]:
            raise SettingsError(
                f"{path}: {name} has {span} bytes, which do not fit its shape {list(shapes[name])}: copy or download "
                "the file again"
            )
    _check_places(path, places)
    return shapes


def _count(value: object) -> int:
    """A size or an offset from a header. Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise SettingsError(f"{value!r} is not a size or an offset")
    return value


def _check_places(path: Path, places: dict[str, tuple[int, int]]) -> None:
    """Raise ValueError if tensors overlap or leave a gap, as safetensors does (its README, "Format")."""
    before, position = "the header", 0
    for name, (start, end) in sorted(places.items(), key=lambda item: item[1]):
        if start != position:
            between = "overlaps" if start < position else "leaves a gap after"
            raise SettingsError(f"{path}: {name} {between} {before}: copy or download it again")
        before, position = name, end


def _same_bytes(path: Path, name: str, other: Path, its_name: str) -> bool:
    """Whether two tensors, whose headers are valid, have the same dtype and elements. Takes a second per GB."""
    with path.open("rb") as one, other.open("rb") as two:
        (dtype, nbytes), (its_dtype, its_nbytes) = _seek(one, name), _seek(two, its_name)
        if (dtype, nbytes) != (its_dtype, its_nbytes):
            return False
        sizes = [COMPARED_BYTES] * (nbytes // COMPARED_BYTES) + [nbytes % COMPARED_BYTES]
        return all(one.read(size) == two.read(size) for size in sizes)


def _seek(file: BinaryIO, name: str) -> tuple[str, int]:
    """Move to the first byte of a tensor in an open safetensors file; returns its dtype and bytes."""
    length = int.from_bytes(file.read(8), "little")
    entry = json.loads(file.read(length))[name]
    start, end = entry["data_offsets"]
    file.seek(8 + length + start)
    return entry["dtype"], end - start


def _indexed_files(folder: Path) -> set[str]:
    """The files that the index lists; empty if there is none. Raises ValueError if one of them does not exist."""
    path = folder / INDEX
    if not path.is_file():
        return set()
    named = read_object(path).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise SettingsError(f"{path} has no weight_map: copy or download it again")
    for name, file in named.items():
        if not isinstance(file, str) or not (folder / file).is_file():
            count = sum(other == file for other in named.values())
            raise SettingsError(
                f"{folder} lacks {file}, which {path.name} lists for {name} and {count - 1} other tensors: copy or "
                "download it"
            )
    return set(named.values())


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether to ignore a tensor that the model does not need. transformers does not load these, either."""
    if name == HEAD or name.endswith(".rotary_emb.inv_freq"):
        return True
    # DeepSeek-V3's layer for multi-token prediction follows the last decoder layer.
    following = f"model.layers.{config.num_hidden_layers}."
    return config.architecture.latent_attention and name.startswith(following)


def _some(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def projections(tensors: Shapes, target: str) -> Iterator[tuple[str, Shape]]:
    """Name and shape of each weight of a projection, such as ``q_proj``, over all layers and experts."""
    return ((name, shape) for name, shape in tensors.items() if name.endswith(f".{target}.weight"))


# -- checking a model folder, before anything is spawned --------------------------------------------------------------


_QUANTISED = "SGLang takes the weights for quantised ones, which are not supported: take the model's folder without it"
FOREIGN_FILES = {
    "adapter_config.json": "transformers would load this adapter and its base model instead of the folder's weights: "
    "merge the adapter into a folder of its own, or move its files away",
    "hf_quant_config.json": _QUANTISED,
    "quant_model_description.json": _QUANTISED,
}
"""Files by which transformers or SGLang would load something else than the weights, and what to do about them."""


def check_folder(config: ModelConfig) -> None:
    """Check a model's config, the headers of its weight files, and that no other file changes what they mean. Takes a
    few seconds at most.

    The trainer checks that the weights are finite when it loads them.

    Raises:
        ValueError: the folder cannot be loaded, or would load as a different model; names the file, and the key or the
            tensor in it.
    """
    try:
        check_features(config)
    except ValueError as error:
        raise SettingsError(f"{config.folder / 'config.json'}: {error}") from None
    if "model_type" not in config.raw:
        kind = config.architecture.model_type
        raise SettingsError(
            f"{config.folder / 'config.json'} has no model_type, without which neither transformers nor SGLang loads "
            f'the folder: add "model_type": "{kind}"'
        )
    for file, problem in FOREIGN_FILES.items():
        if (config.folder / file).is_file():
            raise SettingsError(f"{config.folder / file}: {problem}")
    check_weights(config)
