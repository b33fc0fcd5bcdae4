"""A checkpoint, or a model's folder, written as a Hugging Face folder by one process: no run, no engines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_rl.checkpoint.folders import GROUPS, MANIFEST, complete, verify
from monarch_rl.model.folder import resolve_model
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.pipeline.checkpoints import FOLDER as CHECKPOINTS
from monarch_rl.pipeline.parity import run_ranks
from monarch_rl.pipeline.run_folder import SETTINGS
from monarch_rl.runtime.deadlines import disk_limit_s
from monarch_rl.runtime.network import held_port
from monarch_rl.trainer.settings import TrainerSettings

MODEL = "model"
"""Folder of a run's last save."""
START_S = 900.0
"""Seconds for the process to come up."""


@dataclass(frozen=True)
class Source:
    """What is exported."""

    model: Path
    """The Hugging Face folder that the weights belong to."""
    checkpoint: Path | None = None
    """With the weights; None are those of ``model``."""
    lora: LoraSettings = FULL_TRAINING


def source_of(place: str, trained: bool = False) -> Source:
    """What ``place`` names: a run's folder (of its newest checkpoint and the model that it has saved the one that was
    written last), a checkpoint, or a model's folder.

    Args:
        trained: of a run the newest checkpoint, in which LoRA is by itself, whether or not a model was saved after it.

    Raises:
        ValueError: there is nothing to export; says why.
    """
    folder = Path(place)
    if (folder / SETTINGS).is_file():
        return _of_run(folder, trained)
    if (folder / MANIFEST).is_file():
        return _of_checkpoint(folder.resolve())
    return Source(resolve_model(place, tokenizer=False))


def _of_run(folder: Path, trained: bool) -> Source:
    model = folder / MODEL
    checkpoint = next(reversed(complete(folder / CHECKPOINTS).values()), None)
    if checkpoint is None and not model.is_dir():
        raise ValueError(f"the run {folder} has neither a checkpoint (--checkpoint.every-steps) nor a saved model")
    if checkpoint is None or (model.is_dir() and not trained and _written(model) >= _made(checkpoint)):
        return Source(model)
    return _of_checkpoint(checkpoint.resolve())


def _written(folder: Path) -> float:
    """When the last file of a folder was."""
    return max((file.stat().st_mtime for file in folder.iterdir()), default=0.0)


def _made(checkpoint: Path) -> float:
    """When a checkpoint was. Its manifest may be written again, after an evaluation."""
    return (checkpoint / GROUPS).stat().st_mtime


def _of_checkpoint(checkpoint: Path) -> Source:
    settings = verify(checkpoint).settings
    lora: dict[str, Any] = settings["trainer"]["lora"]
    known = LoraSettings(**lora | {"targets": tuple(lora["targets"])})
    return Source(resolve_model(settings["model"], tokenizer=False), checkpoint, known)


def export(source: Source, folder: Path, dtype: str = "", file_bytes: int = 0, adapter: bool = False) -> None:
    """Write a Hugging Face folder, which appears when it is complete.

    Args:
        dtype: torch's name; empty is that of the model's folder.
        file_bytes: that a file of weights may have; 0 is 4 GiB. With several files there is an index.
        adapter: write LoRA alone, for peft.

    Raises:
        ValueError: there is no LoRA.
        SideFailed: it could not be written; the error is on stderr.
    """
    if adapter and not source.lora.rank:
        raise ValueError("there is no LoRA to write alone: the run has trained all weights (trainer.lora.rank 0)")
    nbytes = sum(path.stat().st_size for path in source.model.glob("*.safetensors"))
    with held_port() as port:
        arguments = (source, folder.resolve(), dtype, file_bytes, adapter, port)
        run_ranks(_export, arguments, 1, START_S + 2 * disk_limit_s(4 * nbytes), f"a process to write {folder}")


def _export(rank: int, source: Source, folder: Path, dtype: str, file_bytes: int, adapter: bool, port: int) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    from monarch_rl.model.weight_files import FILE_BYTES
    from monarch_rl.trainer.policy import Policy
    from monarch_rl.trainer.saving import save_adapter, save_model

    settings = TrainerSettings(ranks=1, lora=source.lora, lr_warmup_steps=0)
    policy = Policy(source.model, settings, total_steps=1)
    if source.checkpoint is not None:
        policy.checkpoint.restore_weights(source.checkpoint)
    if adapter:
        save_adapter(policy.model, folder)
    else:
        save_model(policy.model, folder, file_bytes or FILE_BYTES, dtype)
    policy.close()
