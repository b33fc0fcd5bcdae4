"""Runs inside SGLang's scheduler: overwrites the policy's LoRA adapter in the engine's memory pool with a new version.

SGLang itself would load a new version as a further adapter, for later requests. Here one adapter keeps its name and its
entry in the pool, and each version overwrites that entry between two steps. Running sequences continue under the new
version with their KV cache, as when all weights are replaced (``load_staged``).

The pool stacks and shards adapters as SGLang's layers fuse projections and divide them among ranks. To find where each
tensor goes, SGLang's own loader loads an adapter whose elements are numbered into a pool of integers, and the numbers
are read back. From then on a version is one local copy, and its checksum is computed from the pool itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial, partialmethod
from typing import Any
from weakref import WeakKeyDictionary

import torch

from monarch_rl.errors import UnsupportedModel
from monarch_rl.generator.load_report import Box
from monarch_rl.generator.load_staged import CopyPlan, Placement, box_of, plan_copies, run_order
from monarch_rl.model.lora import lora_names
from monarch_rl.weights.manifest import TensorSpec, list_names

_managers: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
"""SGLang's LoRA manager of each model, because a loader receives only the model."""


def remember_managers() -> None:
    """Record the LoRA manager of every model that this process loads from now on."""
    from sglang.srt.lora.lora_manager import LoRAManager

    LoRAManager.init_memory_pool = partialmethod(_init_memory_pool, LoRAManager.init_memory_pool)


def _init_memory_pool(manager: Any, original: Any) -> None:
    original(manager)
    _managers[manager.base_model] = manager


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's ``custom_weight_loader`` for LoRA adapters; takes the same orders as ``load_staged.load``."""
    run_order(model, named_tensors, _load_and_plan)


def _load_and_plan(model: torch.nn.Module, area: torch.Tensor, specs: tuple[TensorSpec, ...]) -> CopyPlan:
    """Assign the adapter's pool entry, find the placements in it, and fill them.

    Raises UnsupportedModel if the engine's adapter does not match the tensors.
    """
    manager = _managers.get(model)
    if manager is None or len(manager.loras) != 1:
        raise UnsupportedModel(
            "an adapter was sent, but the engine was started without one: start it with the trainer's LoRA settings"
        )
    (lora_id,) = manager.loras
    pool = manager.memory_pool
    _check_fit(pool, manager.configs[lora_id].r, specs)
    manager.fetch_new_loras({lora_id})
    pool_entry = pool.get_buffer_id(lora_id)
    placements = tuple(_find_placements(manager, lora_id, pool_entry, specs))
    missing = set(range(len(specs))) - {place.tensor for place in placements}
    if missing:
        raise UnsupportedModel(f"SGLang's loader ignores these tensors: {list_names(specs[i].name for i in missing)}")
    for place in placements:
        place.destination.copy_(box_of(area, specs[place.tensor], place.box))
    layers = [module for modules in manager.lora_modules for module in modules.values()]
    keeps_copies = any(callable(getattr(layer, "on_lora_slots_updated", None)) for layer in layers)
    updated = partial(manager._notify_lora_slots_updated, {pool_entry})
    updated()
    return plan_copies(model, specs, placements, updated if keeps_copies else None)


def _check_fit(pool: Any, rank: int, specs: tuple[TensorSpec, ...]) -> None:
    unfit = [
        f"{spec.name} {spec.shape} {spec.dtype}"
        for spec in specs
        if spec.dtype != pool.dtype or spec.shape[0 if ".lora_A." in spec.name else 1] != rank
    ]
    if unfit:
        raise UnsupportedModel(
            f"the engine's adapter has rank {rank} and dtype {pool.dtype}, but these tensors differ: "
            f"{list_names(unfit)}. Start the engine with the trainer's LoRA settings and in the dtype that is sent."
        )


# -- finding where each tensor is in the pool -------------------------------------------------------------------------


def _find_placements(manager: Any, lora_id: str, pool_entry: int, specs: tuple[TensorSpec, ...]) -> Iterator[Placement]:
    """The placements that SGLang's loader gives to each tensor on this rank."""
    sizes = torch.tensor([spec.numel for spec in specs])
    first = 1 + sizes.cumsum(0) - sizes  # 0 marks elements of the pool that no tensor fills
    ranges = zip(specs, first.tolist(), strict=True)
    numbered = {spec.name: torch.arange(start, start + spec.numel).view(spec.shape) for spec, start in ranges}
    _add_siblings(manager, numbered)
    for held, numbers in _load_numbers(manager, lora_id, pool_entry, numbered):
        tensors = torch.searchsorted(first, numbers, right=True) - 1
        for index in tensors.unique().tolist():
            if index >= 0:
                yield _place(specs, index, held, numbers - first[index], tensors == index)


def _place(
    specs: tuple[TensorSpec, ...], index: int, held: torch.Tensor, elements: torch.Tensor, mine: torch.Tensor
) -> Placement:
    """The placement of one tensor in a two-dimensional part of the pool entry.

    Args:
        specs: specs of all tensors.
        index: the tensor's index.
        held: the part of the entry.
        elements: for each element of ``held``, the index of the tensor's element that it holds.
        mine: which elements of ``held`` belong to this tensor.
    """
    spec = specs[index]
    rows, columns = (mine.any(1 - side).nonzero().flatten() for side in (0, 1))
    window = slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1)
    numbers = elements[window]
    first_row, first_column = divmod(int(numbers[0, 0]), spec.shape[1])
    box = Box(first_row, numbers.shape[0], first_column, numbers.shape[1])
    whole = torch.arange(spec.numel).view(spec.shape)
    expected = whole[first_row : first_row + box.rows, first_column : first_column + box.columns]
    if not torch.equal(numbers, expected):
        raise UnsupportedModel(f"SGLang does not store {spec.name} row by row in one part: it cannot be overwritten")
    return Placement(index, box, held[window])


def _add_siblings(manager: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Add zeros for projections that are not targets but are fused with one: SGLang requires all of q, k and v."""
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for modules in manager.lora_modules:
        for path, module in modules.items():
            parent, _, leaf = path.rpartition(".")
            parts = [lora_names(f"{parent}.{part}.weight") for part in fused.get(leaf, ())]
            target = next((names for names in parts if names[0] in tensors), None)
            if target is None:
                continue
            layer = module.base_layer
            rows = [layer.output_size // 2] * 2
            if leaf == "qkv_proj":
                rows = [heads * layer.head_size for heads in (layer.total_num_heads, *[layer.total_num_kv_heads] * 2)]
            rank, width = tensors[target[0]].shape
            for (name_a, name_b), height in zip(parts, rows, strict=True):
                tensors.setdefault(name_a, torch.zeros(rank, width, dtype=torch.int64))
                tensors.setdefault(name_b, torch.zeros(height, rank, dtype=torch.int64))


def _load_numbers(
    manager: Any, lora_id: str, pool_entry: int, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Have SGLang load integers; yields each two-dimensional part of the entry and the integers loaded into it."""
    from sglang.srt.lora.lora import LoRAAdapter

    pool, config = manager.memory_pool, manager.configs[lora_id]
    numbered = LoRAAdapter(
        lora_id, config, manager.base_hf_config, manager.load_config, manager.lora_backend, manager.base_model
    )
    numbered.initialize_weights_from_tensors(tensors)
    real = pool.A_buffer, pool.B_buffer
    integers = [
        {name: [torch.zeros_like(x, dtype=torch.int64, device="cpu") for x in layers] for name, layers in side.items()}
        for side in real
    ]
    pool.A_buffer, pool.B_buffer = integers
    try:
        pool.load_lora_weight_to_buffer(lora_id, pool_entry, numbered, manager.lora_modules, None, None)
    finally:
        pool.A_buffer, pool.B_buffer = real
    for held_side, number_side in zip(real, integers, strict=True):
        for name in held_side:
            for held, numbers in zip(held_side[name], number_side[name], strict=True):
                yield held[pool_entry], numbers[pool_entry]
