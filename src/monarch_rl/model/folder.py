"""Finds, checks and describes Hugging Face model folders, before anything is spawned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from monarch_rl.errors import SettingsError
from monarch_rl.model.architecture import architecture_of, find_architecture

TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model folder besides the weights: config and tokenizer."""
MISTRALS_OWN = "consolidated"
"""Prefix of files in a Mistral folder that hold the weights a second time, under other than the Hugging Face tensor
names. They are not read."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def resolve_model(name: str, tokenizer: bool = True) -> Path:
    """The local folder of a model, downloaded from the Hugging Face Hub if ``name`` is not a folder.

    Args:
        name: a folder with ``config.json``, safetensors and a tokenizer, or a Hub name (``org/name``).
        tokenizer: whether the folder must have a tokenizer; callers that only use token ids need none.

    Raises:
        ValueError: ``name`` is neither a folder nor a reachable Hub repository, a file or a key of the config is
            missing, or the architecture is not supported.
    """
    folder = find_folder(name)
    config = read_config(folder)
    architecture = architecture_of(config)
    if lacking := {key: value for key, value in architecture.needed_keys.items() if key not in config}:
        raise SettingsError(
            f"model {name}: its config lacks {', '.join(lacking)}, without which SGLang does not start (transformers 5 "
            f"leaves them out). Add the values of {architecture.label}'s own config: {json.dumps(lacking)}"
        )
    if not any(folder.glob("*.safetensors")):
        raise SettingsError(f"model {name}: no *.safetensors file in {folder}; save the weights as safetensors")
    if tokenizer and not any((folder / file).is_file() for file in TOKENIZERS):
        raise SettingsError(f"model {name}: no tokenizer in {folder}; it needs one of {', '.join(TOKENIZERS)}")
    return folder


def find_folder(name: str) -> Path:
    """The local folder of a model, downloaded if ``name`` is not a folder. Raises ValueError if there is none."""
    return _local_folder(name) or _download(name)


def _local_folder(name: str) -> Path | None:
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError):  # a name too long for a file, or "~" of a user that does not exist
        return None


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.safetensors", *TEXT_FILES]
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=[f"{MISTRALS_OWN}*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SettingsError(
            f"no such model: {name} is neither a folder nor a Hugging Face Hub repository that can be "
            f"reached ({reason}). Give a folder with config.json, or a Hub name such as Qwen/Qwen3-0.6B; "
            f"tools/make_tiny_model.py makes .cache/tiny-qwen3."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder, with missing optional keys filled in.

    Raises:
        ValueError: the file is missing, is not a JSON object, or names an unsupported architecture.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise SettingsError(f"{folder} is not a model folder: it has no config.json")
    config = read_object(path)
    try:
        return architecture_of(config).completed(config)
    except ValueError as error:
        raise SettingsError(f"{folder}: {error}") from None


def find_config(model: str) -> dict[str, Any] | None:
    """The config of a model folder of any architecture; None if ``model`` is not a folder with ``config.json``.

    Missing optional keys are filled in if the architecture is supported.

    Raises:
        ValueError: the file is not a JSON object.
    """
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = read_object(path)
    architecture = find_architecture(config)
    return config if architecture is None else architecture.completed(config)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError if the file holds anything else."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is not JSON ({error}): copy or download it again") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{path} holds {type(value).__name__} {str(value)[:60]!r}, not a JSON object")
    return value


def num_experts(config: dict[str, Any]) -> int:
    """Experts per sparse layer; 0 for a dense model and for an unsupported architecture.

    Raises:
        ValueError: the config of a mixture-of-experts model does not state the number.
    """
    architecture = find_architecture(config)
    return 0 if architecture is None else architecture.num_experts(config)


def sparse_layers(config: dict[str, Any]) -> list[int]:
    """The indices of the layers with experts; empty for a dense model."""
    if num_experts(config) == 0:
        return []
    architecture = architecture_of(config)
    return [layer for layer in range(config["num_hidden_layers"]) if architecture.is_sparse(config, layer)]


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embeddings in the form of transformers 5: ``rope_type``, ``rope_theta`` and the type's parameters.

    Also reads the form of transformers 4: ``rope_theta`` and ``rope_scaling``.
    """
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_theta"] = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    return rope


def saved_dtype(config: dict[str, Any]) -> str:
    """The dtype of the weights in a model folder, e.g. ``bfloat16``."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
