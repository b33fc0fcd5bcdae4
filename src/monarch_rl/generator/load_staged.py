"""Runs inside SGLang's scheduler: copies a version from a shared area into the engine's parameters.

The first commit goes through SGLang's own loader and records which box of each tensor this rank holds, and where
(:func:`load_and_plan`). The result is a :class:`CopyPlan` for any area with the same layout. Later commits replay the
plan: each block is copied, then read back from the parameter into its checksum while it is still in the core's cache.

No exception may leave this module: it would end the engine. Results go through :class:`LoadSheet`.
"""

from __future__ import annotations

import base64
import json
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_rl.errors import UnsupportedModel
from monarch_rl.generator import load_report
from monarch_rl.generator.load_report import Box, LoadSheet, matrix_shape
from monarch_rl.runtime.streams import finish_device
from monarch_rl.weights.area import attach
from monarch_rl.weights.blocks import TensorBox, find_spans, memory_kind, stack_span
from monarch_rl.weights.checksum import Checksums
from monarch_rl.weights.manifest import INT_OF_SIZE, TensorSpec, list_names

# -- the copy plan: where an engine rank holds each tensor of a version -----------------------------------------------
# Equally shaped tensors at equal distances, both in the area and in the parameters, are copied and summed together as
# one span, for example one projection of all experts of a layer (``weights/blocks.py``).

AREAS = 2
"""Number of areas whose mappings are cached; versions alternate between them."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A box of a tensor, and where this rank holds it."""

    tensor: int
    """Index into the manifest."""
    box: Box
    destination: torch.Tensor
    """View of a parameter, ``[rows, columns]`` of the box."""


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """A span: the same box of equally shaped tensors at equal distances, both in areas and in this rank's memory."""

    tensors: tuple[int, ...]
    """Indices into the manifest."""
    box: Box
    destination: torch.Tensor
    """View of a parameter's bits as integers of the same size: ``[tensors, rows, columns]``. Integers, because a GPU
    that copies many tensors in one kernel converts floats through float32, which changes the bits of a NaN."""

    def source_in(self, area: torch.Tensor, specs: tuple[TensorSpec, ...]) -> torch.Tensor:
        """View of an area's bits, with the shape and dtype of ``destination``."""
        first = [box_of(area, specs[tensor], self.box) for tensor in self.tensors[:2]]
        return stack_span(first, len(self.tensors)).view(self.destination.dtype)


@dataclass(slots=True)
class CopyPlan:
    """All placements of a model, for any area with one layout."""

    specs: tuple[TensorSpec, ...]
    addresses: tuple[int, ...]
    """Addresses of the model's parameters when the plan was made; the plan is invalid if one has moved."""
    spans: tuple[PlacedSpan, ...]
    """The spans to copy."""
    boxes: np.ndarray
    """int64[tensors, 4]: the box of each tensor that this rank holds."""
    checksums: Checksums
    """Checksums of the spans."""
    tensors: torch.Tensor
    """int64: the tensors of all spans, span by span."""
    nbytes: int
    """Bytes copied per version."""
    derive: Callable[[], None] | None
    """Recomputes what the engine derives from its parameters; called after each copy except the first, which goes
    through the engine's own loader. None if nothing is derived."""
    sources: dict[bytes, list[list[torch.Tensor]]] = field(default_factory=dict)
    """By area: the views that each block is copied from. They keep the area's mapping alive."""

    def fits(self, model: torch.nn.Module) -> bool:
        """Whether the model's parameters have not moved since the plan was made."""
        return _addresses(model) == self.addresses

    def sources_in(self, area: bytes) -> list[list[torch.Tensor]]:
        """Views of the area, one for each part of each checksum block."""
        if area not in self.sources:
            if len(self.sources) == AREAS:
                self.sources.pop(next(iter(self.sources)))
            buffer = attach(area)
            spans = [span.source_in(buffer, self.specs) for span in self.spans]
            self.sources[area] = [[part.of(spans[part.box]) for part in block.parts] for block in self.checksums.blocks]
        return self.sources[area]

    def take_checksums(self) -> np.ndarray:
        """int64[tensors]: the checksum of each tensor's box, over all blocks added since the last call."""
        sums = torch.zeros(len(self.specs), dtype=torch.int64)
        return np.asarray(sums.index_add_(0, self.tensors, self.checksums.take().cpu()))

    @property
    def device(self) -> torch.device:
        return self.spans[0].destination.device


def plan_copies(
    model: torch.nn.Module,
    specs: tuple[TensorSpec, ...],
    placements: Sequence[Placement],
    derive: Callable[[], None] | None,
) -> CopyPlan:
    """The plan that copies to ``placements``. Raises UnsupportedModel if the engine holds a tensor in several parts."""
    boxes, spans = _boxes(specs, placements), tuple(_merge(specs, placements))
    checksums = Checksums([TensorBox(span.destination, span.box.first_row, span.box.first_column) for span in spans])
    tensors = torch.tensor([tensor for span in spans for tensor in span.tensors])
    nbytes = sum(span.destination.nbytes for span in spans)
    return CopyPlan(specs, _addresses(model), spans, boxes, checksums, tensors, nbytes, derive)


def _merge(specs: tuple[TensorSpec, ...], placements: Sequence[Placement]) -> Iterator[PlacedSpan]:
    """Merge the placements into spans, in the order of the area."""
    placements = sorted(placements, key=lambda placement: (placement.tensor, placement.box.first_row))
    kinds = [(placed.box, specs[placed.tensor].shape, memory_kind(placed.destination)) for placed in placements]
    offsets = [specs[placed.tensor].offset for placed in placements]
    for span in find_spans(kinds, offsets, [placed.destination.data_ptr() for placed in placements]):
        members = [placements[i] for i in span]
        destination = stack_span([placed.destination for placed in members[:2]], len(members))
        destination = destination.view(INT_OF_SIZE[destination.element_size()])
        yield PlacedSpan(tuple(placed.tensor for placed in members), members[0].box, destination)


def box_of(area: torch.Tensor, spec: TensorSpec, box: Box) -> torch.Tensor:
    """View of a tensor's box in an area: ``[rows, columns]``."""
    matrix = spec.view(area).view(matrix_shape(spec.shape))
    return matrix[box.first_row : box.first_row + box.rows, box.first_column : box.first_column + box.columns]


def _addresses(model: torch.nn.Module) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())


def _boxes(specs: tuple[TensorSpec, ...], placements: Sequence[Placement]) -> np.ndarray:
    """int64[tensors, 4]: the box that each tensor's placements form together; all 0 without placements."""
    boxes = np.zeros((len(specs), 4), np.int64)
    scattered = set()
    for placement in sorted(placements, key=lambda placement: (placement.tensor, placement.box.first_row)):
        box, union = placement.box, boxes[placement.tensor]
        if not union.any():
            union[:] = (box.first_row, 0, box.first_column, box.columns)
        if (box.first_row, box.first_column, box.columns) != (union[0] + union[1], union[2], union[3]):
            scattered.add(specs[placement.tensor].name)
        union[1] += box.rows
    if scattered:
        raise UnsupportedModel(
            f"the engine's loader split these tensors, so they cannot be committed: {list_names(sorted(scattered))}"
        )
    return boxes


# -- loading a version ------------------------------------------------------------------------------------------------

MakePlan = Callable[[torch.nn.Module, torch.Tensor, tuple[TensorSpec, ...]], CopyPlan]
"""Loads a version from an area (uint8) for the first time, and returns the plan for later versions."""
_plans: WeakKeyDictionary[torch.nn.Module, tuple[bytes, CopyPlan]] = WeakKeyDictionary()
"""By model: the plan, and the layout that it is for."""
_open_sheet = lru_cache(maxsize=2)(LoadSheet.open)
_last_load: list[tuple[LoadSheet, int, int]] = []
"""For the last load: its sheet, which decides whether decoding may continue, this rank's row in the sheet, and how many
tokens the prefix cache retains. Empty before the first load."""


def write_order(rank: int, area: bytes, sheet: bytes, retained_tokens: int) -> str:
    """Encode an order for :func:`load` as a tensor name, because SGLang passes only named tensors to a loader.

    Args:
        rank: the engine rank that the order is for.
        area: handle of the area that holds the version.
        sheet: handle of the :class:`LoadSheet`.
        retained_tokens: how many tokens of the prefix cache, the most recently used ones, are retained for
            conversations that continue.
    """
    return json.dumps([rank, retained_tokens, *(base64.b64encode(handle).decode() for handle in (area, sheet))])


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's ``custom_weight_loader``. The name of the only tensor is the order, see :func:`write_order`."""
    run_order(model, named_tensors, load_and_plan)


def verify(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A ``custom_weight_loader`` that loads nothing, and takes checksums of the engine's present parameters.

    Takes the same orders as :func:`load`. Only the area's size is used: its bytes are neither read nor copied.
    """
    run_order(model, named_tensors, partial(load_and_plan, write=False), copy=False)


def load_part(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Like :func:`load`, for versions that fill only some parameters. Call :func:`verify_rest` for the others first."""
    run_order(model, named_tensors, partial(load_and_plan, rest=RestOfModel.VERIFIED))


def verify_rest(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Like :func:`verify`, for the parameters that no version fills."""
    run_order(model, named_tensors, partial(load_and_plan, write=False, rest=RestOfModel.TO_COME), copy=False)


def run_order(
    model: torch.nn.Module,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    make_plan: MakePlan,
    copy: bool = True,
) -> None:
    """Execute an order and report on its sheet.

    Args:
        model: the engine's model.
        named_tensors: one tensor, whose name is the order.
        make_plan: does the first load of a layout.
        copy: whether later loads copy the version, or only take checksums.
    """
    ((order, _),) = named_tensors
    rank, retained_tokens, *handles = json.loads(order)
    area, sheet = base64.b64decode(handles[0]), _open_sheet(base64.b64decode(handles[1]))
    _last_load[:] = [(sheet, rank, retained_tokens)]
    try:
        with torch.no_grad():
            _load(model, area, sheet, rank, make_plan, copy)
        sheet.state[rank, load_report.STATUS] = load_report.LOADED
    except Exception as error:  # any error must be reported, not end the engine
        expected = isinstance(error, UnsupportedModel)
        sheet.fail(rank, str(error) if expected else "".join(traceback.format_exception(error, limit=-6)))


def continue_if_verified(scheduler: Any, original: Callable[..., None], *args: Any) -> None:
    """Replaces SGLang's ``Scheduler.continue_generation``: resume decoding only with the trainer's weights."""
    if not _last_load:
        original(scheduler, *args)
        return
    sheet, rank, retained_tokens = _last_load[0]
    # SGLang synchronises its ranks after a load, so every rank sees the results of all and reaches the same verdict. A
    # rank that resumed alone would wait for the others in the middle of a layer.
    if sheet.judge() is not None:
        return
    paused = time.monotonic() - scheduler._pause_started_at if scheduler._pause_started_at is not None else 0.0
    original(scheduler, *args)
    sheet.state[rank, load_report.PAUSED_NANOSECONDS] = int(paused * 1e9)
    forget_prefixes(scheduler.tree_cache, retained_tokens)


def forget_prefixes(cache: Any, retained_tokens: int = 0) -> None:
    """Evict from SGLang's prefix cache what no running request holds, except the ``retained_tokens`` used last.

    Entries belong to the version under which their conversations began, and conversations that begin later use a newer
    version. SGLang itself would keep old entries until its KV cache is full: hundreds of versions of a small model,
    with a kilobyte of Python objects per entry.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tokens = cache.evictable_size() - retained_tokens
    if tokens > 0:
        cache.evict(EvictParams(num_tokens=tokens))  # SGLang evicts the least recently used entries first


def _load(model: torch.nn.Module, area: bytes, sheet: LoadSheet, rank: int, make_plan: MakePlan, copy: bool) -> None:
    started = time.perf_counter_ns()
    # Steps that are enqueued already still read the parameters that are overwritten next.
    finish_device(next(model.parameters()).device)
    layout, plan = _plans.get(model, (b"", None))
    planned = plan is not None and layout == sheet.layout and plan.fits(model)
    if plan is None or not planned:
        plan = make_plan(model, attach(area), sheet.specs)
        _plans[model] = sheet.layout, plan
    sheet.boxes[rank] = plan.boxes
    blocks, sources, device = plan.checksums.blocks, plan.sources_in(area), plan.device
    # On a CPU copy and sum block by block: the core still has the block in its cache. A device is kept busy by many
    # calls in a row.
    fused = device.type == "cpu" and plan.derive is None
    groups = [slice(i, i + 1) for i in range(len(blocks))] if fused else [slice(None)]
    copied, summed, before = time.perf_counter_ns() - started, 0, time.perf_counter_ns()
    for group in groups:
        if planned and copy:
            for block, source in zip(blocks[group], sources[group], strict=True):
                torch._foreach_copy_(block.data, source)
            if plan.derive is not None:
                plan.derive()
            finish_device(device)  # so that the measured time, which is reported to another process, is the copy's
        between = time.perf_counter_ns()
        for block in blocks[group]:
            block.add()
        after = time.perf_counter_ns()
        copied, summed, before = copied + between - before, summed + after - between, after
    sheet.checksums[rank] = plan.take_checksums()
    sheet.state[rank, load_report.COPY_NANOSECONDS] = copied
    sheet.state[rank, load_report.CHECKSUM_NANOSECONDS] = summed + time.perf_counter_ns() - before
    sheet.state[rank, load_report.BYTES] = plan.nbytes


# -- tracing: finding where an engine rank holds each tensor ----------------------------------------------------------
# SGLang's parameters differ from Hugging Face's: q, k and v are fused, experts are stacked, the vocabulary is padded,
# and each rank of a tensor-parallel engine holds some rows or columns. SGLang's models can load Hugging Face tensors,
# so ``model.load_weights`` is called on views of an area while a dispatch mode records each copy from the area into a
# parameter. This works for any model whose loader only copies.

_verified: WeakKeyDictionary[torch.nn.Module, frozenset[str]] = WeakKeyDictionary()
"""By model: parameters that no version fills, and whose checksums were taken before the first version."""


class RestOfModel(Enum):
    """What is known about the parameters that a set of tensors does not fill."""

    REFUSED = "there may be none"
    TO_COME = "every version will fill them"
    VERIFIED = "their checksums have been taken, to be compared, and nothing has changed them since"


class _CopyTrace(TorchDispatchMode):
    """Records every ``copy_`` from one storage into the storages of parameters.

    Args:
        source: a tensor in the storage that is copied from.
        parameters: names of the parameters, by the address of their storage.
        write: False skips every operation that would change a parameter.
    """

    def __init__(self, source: torch.Tensor, parameters: dict[int, str], write: bool) -> None:
        super().__init__()
        self._write = write
        self._source = source.untyped_storage().data_ptr()
        self._parameters = parameters
        self._joined: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """By address: tensors that the loader concatenated by rows from tensors of the source, and these tensors."""
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Destination and source of each copy."""
        self.written: set[str] = set()
        """Parameters that were copied into."""
        self.converted: dict[str, str] = {}
        """Parameters that were changed other than by a copy or a fill, and the operation that did so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is not None and name.endswith("_") and not name.endswith("__"):
            parameter = self._parameters.get(target.untyped_storage().data_ptr())
            if parameter is not None:
                self._record(parameter, name, target, args[1] if name == "copy_" else None)
                if not self._write:
                    return target
        result = func(*args, **(kwargs or {}))
        by_rows = name == "cat" and args[1:] in ((), (0,))
        if by_rows and all(part.untyped_storage().data_ptr() == self._source for part in args[0]):
            self._joined[result.untyped_storage().data_ptr()] = result, [part.detach() for part in args[0]]
        return result

    def _record(self, parameter: str, operation: str, target: torch.Tensor, source: torch.Tensor | None) -> None:
        """Record an in-place operation on a parameter. ``source`` is None unless it is a copy."""
        parts = self._parts(source) if source is not None else []
        if source is not None and parts and target.shape == source.shape:
            self.copies += zip(target.detach().split([len(part) for part in parts]), parts, strict=True)
            self.written.add(parameter)
        elif source is not None and source.untyped_storage().data_ptr() == self._source:
            self.copies.append((target.detach(), source.detach()))
            self.written.add(parameter)
        elif operation not in ("fill_", "zero_"):
            self.converted[parameter] = operation

    def _parts(self, source: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of which the loader concatenated the whole of ``source``; empty if it did not."""
        whole, parts = self._joined.get(source.untyped_storage().data_ptr(), (None, []))
        return parts if whole is not None and whole.shape == source.shape else []


def load_and_plan(
    model: torch.nn.Module,
    area: torch.Tensor,
    specs: tuple[TensorSpec, ...],
    write: bool = True,
    rest: RestOfModel = RestOfModel.REFUSED,
) -> CopyPlan:
    """Load through the model's own loader and record where each tensor goes.

    Args:
        model: SGLang's model.
        area: uint8, holds all tensors.
        specs: the tensors' specs.
        write: False records where the tensors would go, and changes no parameter.
        rest: what is known about the parameters that no tensor fills.

    Raises UnsupportedModel if later commits could not simply copy, if checksums could not be compared, or if
    parameters that no tensor fills contradict ``rest``.
    """
    parameters = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
    _check_dtypes(model, specs)
    named = [(spec.name, spec.view(area)) for spec in specs]  # outside the mode, which would inspect each operation
    with _CopyTrace(area, parameters, write) as trace:
        cast(Any, model).load_weights(named)
    if trace.converted:
        raise UnsupportedModel(
            f"the engine's loader computes these parameters instead of copying them, so they cannot be committed: "
            f"{list_names(f'{name} ({how})' for name, how in trace.converted.items())}"
        )
    placements = tuple(_place(area, specs, destination, source) for destination, source in trace.copies)
    if rest is RestOfModel.TO_COME:
        _verified[model] = frozenset(trace.written)
        return plan_copies(model, specs, placements, None)
    verified = _verified.get(model, frozenset()) if rest is RestOfModel.VERIFIED else frozenset()
    untouched = [name for name in parameters.values() if name not in trace.written | verified]
    if untouched:
        nor = ", nor were they verified before the first version" if rest is RestOfModel.VERIFIED else ""
        raise UnsupportedModel(
            f"no tensor that was sent fills these parameters of the engine{nor}: {list_names(untouched)}"
        )
    # Some models derive values from their parameters. Their load_weights calls this function itself.
    return plan_copies(model, specs, placements, getattr(model, "post_load_weights", None))


def _check_dtypes(model: torch.nn.Module, specs: tuple[TensorSpec, ...]) -> None:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    foreign = [spec.name for spec in specs if spec.dtype not in dtypes]
    if foreign:
        raise UnsupportedModel(
            f"these tensors were sent in a dtype that the engine does not serve: {list_names(foreign)}. The engine "
            f"holds {sorted(map(str, dtypes))}: serve the dtype that is sent, or send the dtype that is served."
        )


def _place(
    area: torch.Tensor, specs: tuple[TensorSpec, ...], destination: torch.Tensor, source: torch.Tensor
) -> Placement:
    start = (source.data_ptr() - area.data_ptr()) if source.numel() else 0
    index = bisect_right(specs, start, key=lambda spec: spec.offset) - 1
    spec = specs[index]
    box = _find_box(source, (start - spec.offset) // spec.dtype.itemsize, matrix_shape(spec.shape)[1])
    matrix = _as_rows(destination, box) if box is not None and destination.shape == source.shape else None
    if box is None or matrix is None or not source.dtype == destination.dtype == spec.dtype:
        raise UnsupportedModel(
            f"the engine does not store {spec.name} row by row in {spec.dtype}: its loader takes shape "
            f"{tuple(source.shape)}, strides {source.stride()}, {source.dtype} from the area and stores "
            f"{tuple(destination.shape)}, strides {destination.stride()}, {destination.dtype}. Transposed, broadcast "
            "or converted parameters cannot be committed."
        )
    return Placement(index, box, matrix)


def _find_box(source: torch.Tensor, first: int, width: int) -> Box | None:
    """The box of a tensor that a view covers; None if it is not a box.

    Args:
        source: the view.
        first: index of the view's first element in the tensor.
        width: elements per row of the tensor.
    """
    dimensions = _merged_dimensions(source.shape, source.stride())
    first_row, first_column = divmod(first, width)
    if len(dimensions) == 2 and dimensions[0][1] == width and dimensions[1][1] == 1:
        rows, columns = dimensions[0][0], dimensions[1][0]
    elif len(dimensions) == 1 and dimensions[0][1] == 1:
        elements = dimensions[0][0]
        rows, columns = (elements // width, width) if elements % width == 0 else (1, elements)
    elif len(dimensions) == 1 and dimensions[0][1] == width:
        rows, columns = dimensions[0][0], 1
    elif not dimensions:
        rows, columns = 1, 1
    else:
        return None
    return Box(first_row, rows, first_column, columns) if first_column + columns <= width else None


def _merged_dimensions(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides, without dimensions of size one, and with contiguous neighbours merged."""
    dimensions: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dimensions and dimensions[-1][1] == size * stride:
            dimensions[-1] = (dimensions[-1][0] * size, stride)
        else:
            dimensions.append((size, stride))
    return dimensions


def _as_rows(destination: torch.Tensor, box: Box) -> torch.Tensor | None:
    try:
        matrix = destination.view(box.rows, box.columns)
    except RuntimeError:
        return None
    if box.columns == 1:
        return matrix.as_strided(matrix.shape, (matrix.stride(0), 1))
    return matrix if matrix.stride(1) == 1 else None
