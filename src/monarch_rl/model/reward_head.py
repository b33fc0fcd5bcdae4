"""Reward models: a base model with a linear head on the last token in place of the LM head."""

from __future__ import annotations

from pathlib import Path

from monarch_rl.errors import SettingsError
from monarch_rl.model.architecture import Config, architecture_of
from monarch_rl.model.folder import find_folder, read_object, resolve_model
from monarch_rl.model.tensors import REWARD_LABELS

HEADS = {
    "Qwen3ForSequenceClassification": "Qwen3ForCausalLM",
    "Qwen2ForSequenceClassification": "Qwen2ForCausalLM",
    "LlamaForSequenceClassification": "LlamaForCausalLM",
}
"""Architecture of the base model, by the reward model's architecture in ``config.json``."""
LABELS = 2
"""Outputs of a head if ``config.json`` does not state the number: transformers' default."""


def resolve_frozen(name: str) -> tuple[Path, Config]:
    """The local folder and the config of a frozen model (a judge or teacher), which is served and never trained.

    Args:
        name: Hugging Face folder or Hub name; see :func:`~monarch_rl.model.folder.resolve_model`.

    Raises:
        ValueError: as for ``resolve_model``.
    """
    folder = find_folder(name)
    config = read_frozen(folder)
    if not reward_labels(config):
        resolve_model(str(folder))
    elif not any(folder.glob("*.safetensors")):
        raise SettingsError(f"model {name}: no *.safetensors file in {folder}; save the weights as safetensors")
    return folder, config


def read_frozen(folder: Path) -> Config:
    """The config of a frozen model.

    For a reward model: the base model's config, marked as having no separate LM head, with the head's number of
    outputs under ``REWARD_LABELS``.

    Raises:
        ValueError: ``config.json`` is missing or not a JSON object, or the architecture is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise SettingsError(f"{folder} is not a model folder: it has no config.json")
    config = read_object(path)
    names = config.get("architectures")
    base = HEADS.get(str(names[0])) if isinstance(names, list) and names else None
    if base is not None:
        labels = config.get("num_labels") or len(config.get("id2label") or ()) or LABELS
        config |= {"architectures": [base], "tie_word_embeddings": True, REWARD_LABELS: int(labels)}
    try:
        return architecture_of(config).completed(config)
    except ValueError as error:
        raise SettingsError(f"{folder}: {error}; as reward models also {', '.join(HEADS)}") from None


def reward_labels(config: Config) -> int:
    """Outputs per sequence of a model's reward head, from a config of :func:`read_frozen`; 0 if it has an LM head."""
    return int(config.get(REWARD_LABELS) or 0)
