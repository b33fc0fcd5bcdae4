"""Model folders with one fault each: each is refused at once, with the file and the fault in the message."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from monarch_rl.errors import SettingsError
from monarch_rl.generator.settings import (
    GeneratorSettings,
    check_context,
    check_served,
    engine_limits,
)
from monarch_rl.model.chat import ChatTemplate
from monarch_rl.model.config import ModelConfig, find_config, parse_config, read_config
from monarch_rl.model.folder import resolve_model
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.model.tensors import check_folder
from monarch_rl.model.tokens import FolderTokenizer
from monarch_rl.pipeline.memory import check_cache, cpu_memory
from monarch_rl.runtime.machine_memory import check_free
from monarch_rl.trainer.settings import TrainerSettings, check_experts, check_lora
from tests.model.test_tensors import MODELS, SIZES
from tools.make_tiny_model import Settings as TinyModel
from tools.make_tiny_model import write_random_model

WEIGHTS, HEAD = "model.safetensors", "lm_head.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def families(good: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model of every family, by its name in transformers."""
    root, made = tmp_path_factory.mktemp("families"), {}
    for kind, change in MODELS:
        made[kind] = root / kind
        shutil.rmtree(made[kind], ignore_errors=True)
        yarn = {"rope_parameters": YARN} if kind == "deepseek_v3" else {}
        shape = SIZES | change | yarn | {"vocab_size": 98}
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).save_pretrained(made[kind])
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(good / name, made[kind] / name)
    needed = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    config(**needed)(made["deepseek_v3"])
    return made


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "good"
    write_random_model(folder, TinyModel(hidden_size=64, layers=2))
    return folder


def check_model(folder: Path) -> None:
    """The checks of a model folder before a run spawns anything."""
    config = resolve_model(str(folder))
    check_folder(config)
    FolderTokenizer(config)


def check_use(values: ModelConfig) -> None:
    """The checks of a run for a model with a valid folder."""
    settings = GeneratorSettings()
    check_served(values, settings, on_gpu=False)
    check_cache(values, settings, memory_bytes=2**60)
    check_free(cpu_memory(values, settings, FULL_TRAINING), free_bytes=2**60)
    check_context(values, settings)
    engine_limits(values, settings, on_gpu=False)
    check_experts(values, TrainerSettings(ranks=1))
    check_lora(values, LoraSettings(rank=1))


def edited(file: str, **change: Any) -> Callable[[Path], object]:
    """Change keys of a JSON file; None removes a key."""

    def edit(folder: Path) -> None:
        values = json.loads((folder / file).read_text()) | change
        (folder / file).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return edit


def config(**change: Any) -> Callable[[Path], object]:
    return edited("config.json", **change)


def written(file: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(text)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change the tensors of the weights' file."""

    def edit(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, {"format": "pt"})

    return edit


def truncated(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])


def truncated_within_the_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:50])


def sharded(folder: Path) -> None:
    """Two shards and their index."""
    found = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names, files = sorted(found), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    parts = dict(zip(files, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True))
    for file, part in parts.items():
        save_file({name: found[name] for name in part}, folder / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def a_shard_is_missing(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def a_shard_is_missing_without_an_index(folder: Path) -> None:
    a_shard_is_missing(folder)
    (folder / "model.safetensors.index.json").unlink()


def both_whole_and_sharded(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    sharded(folder)
    (folder / WEIGHTS).write_bytes(whole)


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the entries of the weights' file, by their tensors' names."""

    def edit(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).replace("Infinity", "1e400").encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return edit


def over_the_same_bytes(entries: dict[str, Any]) -> None:
    """Two tensors of one shape share the same bytes; the length of the file is unchanged."""
    entries[K_PROJ]["data_offsets"] = entries[K_PROJ.replace("layers.1", "layers.0")]["data_offsets"]


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with another last element."""
    other = tensor.clone()
    other[-1, -1] += 1
    return other


def unlisted(folder: Path) -> None:
    sharded(folder)
    save_file({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}, folder / "more.safetensors")


def unlisted_shard(folder: Path) -> None:
    sharded(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    listed = {name: file for name, file in index["weight_map"].items() if "00001" in file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def only_an_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def larger_vocabulary(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["é"] = len(tokenizer["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


YARN: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22ea\nsize 12345\n"
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
UNORDERED = {"factor": 2.0, "original_max_position_embeddings": 16, "high_freq_factor": 1.0}
FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "config is a list": (written("config.json", "[]"), ["config.json", "list", "object"]),
    "config is truncated": (written("config.json", '{"architectures": ['), ["config.json is not JSON"]),
    "architecture is a word": (config(architectures="Qwen3ForCausalLM"), ["architecture none "]),
    "another architecture": (config(architectures=["GPT2LMHeadModel"]), ["architecture GPT2LMHeadModel"]),
    "no hidden_size": (config(hidden_size=None), ["config.json lacks hidden_size"]),
    "no head_dim": (config(head_dim=None), ["config.json lacks head_dim"]),
    "no eps": (config(rms_norm_eps=None), ["config.json lacks rms_norm_eps"]),
    "eps is a word": (config(rms_norm_eps="small"), ["config.json has rms_norm_eps 'small'"]),
    "size is a word": (config(num_hidden_layers="2"), ["num_hidden_layers '2'", "positive integer"]),
    "size is nothing": (config(vocab_size=0), ["vocab_size 0", "positive integer"]),
    "heads": (config(num_key_value_heads=3), ["4 num_attention_heads", "3 num_key_value_heads"]),
    "biases": (config(attention_bias=True), ["biases in attention"]),
    "activation": (config(hidden_act="gelu"), ["hidden_act 'gelu'"]),
    "sliding window": (config(use_sliding_window=True), ["sliding-window"]),
    "layer types": (config(layer_types=["sliding_attention"] * 2), ["layer_types sliding_attention"]),
    "rope kind": (config(rope_parameters={"rope_type": "linear", "factor": 2.0}), ["rotary scaling 'linear'"]),
    "rope lacks": (config(rope_parameters=ROPE), ["llama3", "factor, at most 1e+12, got None"]),
    "rope factors": (config(rope_parameters=ROPE | UNORDERED), ["high_freq_factor 1.0", "low_freq_factor 1.0"]),
    "rope is a word": (config(rope_parameters="default"), ["rope_parameters 'default'", "object"]),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), ["quantised"]),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ["no *.safetensors file"]),
    "truncated": (truncated, [WEIGHTS, "truncated"]),
    "truncated within the header": (truncated_within_the_header, [WEIGHTS, "header"]),
    "empty": (written(WEIGHTS, ""), [WEIGHTS, "is not a safetensors file"]),
    "no safetensors": (written(WEIGHTS, "a" * 99), [WEIGHTS, "is not a safetensors file"]),
    "weights are elsewhere": (written(WEIGHTS, LFS_POINTER), [WEIGHTS, "git lfs pull"]),
    "tokenizer is elsewhere": (written("tokenizer.json", LFS_POINTER), ["tokenizer.json", "git lfs pull"]),
    "template is elsewhere": (
        lambda folder: (folder / "chat_template.jinja").symlink_to("../../blobs/1"),
        ["chat_template.jinja cannot be read"],
    ),
    "shard missing": (a_shard_is_missing, ["model-00002-of-00002.safetensors", "index.json lists", "other tensors"]),
    "shard missing, no index": (a_shard_is_missing_without_an_index, ["lacks model.", "a file is missing"]),
    "twice": (both_whole_and_sharded, [WEIGHTS, "model-0000", "move the others away"]),
    "tensor missing": (tensors(lambda found: found.pop(K_PROJ)), [f"lacks {K_PROJ}"]),
    "wrong shape": (
        tensors(lambda found: found.update({K_PROJ: torch.zeros(64, 32)})),
        [WEIGHTS, K_PROJ, "[64, 32]", "[64, 64]"],
    ),
    "biases in the file": (
        tensors(lambda found: found.update({K_PROJ.replace("weight", "bias"): torch.zeros(64)})),
        [WEIGHTS, K_PROJ.replace("weight", "bias"), "does not have"],
    ),
    "more layers in the file": (
        config(num_hidden_layers=1, layer_types=None),
        [WEIGHTS, "model.layers.1.", "does not have"],
    ),
    "integers": (
        tensors(lambda found: found.update({K_PROJ: torch.zeros(64, 64, dtype=torch.int8)})),
        [WEIGHTS, K_PROJ, "saved as I8"],
    ),
    "offset beyond all numbers": (
        header(lambda entries: entries[K_PROJ].update(data_offsets=[0, math.inf])),
        [WEIGHTS, "is not a safetensors file", "inf "],
    ),
    "negative shape": (
        header(lambda entries: entries[K_PROJ].update(shape=[-64, -64])),
        [WEIGHTS, "is not a safetensors file", "-64 "],
    ),
    "tensors over the same bytes": (header(over_the_same_bytes), [WEIGHTS, " overlaps ", K_PROJ]),
    "no tokenizer": (without_tokenizer, ["no tokenizer in"]),
    "tokenizer is {}": (written("tokenizer.json", "{}"), ["tokenizer.json is not a tokenizer"]),
    "tokenizer is a list": (written("tokenizer.json", "[1]"), ["tokenizer.json is not a tokenizer"]),
    "tokenizer without embeddings": (larger_vocabulary, ["1 ids for which", "up to 98 ('é')", "vocab_size 98"]),
    "tokenizer's settings": (written("tokenizer_config.json", "{"), ["tokenizer_config.json is not JSON"]),
    "added tokens in a list": (
        edited("tokenizer_config.json", added_tokens_decoder=["x"]),
        ["tokenizer_config.json has added_tokens_decoder", "must be an object"],
    ),
    "added tokens are a word": (
        edited("tokenizer_config.json", added_tokens_decoder="x"),
        ["added_tokens_decoder 'x'"],
    ),
    "added tokens are a number": (
        edited("tokenizer_config.json", added_tokens_decoder=5),
        ["added_tokens_decoder '5'"],
    ),
    "end token": (edited("generation_config.json", eos_token_id=98), ["generation_config.json", "eos_token_id 98"]),
    "end token of the config": (config(eos_token_id=[1, 98]), ["config.json", "eos_token_id 98"]),
    "end token that the tokenizer lacks": (
        edited("tokenizer_config.json", eos_token="<|im_end|>"),
        ["tokenizer_config.json", "'<|im_end|>'", "no embedding"],
    ),
    "special token that the tokenizer lacks": (
        edited("tokenizer_config.json", additional_special_tokens=[{"content": "<tool>"}]),
        ["tokenizer_config.json", "'<tool>'", "no embedding"],
    ),
    "end token of earlier versions that the tokenizer lacks": (
        written("special_tokens_map.json", '{"eos_token": {"content": "<|im_end|>"}}'),
        ["special_tokens_map.json", "'<|im_end|>'", "no embedding"],
    ),
    "added token of earlier versions": (
        written("added_tokens.json", '{"<tool>": 5}'),
        ["added_tokens.json", "'<tool>'", "no embedding"],
    ),
    "special tokens are truncated": (written("special_tokens_map.json", "{"), ["special_tokens_map.json is not JSON"]),
    "added token at an id that is taken": (
        edited("tokenizer_config.json", added_tokens_decoder={"5": {"content": "<five>", "special": True}}),
        ["tokenizer_config.json", "'<five>'", "no embedding"],
    ),
    "another LM head than the tied one": (
        tensors(lambda found: found.update({HEAD: changed(found["model.embed_tokens.weight"])})),
        [WEIGHTS, HEAD, "differs from model.embed_tokens.weight", "tie_word_embeddings"],
    ),
    "file that the index does not list": (unlisted, ["more.safetensors", "index.json lists"]),
    "shard that the index does not list": (unlisted_shard, ["model-00002-of-00002.safetensors", "index.json lists"]),
    "reward head": (tensors(lambda found: found.update({"score.weight": torch.zeros(1, 64)})), ["score.weight"]),
    "value head": (tensors(lambda found: found.update({"v_head.summary.weight": torch.zeros(1, 64)})), ["v_head."]),
    "scales of quantised weights": (
        tensors(lambda found: found.update({f"{K_PROJ}_scale_inv": torch.ones(1, 1)})),
        [f"{K_PROJ}_scale_inv"],
    ),
    "layers for multi-token prediction": (
        tensors(lambda found: found.update({"mtp.norm.weight": torch.ones(64)})),
        ["mtp.norm.weight"],
    ),
    "quantised, compressed": (config(compression_config={"format": "float-quantized"}), ["quantised"]),
    "quantised, without a method": (config(quantization_config={}), ["quantised"]),
    "quantised by ModelOpt": (written("hf_quant_config.json", "{}"), ["hf_quant_config.json", "quantised"]),
    "adapter in the folder": (written("adapter_config.json", "{}"), ["adapter_config.json", "adapter"]),
    "only an adapter": (only_an_adapter, ["is an adapter"]),
    "no model_type": (config(model_type=None), ["no model_type", '"qwen3"']),
    "model_type of another family": (config(model_type="llama"), ["model_type 'llama'", "Qwen3ForCausalLM"]),
    "two dtypes": (config(dtype="float32", torch_dtype="bfloat16"), ["dtype 'float32'", "torch_dtype 'bfloat16'"]),
    "two bases of rotary embeddings": (config(rope_theta=5e5), ["rope_theta 500000.0", "rope_parameters.rope_theta"]),
    "two bases of two rotary embeddings": (
        config(rope_scaling={"rope_type": "default", "rope_theta": 5e5}),
        ["rope_scaling", "rope_parameters", "contradict"],
    ),
    "types of more layers": (config(layer_types=["full_attention"] * 3), ["3 layer_types", "2 num_hidden_layers"]),
    "no types of layers": (config(layer_types=[]), ["0 layer_types"]),
    "padding without an embedding": (config(pad_token_id=98), ["config.json has pad_token_id 98"]),
    "attention to later tokens": (config(is_causal=False), ["is_causal False"]),
    "config of a model for images": (config(text_config={"hidden_size": 64}), ["text_config"]),
    "two rotary embeddings": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        ["rope_scaling", "rope_parameters", "contradict"],
    ),
}


@pytest.mark.parametrize(("break_it", "message_parts"), FAULTS.values(), ids=FAULTS.keys())
def test_a_broken_folder_is_refused_by_name(
    good: Path, tmp_path: Path, break_it: Callable[[Path], object], message_parts: list[str]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(good, folder)
    break_it(folder)
    with pytest.raises(ValueError) as refused:
        check_model(folder)
    message = str(refused.value)
    assert [part for part in (*message_parts, str(folder)) if part not in message] == [], message
    assert "\n" not in message and len(message) < 600, message


def test_a_good_folder_is_accepted_whole_and_in_shards(good: Path, tmp_path: Path) -> None:
    check_model(good)
    folder = tmp_path / "sharded"
    shutil.copytree(good, folder)
    sharded(folder)
    check_model(folder)


@pytest.mark.parametrize("value", [None, "null"], ids=["absent", "null"])
def test_a_llama_without_key_value_heads_has_as_many_as_query_heads(tmp_path: Path, value: str | None) -> None:
    """As in transformers' LlamaConfig."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **shape)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    config(num_key_value_heads=None)(tmp_path)
    if value is not None:
        text = (tmp_path / "config.json").read_text()
        (tmp_path / "config.json").write_text(text.replace("{", '{"num_key_value_heads": null, ', 1))
    found = resolve_model(str(tmp_path))
    assert found.num_key_value_heads == 4
    check_folder(found)
    assert (served := find_config(str(tmp_path))) == found  # as an engine reads it
    check_free(cpu_memory(served, GeneratorSettings(), FULL_TRAINING), free_bytes=2**60)


def test_a_config_of_any_architecture_is_found_in_a_folder(tmp_path: Path) -> None:
    assert find_config("some/hub-name") is None and find_config(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    other = find_config(str(tmp_path))
    assert other is not None and not other.supported and other.sparse_layers == ()
    check_served(other, GeneratorSettings(tp=4), on_gpu=False)
    with pytest.raises(ValueError, match="GPT2LMHeadModel .*Qwen3ForCausalLM"):
        read_config(tmp_path)
    shape = {"architectures": ["GPT2LMHeadModel"], "num_attention_heads": 9, "vocab_size": "unknown"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    other = find_config(str(tmp_path))
    assert other is not None and (other.num_attention_heads, other.vocab_size) == (9, 0)
    with pytest.raises(ValueError, match=r"tp 4 .*\bnum_attention_heads\b"):
        check_served(other, GeneratorSettings(tp=4), on_gpu=False)


@pytest.mark.parametrize("values", [{"architectures": ["GPT2LMHeadModel"]}, {}], ids=["another", "none"])
def test_a_config_of_another_architecture_is_not_parsed(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"architecture (GPT2LMHeadModel|none) .*Qwen3ForCausalLM"):
        parse_config(values)


def test_tensors_that_transformers_ignores_are_accepted(good: Path, tmp_path: Path) -> None:
    """The LM head of a tied model, as in Qwen's folders, and tables of rotary embeddings."""
    folder = tmp_path / "more"
    shutil.copytree(good, folder)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    tensors(lambda found: found.update(table, **{"lm_head.weight": found["model.embed_tokens.weight"].clone()}))(folder)
    check_model(folder)


NULL = "null"
VALUES: list[Any] = [
    None,
    NULL,
    0,
    -1,
    10**20,
    10**400,
    0.5,
    True,
    "nonsense",
    [],
    {},
    {"a": {}},
    [1, "x"],
    [[1]],
    math.inf,
    math.nan,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_any_value_of_any_key_is_refused_by_name_or_accepted(
    families: dict[str, Path], tmp_path: Path, value: object
) -> None:
    """Generated from the configs that transformers writes; None removes the key. Nothing else may be raised."""
    for family, model in families.items():
        folder = tmp_path / family
        shutil.copytree(model, folder)
        refused = 0
        for changed in with_each_key(json.loads((model / "config.json").read_text()), value):
            (folder / "config.json").write_text(json.dumps(changed))
            try:
                check_model(folder)
            except ValueError as error:
                refused += 1
                assert str(folder) in str(error), error
                continue
            with contextlib.suppress(ValueError):
                check_use(read_config(folder))
        assert refused >= 8, family


def with_each_key(values: dict[str, Any], value: object) -> Iterator[dict[str, Any]]:
    """A config with one of its keys changed, or one of its rotary embeddings'."""
    for key, inner in values.items():
        others = {name: other for name, other in values.items() if name != key}
        yield others if value is None else {**others, key: None if value is NULL else value}
        if key == "rope_parameters":
            yield from ({**others, key: rope} for rope in with_each_key(inner, value))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": math.inf}},
            "positive rope_theta, at most 1e+12, got inf",
        ),
        ("llama", {"rope_parameters": {**ROPE, "factor": math.inf}}, "positive factor, at most 1e+12, got inf"),
        (
            "deepseek_v3",
            {"rope_parameters": {**YARN, "rope_theta": math.inf}},
            "positive rope_theta, at most 1e+12, got inf",
        ),
        ("deepseek_v3", {"rope_parameters": {**YARN, "factor": math.inf}}, "positive factor, at most 1e+12, got inf"),
        (
            "deepseek_v3",
            {"rope_parameters": {**YARN, "original_max_position_embeddings": math.inf}},
            "positive original_max_position_embeddings, at most 1e+12, got inf",
        ),
        ("deepseek_v3", {"rope_parameters": {**YARN, "beta_fast": "x"}}, "positive beta_fast, at most 1e+12, got 'x'"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": "x", "mscale_all_dim": "x"}}, "positive mscale"),
        ("deepseek_v3", {"routed_scaling_factor": "nonsense"}, "routed_scaling_factor 'nonsense'"),
        ("deepseek_v3", {"routed_scaling_factor": math.nan}, "routed_scaling_factor nan"),
        ("deepseek_v3", {"routed_scaling_factor": []}, "routed_scaling_factor []"),
        ("deepseek_v3", {"norm_topk_prob": "false"}, "norm_topk_prob 'false'"),
        ("deepseek_v3", {"first_k_dense_replace": 0.5}, "first_k_dense_replace 0.5"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace -1"),
        ("deepseek_v3", {"first_k_dense_replace": math.inf}, "first_k_dense_replace inf"),
        ("deepseek_v3", {"num_key_value_heads": {"a": {}}}, "num_key_value_heads {'a': {}}"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("qwen3_moe", {"norm_topk_prob": "false"}, "norm_topk_prob 'false'"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'"),
        ("llama", {"dtype": "nonsense"}, "dtype 'nonsense'"),
        ("llama", {"torch_dtype": "int8"}, "torch_dtype 'int8'"),
        ("qwen3", {"layer_types": [["full_attention"]]}, "layer_types [['full_attention']]"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types sliding_attention",
        ),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window must be false"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias is true"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ("llama", {"bias": True}, "bias True"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            "mrope_section [1, 1, 2]",
        ),
        ("llama", {"rope_is_neox_style": False}, "rope_is_neox_style False"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk 2048"),
        ("mistral", {"attention_bias": True}, "attention_bias is true"),
        ("mistral", {"num_key_value_heads": None}, "lacks num_key_value_heads"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window '4096'"),
        ("mistral", {"sliding_window": 63}, "sliding_window 63 "),
        (
            "mistral",
            {"sliding_window": None, "max_position_embeddings": 4097},
            "sliding_window 4096, ",
        ),
    ],
)
def test_a_value_that_would_make_another_model_is_refused(
    families: dict[str, Path], tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(families[family], folder)
    check_model(folder)
    config(**change)(folder)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        check_model(folder)
    assert str(folder) in str(refused.value)


def test_a_mistral_may_have_a_window_longer_than_all_sequences(families: dict[str, Path], tmp_path: Path) -> None:
    """As the error message explains: within the window, attention covers all tokens. A Llama ignores this key."""
    for family, change in (
        ("mistral", {"sliding_window": 64}),
        ("mistral", {"max_position_embeddings": 4096}),
        ("llama", {"sliding_window": 8}),
    ):
        folder = tmp_path / "window"
        shutil.copytree(families[family], folder)
        config(**change)(folder)
        check_model(folder)
        shutil.rmtree(folder)


def test_a_mistral_may_have_a_second_copy_of_its_weights_under_its_own_names(
    families: dict[str, Path], tmp_path: Path
) -> None:
    """As in the Hub's folders of Mistral-7B-v0.3 and others. Under Hugging Face's names they would be loaded."""
    folder = tmp_path / "twice"
    shutil.copytree(families["mistral"], folder)
    save_file({"layers.0.attention.wq.weight": torch.zeros(48, 32)}, folder / "consolidated.safetensors")
    check_model(folder)
    shutil.copy(folder / WEIGHTS, folder / "consolidated.safetensors")
    with pytest.raises(ValueError, match=r"consolidated\.safetensors and in "):
        check_model(folder)


def test_of_a_hub_repository_only_the_files_that_are_read_are_downloaded(
    monkeypatch: pytest.MonkeyPatch, good: Path
) -> None:
    """By the pattern rules of the Hub itself. Mistral's repositories have the weights twice, others in sub-folders."""
    wanted = ["config.json", "model-00001-of-00002.safetensors", "additional_chat_templates/tool_use.jinja"]
    unwanted = ["consolidated.safetensors", "original/model.safetensors", "original/params.json", "tokenizer.model.v3"]
    asked: list[tuple[str, str | None]] = []

    def snapshot(name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        files = [*unwanted, *wanted]
        taken = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        assert list(taken) == wanted
        asked.append((name, revision))
        return str(good)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_model("mistralai/Mistral-7B-Instruct-v0.3").folder == good
    assert resolve_model("mistralai/Mistral-7B-Instruct-v0.3@refs/pr/3").folder == good
    assert asked == [("mistralai/Mistral-7B-Instruct-v0.3", revision) for revision in (None, "refs/pr/3")]


def test_a_head_that_is_not_tied_may_differ_and_equal_statements_may_be_repeated(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "untied"
    shutil.copytree(good, folder)
    tensors(lambda found: found.update({HEAD: changed(found["model.embed_tokens.weight"])}))(folder)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    config(tie_word_embeddings=False, torch_dtype="torch.float32", rope_scaling=rope, rope_theta=rope["rope_theta"])(
        folder
    )
    check_model(folder)
    config(rope_scaling={"type": "default"})(folder)  # as for transformers 4
    check_model(folder)


def test_special_tokens_may_have_spare_embeddings(good: Path, tmp_path: Path) -> None:
    """transformers gives a token that the tokenizer lacks the next id, here the last embedding."""
    from transformers import AutoTokenizer

    folder = tmp_path / "spare"
    shutil.copytree(good, folder)
    embeddings = "model.embed_tokens.weight"
    tensors(lambda found: found.update({embeddings: torch.cat([found[embeddings], torch.zeros(1, 64)])}))(folder)
    config(vocab_size=99)(folder)
    edited("tokenizer_config.json", eos_token="<|im_end|>")(folder)
    check_model(folder)
    edited("tokenizer_config.json", added_tokens_decoder={"98": {"content": "<|im_end|>", "special": True}})(folder)
    check_model(folder)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 98
    edited("tokenizer_config.json", pad_token="<|more|>")(folder)
    with pytest.raises(ValueError, match="no embedding"):
        check_model(folder)


def test_what_transformers_makes_of_a_tokenizer_must_load_and_have_embeddings(good: Path, tmp_path: Path) -> None:
    """A class of another family adds its own special tokens, whatever the files name."""
    folder = tmp_path / "class"
    shutil.copytree(good, folder)
    assert ChatTemplate(str(folder)).stop_token_ids == (1,)
    edited("tokenizer_config.json", tokenizer_class="LlamaTokenizer")(folder)
    with pytest.raises(SettingsError, match=r"class: as a LlamaTokenizer, .* 100 tokens, .* 98 embeddings"):
        ChatTemplate(str(folder))
    edited("tokenizer_config.json", tokenizer_class=None)(folder)
    written("tokenizer.json", "{")(folder)
    with pytest.raises(SettingsError, match=r"class: transformers cannot load the tokenizer \(JSONDecodeError"):
        ChatTemplate(str(folder))


def test_prompts_are_counted_whole(good: Path, tmp_path: Path) -> None:
    """A tokenizer that was saved with truncation or padding has them in its file."""
    folder = tmp_path / "cut"
    shutil.copytree(good, folder)
    cut = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<|pad|>"}
    edited("tokenizer.json", truncation=cut, padding={**pad, "pad_to_multiple_of": None})(folder)
    assert FolderTokenizer(read_config(folder)).count(["abcdefgh", "a"]) == [8, 1]


def test_a_qwen3_moe_may_have_null_as_decoder_sparse_step(families: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "null"
    shutil.copytree(families["qwen3_moe"], folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "decoder_sparse_step": None}))
    check_model(folder)
