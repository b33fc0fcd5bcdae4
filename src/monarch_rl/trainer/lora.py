"""Low-rank adapters on the projections of a torchtitan model: put in, drawn, merged, saved.

torchtitan's converter builds them, but for those of experts (``trainer/moe.py``). Adapters are parameters like others,
sharded by rows, or by experts, and held in fp32; all else is frozen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from monarch_rl.model.lora import MLP_TARGETS, LoraSettings, adapter_config, tensor_names
from monarch_rl.trainer.moe import EXPERT_TARGETS, adapted_experts, adapter_parameters
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
    dense = any(layer.moe is None for layer in config.layers)
    names = sorted({_CONFIGS[target] for target in lora.targets if dense or target not in MLP_TARGETS})
    adapted = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=names).build().convert(config)
    for layer in adapted.layers:
        if layer.moe is not None and lora.sends_merged(sparse=True):
            routed = layer.moe.routed_experts
            routed.inner_experts = adapted_experts(routed.inner_experts, lora)
    return adapted


def name_adapters(names: StateDictAdapter) -> None:
    """Add what peft calls the adapters to torchtitan's table of names: ``experts.{}.gate_proj.lora_A`` for each expert,
    of which torchtitan cuts the stacked parameters as it does those of the weights."""
    for weight, parameter in list(names.from_hf_map.items()):
        module, _, leaf = (parameter or "").rpartition(".")
        if leaf in EXPERT_TARGETS.values():
            adapters = [f"{module}.{adapter}" for adapter in adapter_parameters(leaf)]
        elif leaf == "weight":
            adapters = [f"{module}.lora_a.weight", f"{module}.lora_b.weight"]
        else:
            continue
        names.from_hf_map.update(zip(tensor_names(weight), adapters, strict=True))


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


def draw_adapters(
    adapters: Mapping[str, torch.Tensor], tensors: Sequence[tuple[str, tuple[int, ...]]], seed: int
) -> None:
    """Set A as peft does (Kaiming uniform with a = sqrt(5): within 1 / sqrt(in)) and B to zero.

    Every rank draws whole tensors, one after the other, and keeps what it holds: the values are the same however they
    are sharded, and on GPUs as on CPUs.

    Args:
        adapters: this rank's shards, fp32, by peft's names.
        tensors: names and shapes of all adapters, in the same order on all ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, shape in tensors:
            whole = torch.zeros(shape)
            if ".lora_A." in name:
                whole.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
            if name in adapters:
                local, start = local_run(adapters[name])
                local.copy_(whole.flatten()[start : start + local.numel()].view(local.shape))


def merged(
    state: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor], scaling: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's shards of the weights that have adapters, with these added: ``W + scaling * B A``.

    All ranks go through it together: it gathers one A at a time, but those of experts, which lie where the expert does.

    Args:
        state: fp32 weights by Hugging Face names, sharded like the adapters; it is not changed.
        adapters: by peft's names.
    """
    for name, weight in state.items():
        name_a, name_b = tensor_names(name)
        if name_a in adapters:
            a, b = adapters[name_a], adapters[name_b]
            whole_a = a.full_tensor() if isinstance(a, DTensor) else a
            yield name, torch.add(_local(weight), _local(b) @ whole_a, alpha=scaling)


def merge(
    state: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor], scaling: float
) -> dict[str, torch.Tensor]:
    """All weights, those with adapters :func:`merged`; ``state`` is not changed. All ranks call it together."""
    result = dict(state)
    for name, local in merged(state, adapters, scaling):
        weight, result[name] = state[name], local
        if isinstance(weight, DTensor):
            mesh, placements = weight.device_mesh, weight.placements
            result[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
            )
    return result


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def save_adapter(
    folder: Path, adapters: Iterator[tuple[str, torch.Tensor]], lora: LoraSettings, base: Path, write: bool
) -> None:
    """Write a folder that peft loads: the adapter's tensors in fp32 and its config.

    Args:
        folder: made by the rank that writes.
        adapters: whole tensors by peft's names.
        base: the folder of the model that the adapter belongs to.
        write: on one rank; all call it together, since each tensor is gathered.
    """
    whole = {name: value.cpu().clone() for name, value in adapters}
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(adapter_config(lora, str(base)), indent=2) + "\n")
