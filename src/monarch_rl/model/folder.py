"""A model is a Hugging Face folder: found, checked and described here, before anything is spawned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""Architectures that can be trained, by the name in ``config.json``."""

DEEPSEEK_KEYS = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What SGLang looks for in a DeepSeek-V3's ``config.json``, and DeepSeek's own values."""

TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model folder beside the weights: config and tokenizer."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def resolve_model(name: str, tokenizer: bool = True) -> Path:
    """The local folder of a model, downloaded from the Hugging Face Hub if ``name`` is not a folder.

    Args:
        name: a folder with ``config.json``, safetensors and a tokenizer, or a Hub name (``org/name``).
        tokenizer: whether it must have one; not where all there is are token ids.

    Raises:
        ValueError: there is no such folder and no such (reachable) Hub repository, a file is missing, or the
            architecture is not supported.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _download(name)
    config = read_config(folder)
    needed = DEEPSEEK_KEYS if config["architectures"][0] == "DeepseekV3ForCausalLM" else {}
    if lacking := {key: value for key, value in needed.items() if key not in config}:
        raise ValueError(
            f"model {name}: its config lacks {', '.join(lacking)}, without which SGLang does not start: transformers 5 "
            f"leaves them out. Add what DeepSeek-V3's own has: {json.dumps(lacking)}"
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"model {name}: no *.safetensors file in {folder}; save the weights as safetensors")
    if tokenizer and not any((folder / file).is_file() for file in TOKENIZERS):
        raise ValueError(f"model {name}: no tokenizer in {folder}; it needs one of {', '.join(TOKENIZERS)}")
    return folder


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", *TEXT_FILES]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"no such model: {name} is neither a folder nor a Hugging Face Hub repository that can be "
            f"reached ({reason}). Give a folder with config.json, or a Hub name such as Qwen/Qwen3-0.6B; "
            f"tools/make_tiny_model.py makes .cache/tiny-qwen3."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder.

    Raises:
        ValueError: the file is missing or names an architecture that cannot be trained here.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{folder}: architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return config


def num_experts(config: dict[str, Any]) -> int:
    """Experts of a layer that has some; 0 for a model without.

    Raises:
        ValueError: a mixture-of-experts model whose config does not say so.
    """
    if config["architectures"][0] == "DeepseekV3ForCausalLM":
        return int(config["n_routed_experts"])
    if config["architectures"][0] != "Qwen3MoeForCausalLM":
        return 0
    found = config.get("num_experts", config.get("num_local_experts"))  # transformers 4's name, and 5's
    if found is None:
        raise ValueError("config.json of a Qwen3MoeForCausalLM names neither num_experts nor num_local_experts")
    return int(found)


def sparse_layers(config: dict[str, Any]) -> list[int]:
    """The layers that have experts: of a Qwen3-MoE every ``decoder_sparse_step`` th one but for ``mlp_only_layers``, of
    a DeepSeek-V3 all but the first ``first_k_dense_replace``."""
    if num_experts(config) == 0:
        return []
    if config["architectures"][0] == "DeepseekV3ForCausalLM":
        return list(range(config["first_k_dense_replace"], config["num_hidden_layers"]))
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    return [i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0]


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embeddings as transformers 5 writes them: ``rope_type``, ``rope_theta`` and what the type needs;
    transformers 4 wrote ``rope_theta`` and ``rope_scaling``."""
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    found["rope_theta"] = found.get("rope_theta") or config.get("rope_theta") or 10_000.0
    return found


def saved_dtype(config: dict[str, Any]) -> str:
    """The dtype in which a model folder holds its weights, e.g. ``bfloat16``."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
