"""Model folders with one fault each, made from a good one: each is refused at once, by the file and what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from monarch_rl.model.check import check_folder
from monarch_rl.model.folder import read_config, resolve_model
from monarch_rl.model.tokens import FolderTokenizer
from tools.make_tiny_model import Settings as TinyModel
from tools.make_tiny_model import write_random_model

WEIGHTS = "model.safetensors"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "good"
    write_random_model(folder, TinyModel(hidden_size=64, layers=2))
    return folder


def check_model(folder: Path) -> None:
    """What a run checks of a model folder before anything is spawned."""
    config = read_config(resolve_model(str(folder)))
    check_folder(folder, config)
    FolderTokenizer(folder, config)


def edited(file: str, **change: Any) -> Callable[[Path], object]:
    """Change keys of a JSON file; None takes a key away."""

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


def cut_within_the_header(folder: Path) -> None:
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


def larger_vocabulary(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["é"] = len(tokenizer["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "config is a list": (written("config.json", "[]"), ["config.json", "list", "not a JSON object"]),
    "config is cut off": (written("config.json", '{"architectures": ['), ["config.json is not JSON"]),
    "architecture is a word": (config(architectures="Qwen3ForCausalLM"), ["architecture none is not supported"]),
    "another architecture": (config(architectures=["GPT2LMHeadModel"]), ["architecture GPT2LMHeadModel"]),
    "no hidden_size": (config(hidden_size=None), ["config.json lacks hidden_size"]),
    "no head_dim": (config(head_dim=None), ["config.json lacks head_dim"]),
    "no eps": (config(rms_norm_eps=None), ["config.json lacks rms_norm_eps"]),
    "eps is a word": (config(rms_norm_eps="small"), ["config.json has rms_norm_eps 'small'"]),
    "size is a word": (config(num_hidden_layers="2"), ["num_hidden_layers '2'", "positive integer"]),
    "size is nothing": (config(vocab_size=0), ["vocab_size 0", "positive integer"]),
    "heads": (config(num_key_value_heads=3), ["4 num_attention_heads", "3 num_key_value_heads"]),
    "biases": (config(attention_bias=True), ["biases in attention"]),
    "activation": (config(hidden_act="gelu"), ["hidden_act 'gelu' is not supported"]),
    "sliding window": (config(use_sliding_window=True), ["sliding-window attention is not supported"]),
    "layer types": (config(layer_types=["sliding_attention"] * 2), ["layer_types sliding_attention"]),
    "rope kind": (config(rope_parameters={"rope_type": "linear", "factor": 2.0}), ["rotary scaling 'linear'"]),
    "rope lacks": (config(rope_parameters=ROPE), ["kind llama3 need a positive factor, got None"]),
    "rope is a word": (config(rope_parameters="default"), ["rope_parameters 'default'", "object"]),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), ["quantised weights are not supported"]),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ["no *.safetensors file"]),
    "truncated": (truncated, [WEIGHTS, "is truncated", "Copy or download it again"]),
    "cut within the header": (cut_within_the_header, [WEIGHTS, "header is longer than the file"]),
    "empty": (written(WEIGHTS, ""), [WEIGHTS, "is no safetensors file"]),
    "no safetensors": (written(WEIGHTS, "a" * 99), [WEIGHTS, "is no safetensors file"]),
    "shard missing": (a_shard_is_missing, ["model-00002-of-00002.safetensors", "index.json names", "other tensors"]),
    "shard missing, no index": (a_shard_is_missing_without_an_index, ["lacks model.", "a file is missing"]),
    "twice": (both_whole_and_sharded, [WEIGHTS, "model-0000", "move others away"]),
    "tensor missing": (tensors(lambda found: found.pop(K_PROJ)), [f"lacks {K_PROJ}"]),
    "wrong shape": (
        tensors(lambda found: found.update({K_PROJ: torch.zeros(64, 32)})),
        [WEIGHTS, K_PROJ, "[64, 32]", "[64, 64]"],
    ),
    "biases in the file": (
        tensors(lambda found: found.update({K_PROJ.replace("weight", "bias"): torch.zeros(64)})),
        [WEIGHTS, K_PROJ.replace("weight", "bias"), "does not have"],
    ),
    "more layers in the file": (config(num_hidden_layers=1), [WEIGHTS, "model.layers.1.", "does not have"]),
    "integers": (
        tensors(lambda found: found.update({K_PROJ: torch.zeros(64, 64, dtype=torch.int8)})),
        [WEIGHTS, K_PROJ, "saved as I8"],
    ),
    "no tokenizer": (without_tokenizer, ["no tokenizer in"]),
    "tokenizer is {}": (written("tokenizer.json", "{}"), ["tokenizer.json is no tokenizer"]),
    "tokenizer is a list": (written("tokenizer.json", "[1]"), ["tokenizer.json is no tokenizer"]),
    "tokenizer without embeddings": (larger_vocabulary, ["1 ids for which", "up to 98 ('é')", "vocab_size 98"]),
    "tokenizer's settings": (written("tokenizer_config.json", "{"), ["tokenizer_config.json is not JSON"]),
    "end token": (edited("generation_config.json", eos_token_id=98), ["generation_config.json", "eos_token_id 98"]),
}


@pytest.mark.parametrize(("break_it", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_it_is_refused_by_name(good: Path, tmp_path: Path, break_it: Callable[[Path], object], said: list[str]) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(good, folder)
    break_it(folder)
    with pytest.raises(ValueError) as refused:
        check_model(folder)
    message = str(refused.value)
    assert [part for part in (*said, str(folder)) if part not in message] == [], message
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
    found = read_config(resolve_model(str(tmp_path)))
    assert found["num_key_value_heads"] == 4
    check_folder(tmp_path, found)


def test_what_transformers_leaves_out_as_well_may_be_there(good: Path, tmp_path: Path) -> None:
    """A tied model's LM head, which Qwen's folders have, and tables of rotary embeddings."""
    folder = tmp_path / "more"
    shutil.copytree(good, folder)
    extra = {"lm_head.weight": torch.zeros(98, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    tensors(lambda found: found.update(extra))(folder)
    check_model(folder)


@pytest.mark.parametrize("value", [None, 0, -1, 10**20, 0.5, True, "nonsense", [], {}, {"a": {}}], ids=repr)
def test_any_value_of_any_key_is_refused_by_name_or_accepted(good: Path, tmp_path: Path, value: object) -> None:
    """Generated from the config that transformers writes; None takes the key away. Nothing else may be raised."""
    folder = tmp_path / "broken"
    shutil.copytree(good, folder)
    text = (folder / "config.json").read_text()
    refused = 0
    for key in json.loads(text):
        (folder / "config.json").write_text(text)
        config(**{key: value})(folder)
        try:
            check_model(folder)
        except ValueError as error:
            refused += 1
            assert str(folder) in str(error), error
    assert refused >= 8
