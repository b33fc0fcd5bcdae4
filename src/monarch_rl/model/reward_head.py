"""Models that rate a sequence: a base model and, in place of the LM head, a linear head on the last token."""

from __future__ import annotations

from pathlib import Path

from monarch_rl.model.architecture import Config, architecture_of
from monarch_rl.model.folder import find_folder, read_object, resolve_model
from monarch_rl.model.tensors import REWARD_LABELS

HEADS = {
    "Qwen3ForSequenceClassification": "Qwen3ForCausalLM",
    "Qwen2ForSequenceClassification": "Qwen2ForCausalLM",
    "LlamaForSequenceClassification": "LlamaForCausalLM",
}
"""By the name in ``config.json``: the family of the base model."""
LABELS = 2
"""Of a head whose ``config.json`` does not say how many it has, as in transformers."""


def resolve_frozen(name: str) -> tuple[Path, Config]:
    """The local folder of a model that is to be served and never trained, and its config.

    Args:
        name: Hugging Face folder or Hub name; see :func:`~monarch_rl.model.folder.resolve_model`.

    Raises:
        ValueError: as ``resolve_model``.
    """
    folder = find_folder(name)
    config = read_frozen(folder)
    if not reward_labels(config):
        resolve_model(str(folder))
    elif not any(folder.glob("*.safetensors")):
        raise ValueError(f"model {name}: no *.safetensors file in {folder}; save the weights as safetensors")
    return folder, config


def read_frozen(folder: Path) -> Config:
    """``config.json`` of a model; with a reward head, that of the base model, without LM head, and its labels.

    Raises:
        ValueError: the file is missing, is no JSON object, or names an architecture that cannot be served.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    config = read_object(path)
    names = config.get("architectures")
    base = HEADS.get(str(names[0])) if isinstance(names, list) and names else None
    if base is not None:
        labels = config.get("num_labels") or len(config.get("id2label") or ()) or LABELS
        config |= {"architectures": [base], "tie_word_embeddings": True, REWARD_LABELS: int(labels)}
    try:
        return architecture_of(config).completed(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; and, to rate sequences, {', '.join(HEADS)}") from None


def reward_labels(config: Config) -> int:
    """Numbers that the head of a model returns for a sequence, by :func:`read_frozen`; 0 if it has an LM head."""
    return int(config.get(REWARD_LABELS) or 0)
