"""The published weights on one rank: the tensors of a version, this rank's shards, and copying them to snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from monarch_rl.model.lora import lora_names
from monarch_rl.runtime.streams import finish_current
from monarch_rl.trainer.lora import merged_spans
from monarch_rl.trainer.metrics import summed
from monarch_rl.trainer.model import EXPERT, ShardedModel
from monarch_rl.trainer.shards import NamedShape, Span, by_rows, has_columns, is_owner, local_span, row_span
from monarch_rl.weights.blocks import find_spans, memory_kind, stack_span
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.manifest import Manifest

SAMPLED = 100
"""Every 100th row of a shard is sampled to estimate the share of weights that a step changes."""


@dataclass(frozen=True)
class SnapshotPlan:
    """How a rank's shards are copied to one snapshot. Planned once, because their memory stays the same."""

    places: dict[str, torch.Tensor]
    """The place in the snapshot of each of this rank's shards, by name: flat, in the served dtype."""
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Target and source of spans of shards; empty if the sent values are computed (merged LoRA)."""


def _joined(
    shards: Iterable[torch.Tensor], places: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Target and source of each span (``weights/blocks.py``): the experts of a layer are slices of one parameter."""
    sources, targets = [shard.detach() for shard in shards], list(places)
    kinds = [(memory_kind(source), memory_kind(target)) for source, target in zip(sources, targets, strict=True)]
    for span in find_spans(kinds, *([x.data_ptr() for x in memory] for memory in (sources, targets))):
        target, source = (stack_span([memory[i] for i in span[:2]], len(span)) for memory in (targets, sources))
        yield target, source


def _copy_computed(values: torch.Tensor, places: list[torch.Tensor]) -> None:
    """Copy n stacked tensors to their flat places; nothing if this rank has no rows of them (``places`` is empty)."""
    if not places:
        return
    rows = values.flatten(1)
    for span in find_spans([memory_kind(place) for place in places], [place.data_ptr() for place in places]):
        stack_span([places[i] for i in span[:2]], len(span)).copy_(rows[span.start : span.stop])


class PublishedWeights:
    """The weights of a model that are sent to generators: all of them; with LoRA, only its tensors; with LoRA on
    experts, the targeted weights with LoRA merged (:meth:`LoraSettings.sends_merged`).

    Every method is called by all ranks together.
    """

    def __init__(self, model: ShardedModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._sends_merged = model.lora.sends_merged(bool(model.hf_config.sparse_layers))

    def tensors(self) -> list[NamedShape]:
        """Names and shapes of the tensors of a version, the same on all ranks."""
        lora = self._model.lora_tensors()
        if self._sends_merged:
            names = {name for name, _ in lora}
            return [(name, shape) for name, shape in self._model.hf_tensors() if lora_names(name)[0] in names]
        return lora if self._model.lora.rank else self._model.hf_tensors()

    def owned_spans(self) -> list[Span]:
        """This rank's span of each tensor that it has a part of."""
        spans = [(name, start, local.numel()) for name, (local, start) in self._local_spans.items()]
        return spans + [(name, *row_span(value)) for name, value in self._divided.items()]

    def base_checksums(self, dtype: torch.dtype) -> tuple[list[NamedShape], np.ndarray]:
        """The base weights that no version holds, and this rank's part of their checksums, int64[tensors], as served in
        ``dtype``.

        With LoRA these are all weights of the model, except those that are sent merged. Without LoRA there are none:
        then all weights are sent and verified.
        """
        if not self._model.lora.rank:
            return [], np.zeros(0, np.int64)
        sent = dict(self.tensors())
        tensors = [(name, shape) for name, shape in self._model.hf_tensors() if name not in sent]
        sums = dict.fromkeys((name for name, _ in tensors), 0)
        for name, value in self._model.hf_state().items():
            if name in sent:
                continue
            local, start = local_span(value)
            first_row = start // (value.numel() // value.shape[0])
            if local.numel():  # small models have fewer rows than ranks
                sums[name] = int(tensor_checksum(local.detach().to(dtype), first_row))
        return tensors, np.array(list(sums.values()), np.int64)

    def plan_snapshot(self, manifest: Manifest, views: Sequence[torch.Tensor]) -> SnapshotPlan:
        """Plan where this rank's shards go, for any version.

        Args:
            views: flat uint8, one for each of this rank's shards in the manifest.
        """
        specs = [manifest.tensors[shard.tensor] for shard in manifest.shards[dist.get_rank()]]
        places = {spec.name: view.view(spec.dtype) for spec, view in zip(specs, views, strict=True)}
        if self._sends_merged:
            return SnapshotPlan(places, [])
        # Small models have fewer rows than ranks.
        shards = {name: local for name, (local, _) in self._local_spans.items() if name in places}
        targets = [places[name].view(local.shape) for name, local in shards.items()]
        return SnapshotPlan(places, list(_joined(shards.values(), targets)))

    def sampled_rows(self, dtypes: Mapping[str, torch.dtype]) -> list[torch.Tensor]:
        """A copy of every :data:`SAMPLED` th row of this rank's shards, in the dtype in which each is served; with
        LoRA, of its matrices.

        Args:
            dtypes: served dtype of each tensor; only these tensors are sampled, or LoRA's if they are sent merged.
        """
        shards = self._model.lora_state() if self._sends_merged else self._shards()
        merged = next(iter(dtypes.values()), None) if self._sends_merged else None
        rows = []
        for name, value in shards.items():
            dtype = merged or dtypes.get(name)
            local = value.to_local() if isinstance(value, DTensor) else value
            if dtype is not None and local.numel():
                rows.append(local.detach()[::SAMPLED].to(dtype, copy=True))
        return rows

    def snapshot(self, plan: SnapshotPlan) -> None:
        """Copy this rank's shards to the snapshot, in the served dtype. All ranks call it together."""
        with torch.no_grad():
            if plan.copies:
                targets, sources = zip(*plan.copies, strict=True)
                torch._foreach_copy_(targets, sources)
            for names, values in self._computed():
                _copy_computed(values, [plan.places[name] for name in names if name in plan.places])
        finish_current(self._device)  # others read the copy, and the next step changes its source

    def _computed(self) -> Iterator[tuple[list[str], torch.Tensor]]:
        """The shards that must be computed for sending: names of n tensors, and their values, fp32[n, rows, columns].
        All ranks iterate together."""
        if self._sends_merged:
            yield from merged_spans(*self._weights_with_lora, self._model.lora.scaling)
        else:
            yield from (([name], local_span(by_rows(value))[0][None]) for name, value in self._divided.items())

    @cached_property
    def _local_spans(self) -> dict[str, tuple[torch.Tensor, int]]:
        """:func:`local_span` of each tensor of a version. Cached, because the storage stays the same."""
        owned = {name: value for name, value in self._shards().items() if is_owner(value)}
        return {name: local_span(value) for name, value in owned.items() if not has_columns(value)}

    @cached_property
    def _divided(self) -> dict[str, torch.Tensor]:
        """This rank's shards of weights that tensor-parallel ranks divide by columns. They are sent by rows
        (:func:`by_rows`), so that each rank's part of a tensor is one span of its elements."""
        return {name: value for name, value in self._shards().items() if has_columns(value)}

    @cached_property
    def _weights_with_lora(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """This rank's shards of the weights that have LoRA, and of LoRA. Cached, because the storage stays the same."""
        lora = self._model.lora_state()
        return {name: w for name, w in self._model.hf_state().items() if lora_names(name)[0] in lora}, lora

    def _shards(self) -> dict[str, torch.Tensor]:
        """This rank's shards of the tensors of a version; weights that are sent merged are given without LoRA."""
        if self._sends_merged:
            return self._weights_with_lora[0]
        if self._model.lora.rank:
            return self._model.lora_state()
        # Buffers (the bias of a router) are whole on every rank: rank 0 sends them.
        first = dist.get_rank() == 0
        return {
            name: value
            for name, value in self._model.hf_state().items()
            if first or isinstance(value, DTensor) or EXPERT.search(name)
        }


def changed_share(
    before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], device: torch.device
) -> dict[str, float]:
    """``{"changed_share": ...}``: the share of all ranks' :meth:`PublishedWeights.sampled_rows` that differ; empty
    before there are served weights. All ranks call it together."""
    changed = sum(int((new != old).sum()) for old, new in zip(before, after, strict=True))
    sampled = summed(float(sum(rows.numel() for rows in after)), device)
    return {"changed_share": summed(float(changed), device) / sampled} if sampled else {}
