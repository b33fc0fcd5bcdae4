"""Where an engine rank holds each tensor of a version, as a plan that later versions are copied by.

Tensors that are alike and lie at equal distances, in the area as in the parameter, are copied and summed together: one
projection of all experts of a layer, say (``weights/blocks.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from monarch_rl.generator.load_report import Box, matrix_shape
from monarch_rl.weights.area import attach
from monarch_rl.weights.blocks import TensorBox, find_runs, memory_kind, stack_run
from monarch_rl.weights.checksum import Checksums
from monarch_rl.weights.manifest import INT_OF_SIZE, TensorSpec, list_names

AREAS = 2
"""Areas whose mappings are kept; versions arrive in them in turn."""


class UnsupportedModel(ValueError):
    """The model's loader does more than copy, so that what it loads cannot be replayed or verified."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A box of a tensor and where this rank holds it."""

    tensor: int
    """Index into the manifest."""
    box: Box
    destination: torch.Tensor
    """View of a parameter, ``[rows, columns]`` of the box."""


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """The same box of tensors that are alike and lie at equal distances, in areas as in this rank's memory."""

    tensors: tuple[int, ...]
    """Indices into the manifest."""
    box: Box
    destination: torch.Tensor
    """View of a parameter's bits, as integers of the same size: ``[tensors, rows, columns]``. A GPU that copies many
    tensors in one kernel takes floats through float32, which changes the bits of a NaN."""

    def source_in(self, area: torch.Tensor, specs: tuple[TensorSpec, ...]) -> torch.Tensor:
        """View of an area's bits, like ``destination``."""
        first = [box_of(area, specs[tensor], self.box) for tensor in self.tensors[:2]]
        return stack_run(first, len(self.tensors)).view(self.destination.dtype)


@dataclass(slots=True)
class CopyPlan:
    """All placements of a model, for any area of one layout."""

    specs: tuple[TensorSpec, ...]
    addresses: tuple[int, ...]
    """Of the model's parameters when the plan was made: if one has moved, the plan is void."""
    runs: tuple[PlacedRun, ...]
    boxes: np.ndarray
    """int64[tensors, 4]: which box of each tensor this rank holds."""
    checksums: Checksums
    """Of the runs."""
    tensors: torch.Tensor
    """int64: the runs' tensors, one run after the other."""
    nbytes: int
    """Bytes that a version copies."""
    derive: Callable[[], None] | None
    """What the engine computes from what was copied, to be called after each copy but the first."""
    sources: dict[bytes, list[list[torch.Tensor]]] = field(default_factory=dict)
    """By area: what each block is copied from. They keep the area's mapping."""

    def fits(self, model: torch.nn.Module) -> bool:
        """Whether the model's parameters are where they were when the plan was made."""
        return _addresses(model) == self.addresses

    def sources_in(self, area: bytes) -> list[list[torch.Tensor]]:
        """Views of the area, one for each part of each block of the checksums."""
        if area not in self.sources:
            if len(self.sources) == AREAS:
                self.sources.pop(next(iter(self.sources)))
            buffer = attach(area)
            runs = [run.source_in(buffer, self.specs) for run in self.runs]
            self.sources[area] = [[part.of(runs[part.box]) for part in block.parts] for block in self.checksums.blocks]
        return self.sources[area]

    def take_checksums(self) -> np.ndarray:
        """int64[tensors]: the checksum of each tensor's box, of all pieces that were added since the last call."""
        sums = torch.zeros(len(self.specs), dtype=torch.int64)
        return np.asarray(sums.index_add_(0, self.tensors, self.checksums.take().cpu()))

    @property
    def device(self) -> torch.device:
        return self.runs[0].destination.device


def plan_copies(
    model: torch.nn.Module,
    specs: tuple[TensorSpec, ...],
    placements: Sequence[Placement],
    derive: Callable[[], None] | None,
) -> CopyPlan:
    """The plan to copy to ``placements``. Raises UnsupportedModel if they hold a tensor in several parts."""
    boxes, runs = _boxes(specs, placements), tuple(_join(specs, placements))
    held = Checksums([TensorBox(run.destination, run.box.first_row, run.box.first_column) for run in runs])
    tensors = torch.tensor([tensor for run in runs for tensor in run.tensors])
    nbytes = sum(run.destination.nbytes for run in runs)
    return CopyPlan(specs, _addresses(model), runs, boxes, held, tensors, nbytes, derive)


def _join(specs: tuple[TensorSpec, ...], placements: Sequence[Placement]) -> Iterator[PlacedRun]:
    """The placements in runs, in the order of the area."""
    placements = sorted(placements, key=lambda place: (place.tensor, place.box.first_row))
    kinds = [(place.box, specs[place.tensor].shape, memory_kind(place.destination)) for place in placements]
    offsets = [specs[place.tensor].offset for place in placements]
    for run in find_runs(kinds, offsets, [place.destination.data_ptr() for place in placements]):
        members = [placements[i] for i in run]
        destination = stack_run([place.destination for place in members[:2]], len(members))
        destination = destination.view(INT_OF_SIZE[destination.element_size()])
        yield PlacedRun(tuple(place.tensor for place in members), members[0].box, destination)


def box_of(area: torch.Tensor, spec: TensorSpec, box: Box) -> torch.Tensor:
    """A box of a tensor as a view of the area that holds it: ``[rows, columns]``."""
    matrix = spec.view(area).view(matrix_shape(spec.shape))
    return matrix[box.first_row : box.first_row + box.rows, box.first_column : box.first_column + box.columns]


def _addresses(model: torch.nn.Module) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())


def _boxes(specs: tuple[TensorSpec, ...], placements: Sequence[Placement]) -> np.ndarray:
    """int64[tensors, 4]: the box of each tensor that its placements make up; all 0 if there is none."""
    boxes = np.zeros((len(specs), 4), np.int64)
    scattered = set()
    for place in sorted(placements, key=lambda place: (place.tensor, place.box.first_row)):
        box, known = place.box, boxes[place.tensor]
        if not known.any():
            known[:] = (box.first_row, 0, box.first_column, box.columns)
        if (box.first_row, box.first_column, box.columns) != (known[0] + known[1], known[2], known[3]):
            scattered.add(specs[place.tensor].name)
        known[1] += box.rows
    if scattered:
        raise UnsupportedModel(
            f"the engine's loader did not copy these tensors in one part: {list_names(sorted(scattered))}"
        )
    return boxes
