"""Low-rank adapters (LoRA) on the projections of a torchtitan model: adding, initialising, merging, saving and
disabling them.

torchtitan's converter builds them, except for experts (``trainer/moe.py``). Their parameters are sharded like others,
by rows or by experts, and held in fp32. All other parameters are frozen.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save
from torch.distributed.tensor import DTensor
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from monarch_rl.model.folder import name_and_revision
from monarch_rl.model.lora import MLP_TARGETS, LoraSettings, lora_config, lora_names
from monarch_rl.model.weight_files import naming
from monarch_rl.trainer.moe import EXPERT_TARGETS, expert_lora_config, lora_parameters
from monarch_rl.trainer.shards import NamedShape, local_span
from monarch_rl.weights.blocks import find_spans, memory_kind, stack_span

_CONFIGS = {
    "q_proj": "wq",
    "k_proj": "wkv",
    "v_proj": "wkv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
"""The field of torchtitan's config for each projection."""
_SCALINGS = ("_lora_scaling", "_scaling")
"""Attributes with LoRA's scaling, in torchtitan's modules of projections and in this package's of experts."""
MERGED_BYTES = 64 << 20
"""Bytes of experts to merge at a time, unless a single expert is larger."""


def add_lora(config: Decoder.Config, lora: LoraSettings) -> Decoder.Config:
    """The model's config with LoRA on the targets, and everything else frozen. Consumes ``config``."""
    dense = any(layer.moe is None for layer in config.layers)
    names = sorted({_CONFIGS[target] for target in lora.targets if dense or target not in MLP_TARGETS})
    converted = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=names).build().convert(config)
    for layer in converted.layers:
        if layer.moe is not None and lora.sends_merged(sparse=True):
            routed = layer.moe.routed_experts
            routed.inner_experts = expert_lora_config(routed.inner_experts, lora)
    return converted


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


def add_lora_names(state_dict_adapter: StateDictAdapter) -> None:
    """Add peft's names of LoRA to torchtitan's table of names, with ``experts.{}.gate_proj.lora_A`` for each expert, so
    that torchtitan splits the stacked parameters of experts' LoRA like those of their weights."""
    for weight, parameter in list(state_dict_adapter.from_hf_map.items()):
        module, _, leaf = (parameter or "").rpartition(".")
        if leaf in EXPERT_TARGETS.values():
            parameters = [f"{module}.{name}" for name in lora_parameters(leaf)]
        elif leaf == "weight":
            parameters = [f"{module}.lora_a.weight", f"{module}.lora_b.weight"]
        else:
            continue
        state_dict_adapter.from_hf_map.update(zip(lora_names(weight), parameters, strict=True))


def remove_untargeted_lora(module: Decoder, lora: LoraSettings) -> None:
    """Remove LoRA from k or v if only the other one is a target: a single config builds both.

    Call it before the model is sharded, on the device that it was built on.
    """
    for target, name in (("k_proj", "wk"), ("v_proj", "wv")):
        for layer in module.layers.values():
            projections = layer.attention.qkv_linear
            projection = getattr(projections, name)
            if target in lora.targets or not hasattr(projection, "lora_a"):
                continue
            config = Linear.Config(
                in_features=projection.in_features,
                out_features=projection.out_features,
                bias=projection.bias is not None,
                param_init=projection._param_init,
                sharding_config=projection._sharding_config,
            )
            setattr(projections, name, config.build().requires_grad_(False))


def initialise_lora(shards: Mapping[str, torch.Tensor], tensors: Sequence[NamedShape], seed: int) -> None:
    """Initialise A as peft does (Kaiming uniform with a = sqrt(5): within 1 / sqrt(in)), and B to zero.

    Every rank generates whole tensors, one after the other, and keeps its shards, so the values do not depend on the
    sharding or the device.

    Args:
        shards: this rank's shards of LoRA, fp32, by peft's names.
        tensors: names and shapes of all tensors of LoRA, in the same order on all ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, shape in tensors:
            whole = torch.zeros(shape)
            if ".lora_A." in name:
                whole.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
            if name in shards:
                local, start = local_span(shards[name])
                local.copy_(whole.flatten()[start : start + local.numel()].view(local.shape))


def merged_shards(
    weights: Mapping[str, torch.Tensor], lora: Mapping[str, torch.Tensor], scaling: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's shards of the weights that have LoRA, merged, one by one: see :func:`merged_spans`."""
    for names, merged in merged_spans(weights, lora, scaling):
        yield from zip(names, merged, strict=True)


def merged_spans(
    weights: Mapping[str, torch.Tensor], lora: Mapping[str, torch.Tensor], scaling: float
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """This rank's shards of the weights that have LoRA, merged: ``W + scaling * B A``.

    All ranks iterate together: each A is gathered in turn, except for experts, whose A is on the same rank.

    Args:
        weights: fp32 weights by Hugging Face names, sharded like ``lora``; they are not changed.
        lora: A and B by peft's names.

    Yields:
        Names, and fp32[n, rows, columns], of n experts of a layer, or of one other weight.
    """
    named = [(name, lora_names(name)) for name in weights]
    adapted = [_Adapted(name, weights[name], lora[a], lora[b]) for name, (a, b) in named if a in lora]
    places = zip(*(one.places for one in adapted), strict=True)
    for span in find_spans([one.kind for one in adapted], *places):
        most = max(1, MERGED_BYTES // max(1, _local(adapted[span[0]].weight).nbytes))
        for first in range(0, len(span), most):
            members = [adapted[i] for i in span[first : first + most]]
            yield [one.name for one in members], _merged(members, scaling)


class _Adapted(NamedTuple):
    """A weight and its LoRA."""

    name: str
    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    @property
    def kind(self) -> Hashable:
        """Equal for the members of a span. A weight whose A must be gathered is a span of its own."""
        return self.name if isinstance(self.a, DTensor) else tuple(map(memory_kind, self._held))

    @property
    def places(self) -> list[int]:
        return [value.data_ptr() for value in self._held]

    @property
    def _held(self) -> list[torch.Tensor]:
        """This rank's shards of the three."""
        return [_local(value) for value in (self.weight, self.a, self.b)]


def _merged(span: list[_Adapted], scaling: float) -> torch.Tensor:
    weight, b = (
        stack_span([_local(value) for value in values[:2]], len(span))
        for values in ([one.weight for one in span], [one.b for one in span])
    )
    gathered = span[0].a.full_tensor() if isinstance(span[0].a, DTensor) else None
    a = stack_span([one.a for one in span[:2]], len(span)) if gathered is None else gathered.unsqueeze(0)
    return torch.add(weight, torch.bmm(b, a), alpha=scaling)


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def save_lora(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], lora: LoraSettings, base: Path, write: bool
) -> None:
    """Write a folder that peft can load as an adapter: A and B in fp32, and their config.

    Args:
        folder: the adapter's folder, created by the rank that writes.
        tensors: whole tensors by peft's names.
        base: the folder of the model that the adapter belongs to.
        write: true on one rank. All ranks call it together, because each tensor is gathered.

    Raises:
        OSError: names the file; raised after all tensors were gathered.
    """
    whole = {name: value.cpu().clone() for name, value in tensors}
    if write:
        name, revision = name_and_revision(base)
        contents = {
            "adapter_model.safetensors": save(whole, metadata={"format": "pt"}),
            "adapter_config.json": (json.dumps(lora_config(lora, name, revision), indent=2) + "\n").encode(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            with naming(folder / name):
                (folder / name).write_bytes(content)
