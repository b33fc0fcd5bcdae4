"""The check of a model folder before anything is spawned: its config and its weights' headers."""

from __future__ import annotations

from pathlib import Path

from monarch_rl.model.architecture import Config
from monarch_rl.model.features import check_features, check_keys
from monarch_rl.model.tensors import check_weights


def check_folder(folder: Path, config: Config) -> None:
    """Refuse a folder that could not be loaded, or would be loaded as another model. Takes seconds at most.

    Whether the weights are finite is seen when the trainer loads them.

    Args:
        config: the folder's ``config.json``.

    Raises:
        ValueError: names the file, and the key or the tensor in it.
    """
    path = folder / "config.json"
    try:
        check_keys(config)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    try:
        check_features(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    check_weights(folder, config)
