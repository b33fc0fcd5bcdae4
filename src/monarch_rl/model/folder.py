"""Finds Hugging Face model folders, or downloads them, before anything is spawned."""

from __future__ import annotations

import json
from pathlib import Path

from monarch_rl.errors import SettingsError
from monarch_rl.model.config import ModelConfig, read_config, read_frozen

TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model folder besides the weights: config and tokenizer."""
MISTRALS_OWN = "consolidated"
"""Prefix of files in a Mistral folder that hold the weights a second time, under other than the Hugging Face tensor
names. They are not read."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def resolve_model(name: str, tokenizer: bool = True) -> ModelConfig:
    """The config of a model and its local folder, downloaded from the Hugging Face Hub if ``name`` is not a folder.

    Args:
        name: a folder with ``config.json``, safetensors and a tokenizer, or a Hub name (``org/name``).
        tokenizer: whether the folder must have a tokenizer; callers that only use token ids need none.

    Raises:
        ValueError: ``name`` is neither a folder nor a reachable Hub repository, a file or a key of the config is
            missing or invalid, or the architecture is not supported.
    """
    folder = find_folder(name)
    config = read_config(folder)
    architecture = config.architecture
    if lacking := {key: value for key, value in architecture.needed_keys.items() if key not in config.raw}:
        raise SettingsError(
            f"model {name}: its config lacks {', '.join(lacking)}, without which SGLang does not start (transformers 5 "
            f"leaves them out). Add the values of {architecture.label}'s own config: {json.dumps(lacking)}"
        )
    _check_weights_exist(name, folder)
    if tokenizer and not any((folder / file).is_file() for file in TOKENIZERS):
        raise SettingsError(f"model {name}: no tokenizer in {folder}; it needs one of {', '.join(TOKENIZERS)}")
    return config


def resolve_frozen(name: str) -> ModelConfig:
    """The config of a frozen model (a judge or teacher), which is served and never trained, and its local folder.

    Args:
        name: Hugging Face folder or Hub name; see :func:`resolve_model`.

    Raises:
        ValueError: as for :func:`resolve_model`.
    """
    folder = find_folder(name)
    config = read_frozen(folder)
    if not config.reward_labels:
        return resolve_model(str(folder))
    _check_weights_exist(name, folder)
    return config


def _check_weights_exist(name: str, folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        raise SettingsError(f"model {name}: no *.safetensors file in {folder}; save the weights as safetensors")


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
