"""Exports a checkpoint or a model's folder as a Hugging Face folder, in one process, without a run or engines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from monarch_rl.checkpoint.folders import GROUPS, MANIFEST, Manifest, complete, held, verify
from monarch_rl.errors import BrokenCheckpoint, SettingsError
from monarch_rl.model.config import read_config
from monarch_rl.model.folder import has_tokenizer, resolve_model
from monarch_rl.model.lora import FULL_TRAINING, LoraSettings
from monarch_rl.model.tensors import check_folder
from monarch_rl.observe.lines import read_rows
from monarch_rl.observe.metrics import FILE as METRICS
from monarch_rl.offline.parity import run_ranks
from monarch_rl.pipeline.checkpoints import FOLDER as CHECKPOINTS
from monarch_rl.pipeline.run_folder import SAVED, SETTINGS
from monarch_rl.runtime.deadlines import disk_limit_s
from monarch_rl.runtime.network import held_port
from monarch_rl.runtime.scratch import ScratchFolder
from monarch_rl.settings.ranges import from_plain
from monarch_rl.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from monarch_rl.trainer.policy import Policy

logger = logging.getLogger("monarch_rl")

START_S = 900.0
"""Seconds for the process to start."""


@dataclass(frozen=True)
class Source:
    """The weights to export."""

    model: Path
    """The model's Hugging Face folder."""
    checkpoint: Path | None = None
    """The checkpoint that has the weights; None uses those of ``model``."""
    lora: LoraSettings = FULL_TRAINING
    files: Path | None = None
    """Folder from which the checkpoint's files are read."""
    version: int = 0
    """The checkpoint's version; 0 for a model's folder, whose version is unknown."""
    manifest: Manifest | None = None
    """Manifest of the checkpoint."""


@contextmanager
def source_of(place: str, trained: bool = False) -> Iterator[Source]:
    """The weights at ``place``, for the block: of a run's folder, a checkpoint, or a model's folder. They stay readable
    within the block even if a running run removes the checkpoint.

    For a run, this is the newest complete checkpoint, or the saved model if it was written later. If the checkpoint is
    of the run's last step, it is preferred: both have the same weights, but the checkpoint has them in float32.

    Args:
        place: path of the folder, or Hub name of a model.
        trained: prefer a run's newest checkpoint even to a newer saved model, because it has LoRA separately.

    Raises:
        ValueError: there is nothing to export; says why.
    """
    folder = Path(place)
    with ScratchFolder() as scratch, ExitStack() as files:
        if (folder / SETTINGS).is_file() or (folder / CHECKPOINTS).is_dir():
            yield _of_run(folder, trained, scratch.path, files)
        elif (folder / MANIFEST).is_file():
            yield _of_named(folder, scratch.path, files)
        else:
            yield Source(resolve_model(place, tokenizer=False).folder)


def _of_run(folder: Path, trained: bool, scratch: Path, files: ExitStack) -> Source:
    model, broken = folder / SAVED, dict[Path, BrokenCheckpoint]()
    # A running run may remove a listed checkpoint, but only once there is a newer one, so list them again.
    while candidates := [item for item in complete(folder / CHECKPOINTS).items() if item[1] not in broken]:
        step, checkpoint = candidates[-1]
        try:
            later = model.is_dir() and _written(model) >= _made(checkpoint) and step != _last_step(folder)
            if later and not trained:
                return Source(model)
            return _hold(checkpoint.resolve(), scratch, files)
        except BrokenCheckpoint as error:
            broken[checkpoint] = error
            if checkpoint.exists():
                logger.error("%s: using what was saved before", error)
    if model.is_dir() and not (trained and broken):
        return Source(model)
    if broken:
        raise BrokenCheckpoint("; ".join(map(str, broken.values())))
    raise SettingsError(f"the run {folder} has neither a checkpoint (--checkpoint.every-steps) nor a saved model")


def _last_step(run: Path) -> int | None:
    """The last step in a run's metrics; None if it cannot be read. Damaged lines are logged."""
    try:
        rows, damage = read_rows(run / METRICS)
        for problem in damage:
            logger.warning("%s: the newer one of the checkpoint and the saved model is taken", problem)
        return None if damage else int(rows[-1]["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _of_named(folder: Path, scratch: Path, files: ExitStack) -> Source:
    while True:
        checkpoint = folder.resolve()
        try:
            return _hold(checkpoint, scratch, files)
        except BrokenCheckpoint:
            if folder.resolve() == checkpoint:
                raise  # otherwise it is a link, which the run has pointed to another checkpoint meanwhile


def _written(folder: Path) -> float:
    """When the last file of a folder was written, as a file time."""
    return max((file.stat().st_mtime for file in folder.iterdir()), default=0.0)


def _made(checkpoint: Path) -> float:
    """When a checkpoint was written, as a file time. Raises BrokenCheckpoint."""
    # Not by the manifest, which is written again after an evaluation.
    try:
        return (checkpoint / GROUPS).stat().st_mtime
    except OSError as error:
        raise BrokenCheckpoint(f"{checkpoint / GROUPS} cannot be read ({error})") from error


def _hold(checkpoint: Path, scratch: Path, files: ExitStack) -> Source:
    """Verify a checkpoint, and hold its files for the lifetime of ``files``. Raises BrokenCheckpoint."""
    links = scratch / checkpoint.name
    with ExitStack() as opened:
        opened.enter_context(held(checkpoint, links))
        manifest = verify(checkpoint, links)
        files.enter_context(opened.pop_all())
    lora = from_plain(LoraSettings, manifest.settings["trainer"]["lora"])
    name = manifest.settings["model"]
    try:
        model = resolve_model(name, tokenizer=False)
    except SettingsError as error:
        raise SettingsError(
            f"{checkpoint} needs the model that its run began with, {name}: put it back there, or link it; if that is "
            f"a relative path, of version 0.1, run this where the run was started. {error}"
        ) from error
    return Source(model.folder, checkpoint, lora, links, manifest.version, manifest)


def export(source: Source, folder: Path, dtype: str = "", file_bytes: int = 0, adapter: bool = False) -> None:
    """Write a Hugging Face folder, which appears only once it is complete.

    Args:
        source: the weights to export.
        folder: the folder to write.
        dtype: torch's name of the dtype; empty keeps that of the model's folder.
        file_bytes: maximum size of a weight file; 0 is 4 GiB. Several files get an index.
        adapter: write only the LoRA adapter, for peft.

    Raises:
        ValueError: ``adapter`` is set, but the run has no LoRA; or the model's folder would not be exported as it is;
            or ``folder`` exists and holds anything but an earlier export.
        SideFailed: it could not be written; the error is on stderr.
    """
    if adapter and not source.lora.rank:
        raise SettingsError("there is no adapter to export: the run trained all weights (trainer.lora.rank 0)")
    _check_target(folder.resolve(), source)
    check_folder(read_config(source.model))
    nbytes = sum(path.stat().st_size for path in source.model.glob("*.safetensors"))
    with held_port() as port:
        arguments = (source, folder.resolve(), dtype, file_bytes, adapter, port)
        run_ranks(_export, arguments, 1, START_S + 2 * disk_limit_s(4 * nbytes), f"a process to write {folder}")


def _check_target(folder: Path, source: Source) -> None:
    """Refuse to replace what is no earlier export."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not any((folder / config).is_file() for config in ("config.json", "adapter_config.json")):
        raise SettingsError(f"{folder} exists and is no model folder, so it is not replaced: name a new folder")
    if source.checkpoint is not None and folder == source.model.resolve():
        raise SettingsError(f"{folder} is the model that the run began with, so it is not replaced: name a new folder")


def check_base_weights(policy: Policy, source: Source) -> None:
    """Raise SettingsError if the checkpoint's LoRA belongs to other base weights than those that ``policy`` loaded."""
    if source.manifest is None or source.checkpoint is None:
        return
    import torch

    from monarch_rl.weights.checksum import sums_by_layer

    found: dict[str, int] = {}
    for dtype in {name.rpartition("(")[2].removesuffix(")") for name in source.manifest.base_weights}:
        tensors, checksums = policy.published.base_checksums(getattr(torch, dtype))
        found |= sums_by_layer([name for name, _ in tensors], dtype, checksums)
    source.manifest.check_base_weights(found, source.checkpoint)


def _export(rank: int, source: Source, folder: Path, dtype: str, file_bytes: int, adapter: bool, port: int) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    from monarch_rl.model.chat import ChatTemplate
    from monarch_rl.model.weight_files import FILE_BYTES
    from monarch_rl.trainer.policy import Policy
    from monarch_rl.trainer.saving import save_adapter, save_model

    settings = TrainerSettings(ranks=1, lora=source.lora, lr_warmup_steps=0)
    policy = Policy(source.model, settings, total_steps=1)
    check_base_weights(policy, source)
    if source.files is not None:
        policy.checkpoint.restore_weights(source.files)
    if adapter:
        save_adapter(policy.model, folder)
    else:
        # A checkpoint's policy learned to end its turns as the chat template does; a folder is exported as it is.
        trained = source.files is not None and has_tokenizer(source.model)
        ends = ChatTemplate(str(source.model)).stop_token_ids if trained else ()
        save_model(policy.model, folder, file_bytes or FILE_BYTES, dtype, ends)
    policy.close()
