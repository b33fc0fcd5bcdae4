"""Where an engine rank holds each tensor of a version, as a plan that later versions are copied by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from monarch_rl.generator.load_report import Box, matrix_shape
from monarch_rl.weights.area import attach
from monarch_rl.weights.checksum import Checksums, TensorBox
from monarch_rl.weights.manifest import TensorSpec, list_names

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


@dataclass(slots=True)
class CopyPlan:
    """All placements of a model, for any area of one layout."""

    specs: tuple[TensorSpec, ...]
    addresses: tuple[int, ...]
    """Of the model's parameters when the plan was made: if one has moved, the plan is void."""
    placements: tuple[Placement, ...]
    boxes: np.ndarray
    """int64[tensors, 4]: which box of each tensor this rank holds."""
    checksums: Checksums
    derive: Callable[[], None] | None
    """What the engine computes from what was copied, to be called after each copy but the first."""
    sources: dict[bytes, list[torch.Tensor]] = field(default_factory=dict)
    """By area: what each piece is copied from. They keep the area's mapping."""

    def fits(self, model: torch.nn.Module, specs: tuple[TensorSpec, ...]) -> bool:
        return specs == self.specs and _addresses(model) == self.addresses

    def sources_in(self, area: bytes) -> list[torch.Tensor]:
        """Views of the area, one for each piece of the checksums."""
        if area not in self.sources:
            if len(self.sources) == AREAS:
                self.sources.pop(next(iter(self.sources)))
            buffer = attach(area)
            boxes = [box_of(buffer, self.specs[place.tensor], place.box) for place in self.placements]
            self.sources[area] = [boxes[block.box][block.rows] for block in self.checksums.blocks]
        return self.sources[area]

    def take_checksums(self) -> np.ndarray:
        """int64[tensors]: the checksum of each tensor's box, of all pieces that were added since the last call."""
        tensors = torch.tensor([place.tensor for place in self.placements])
        sums = torch.zeros(len(self.specs), dtype=torch.int64)
        return np.asarray(sums.index_add_(0, tensors, self.checksums.take().cpu()))

    @property
    def device(self) -> torch.device:
        return self.placements[0].destination.device

    @property
    def nbytes(self) -> int:
        return sum(place.destination.nbytes for place in self.placements)


def plan_copies(
    model: torch.nn.Module,
    specs: tuple[TensorSpec, ...],
    placements: Sequence[Placement],
    derive: Callable[[], None] | None,
) -> CopyPlan:
    """The plan to copy to ``placements``. Raises UnsupportedModel if they hold a tensor in several parts."""
    held = [TensorBox(place.destination, place.box.first_row, place.box.first_column) for place in placements]
    return CopyPlan(specs, _addresses(model), tuple(placements), _boxes(specs, placements), Checksums(held), derive)


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
