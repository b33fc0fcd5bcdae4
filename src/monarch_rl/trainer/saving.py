"""Writing the model under training as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torchtitan.config import TORCH_DTYPE_MAP

from monarch_rl.model.folder import TEXT_FILES, saved_dtype
from monarch_rl.trainer.lora import merge_lora, save_lora
from monarch_rl.trainer.model import ShardedModel


def save_model(model: ShardedModel, folder: Path) -> None:
    """Write a Hugging Face folder: safetensors in the dtype of the source folder, config and tokenizer.

    LoRA is merged into its weights, and also written by itself to the folder ``<name>_adapter`` beside it, in fp32, for
    peft; it belongs to the model that training started from. All ranks call it together.

    Args:
        folder: seen by all ranks; rank 0 makes it.
    """
    first = dist.get_rank() == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dtype = TORCH_DTYPE_MAP.get(saved_dtype(model.hf_config), torch.float32)
    weights = model.hf_state()
    if model.lora.rank:
        weights = merge_lora(weights, model.lora_state(), model.lora.scaling)
        save_lora(lora_folder(folder), model.whole_lora(), model.lora, model.folder, write=first)
    state = {name: value.to(dtype) for name, value in weights.items()}
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)
    if first:
        shutil.rmtree(folder / "sharded", ignore_errors=True)
        sources = {path for pattern in TEXT_FILES for path in model.folder.glob(pattern)}
        for source in sources:
            if not source.name.endswith(".safetensors.index.json"):  # of the old weights
                shutil.copy(source, folder / source.name)
    dist.barrier()


def lora_folder(folder: Path) -> Path:
    """Where LoRA of a model that is saved to ``folder`` is written."""
    return folder.with_name(f"{folder.name}_adapter")
