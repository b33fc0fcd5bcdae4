"""The reference model: the model that training started from, on the trainer's devices, for KL regularisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder

from monarch_rl.trainer.batch import MicroBatch
from monarch_rl.trainer.model import ShardedModel
from monarch_rl.trainer.settings import TrainerSettings
from monarch_rl.trainer.token_logprobs import TokenLogprobs

_SCALINGS = ("_lora_scaling", "_scaling")
"""Attributes with LoRA's scaling, in torchtitan's modules of projections and in this package's of experts."""
Compute = Callable[[MicroBatch, Decoder], TokenLogprobs]
"""A forward pass of a micro-batch through a model."""


class ReferenceModel:
    """Without LoRA, a frozen copy of the initial model, sharded like the policy. With LoRA, the policy's base weights,
    which are frozen anyway, without LoRA.

    Args:
        folder: the Hugging Face folder that training starts from.
        trained: the policy's module.
    """

    def __init__(
        self, folder: Path, settings: TrainerSettings, dims: ParallelDims, device: torch.device, trained: Decoder
    ) -> None:
        self._module = trained
        if not settings.lora.rank:
            copy = ShardedModel(folder, replace(settings, compile=False), dims, device)
            self._module = copy.module.requires_grad_(False)

    def logprobs(self, batch: MicroBatch, compute: Compute) -> torch.Tensor:
        """float32[N], without gradient: log-probs of the trainable tokens of a micro-batch."""
        with torch.no_grad(), without_lora(self._module):
            return compute(batch, self._module).logprobs


@contextmanager
def without_lora(module: Decoder) -> Iterator[None]:
    """Disable LoRA within the block."""
    found = [(part, name) for part in module.modules() for name in _SCALINGS if hasattr(part, name)]
    before = [getattr(part, name) for part, name in found]
    for part, name in found:
        setattr(part, name, 0.0)
    try:
        yield
    finally:
        for (part, name), scaling in zip(found, before, strict=True):
            setattr(part, name, scaling)
