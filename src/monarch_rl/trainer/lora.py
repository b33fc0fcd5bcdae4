"""Low-rank adapters on the projections of a torchtitan model: put in, drawn, merged, saved.

torchtitan's converter builds them. Adapters are parameters like others, sharded by rows and held in fp32; all else is
frozen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder

from monarch_rl.adapter import LoraSettings, adapter_config, tensor_names
from monarch_rl.trainer.shards import local_run

_CONFIGS = {
    "q_proj": "wq",
    "k_proj": "wkv",
    "v_proj": "wkv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
"""The field of torchtitan's config that builds each projection."""


def adapt_config(config: Decoder.Config, lora: LoraSettings) -> Decoder.Config:
    """The config of the model with adapters on the targets, and the rest frozen; ``config`` is used up."""
    names = sorted({_CONFIGS[target] for target in lora.targets})
    return LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=names).build().convert(config)


def drop_adapters(module: Decoder, lora: LoraSettings) -> None:
    """Take the adapter off k or v where only the other one is a target: one config built both.

    Call before the model is sharded, on the device that it was built on.
    """
    for target, name in (("k_proj", "wk"), ("v_proj", "wv")):
        for layer in module.layers.values():
            projections = layer.attention.qkv_linear
            adapted = getattr(projections, name)
            if target in lora.targets or not hasattr(adapted, "lora_a"):
                continue
            config = Linear.Config(
                in_features=adapted.in_features,
                out_features=adapted.out_features,
                param_init=adapted._param_init,
                sharding_config=adapted._sharding_config,
            )
            setattr(projections, name, config.build().requires_grad_(False))


def draw_adapters(adapters: Mapping[str, DTensor], seed: int) -> None:
    """Set A as peft does (Kaiming uniform with a = sqrt(5): within 1 / sqrt(in)) and B to zero.

    Every rank draws whole tensors, one after the other, and keeps its rows: the values are the same however they
    are sharded, and on GPUs as on CPUs.

    Args:
        adapters: fp32 tensors by peft's names; the same order on all ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in adapters.items():
            local, start = local_run(value)
            if ".lora_B." in name:
                local.zero_()
                continue
            bound = value.shape[1] ** -0.5
            whole = torch.empty(value.shape).uniform_(-bound, bound, generator=generator)
            local.copy_(whole.flatten()[start : start + local.numel()].view(local.shape))


def merge(
    state: Mapping[str, torch.Tensor], adapters: Mapping[str, DTensor], scaling: float
) -> dict[str, torch.Tensor]:
    """The weights with their adapters added, as one model: ``W + scaling * B A``.

    All ranks call it together: it gathers one A at a time. ``state`` holds fp32 weights by Hugging Face names, sharded
    by rows like the adapters, and is not changed.
    """
    result = dict(state)
    for name, weight in state.items():
        name_a, name_b = tensor_names(name)
        if name_a not in adapters:
            continue
        assert isinstance(weight, DTensor)
        product = adapters[name_b].to_local() @ adapters[name_a].full_tensor()
        local = torch.add(weight.to_local(), product, alpha=scaling)
        result[name] = DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    return result


def save_adapter(folder: Path, adapters: Mapping[str, DTensor], lora: LoraSettings, base: Path, write: bool) -> None:
    """Write a folder that peft loads: the adapter's tensors in fp32 and its config.

    Args:
        folder: made by the rank that writes.
        base: the folder of the model that the adapter belongs to.
        write: on one rank; all call it together, since each tensor is gathered.
    """
    whole = {name: value.full_tensor().cpu() for name, value in adapters.items()}
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(adapter_config(lora, str(base)), indent=2) + "\n")
