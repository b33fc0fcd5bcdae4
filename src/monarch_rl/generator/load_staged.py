"""Runs inside SGLang's scheduler: puts a version that lies in a shared area into the engine's parameters.

The first commit goes through SGLang's own loader and finds for every tensor which box of it lies where in this rank
(:func:`trace_copies`). That is the :class:`CopyPlan`, for any area that is laid out alike. Later commits replay
it: each piece is copied and, while it is still in the core's cache, read back from the parameter into its checksum.

Nothing may be raised here: an exception in the scheduler ends the engine. Answers go through :class:`LoadSheet`.
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

from monarch_rl.generator import load_report
from monarch_rl.generator.load_report import Box, LoadSheet, matrix_shape
from monarch_rl.runtime.streams import finish_device
from monarch_rl.weights.area import attach
from monarch_rl.weights.blocks import TensorBox, find_runs, memory_kind, stack_run
from monarch_rl.weights.checksum import Checksums
from monarch_rl.weights.manifest import INT_OF_SIZE, TensorSpec, list_names

# -- the copy plan: where an engine rank holds each tensor of a version, for later versions, too ----------------------
# Tensors that are alike and lie at equal distances, in the area as in the parameter, are copied and summed together:
# one projection of all experts of a layer, say (``weights/blocks.py``).

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


# -- loading a version ------------------------------------------------------------------------------------------------

MakePlan = Callable[[torch.nn.Module, torch.Tensor, tuple[TensorSpec, ...]], CopyPlan]
"""Loads a version from an area (uint8) for the first time, and says where everything went."""
_plans: WeakKeyDictionary[torch.nn.Module, tuple[bytes, CopyPlan]] = WeakKeyDictionary()
"""By model: the layout that the plan is for, and the plan."""
_open_sheet = lru_cache(maxsize=2)(LoadSheet.open)
_last_load: list[tuple[LoadSheet, int, int]] = []
"""The sheet of the last load, which says whether decoding may go on, this rank's row in it, and how many tokens the
prefix cache is to keep."""


def write_order(rank: int, area: bytes, sheet: bytes, mask_tokens: int) -> str:
    """Write what :func:`load` is to do as a name, because SGLang hands over nothing else beside tensors.

    Args:
        rank: of the engine rank that is asked.
        area: handle of the area that holds the version.
        sheet: handle of the :class:`LoadSheet`.
        kept_tokens: how many tokens of the prefix cache, those used last, are kept for conversations that go on.
    """
    return json.dumps([rank, mask_tokens, *(base64.b64encode(handle).decode() for handle in (area, sheet))])


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's ``custom_weight_loader``; the name of the only tensor is the order, see :func:`write_order`."""
    run_order(model, named_tensors, load_and_plan)


def verify(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A ``custom_weight_loader`` that loads nothing: it takes checksums of what the engine holds already.

    Takes orders like :func:`load`. Of the area only the size counts: its bytes are neither read nor copied.
    """
    run_order(model, named_tensors, partial(load_and_plan, write=False), copy=False)


def load_part(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Like :func:`load`, for versions that fill some parameters: :func:`verify_rest` must have seen the rest."""
    run_order(model, named_tensors, partial(load_and_plan, rest=RestOfModel.VERIFIED))


def verify_rest(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Like :func:`verify`, for some of the parameters: those that no version fills."""
    run_order(model, named_tensors, partial(load_and_plan, write=False, rest=RestOfModel.TO_COME), copy=False)


def run_order(
    model: torch.nn.Module,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    make_plan: MakePlan,
    copy: bool = True,
) -> None:
    """Do what an order says and answer on its sheet; the first load of a layout is done by ``make_plan``."""
    ((order, _),) = named_tensors
    rank, mask_tokens, *handles = json.loads(order)
    area, sheet = base64.b64decode(handles[0]), _open_sheet(base64.b64decode(handles[1]))
    _last_load[:] = [(sheet, rank, mask_tokens)]
    try:
        with torch.no_grad():
            _load(model, area, sheet, rank, make_plan, copy)
        sheet.state[rank, load_report.STATUS] = load_report.LOADED
    except Exception as error:  # whatever it is, the engine must live to say it
        known = isinstance(error, UnsupportedModel)
        sheet.fail(rank, str(error) if known else "".join(traceback.format_exception(error, limit=-6)))


def continue_if_verified(scheduler: Any, original: Callable[..., None], *args: Any) -> None:
    """Replaces SGLang's ``Scheduler.continue_generation``: decode on only if the last load is the trainer's.

    SGLang lets its ranks meet after a load, so all of them see the answers of all, and come to one verdict: a rank that
    went on alone would wait for the others in the middle of a layer.
    """
    if not _last_load:
        original(scheduler, *args)
        return
    sheet, rank, mask_tokens = _last_load[0]
    if sheet.judge() is not None:
        return
    stood = time.monotonic() - scheduler._pause_started_at if scheduler._pause_started_at is not None else 0.0
    original(scheduler, *args)
    sheet.state[rank, load_report.STOOD_NANOSECONDS] = int(stood * 1e9)
    forget_prefixes(scheduler.tree_cache, mask_tokens)


def forget_prefixes(cache: Any, mask_tokens: int = 0) -> None:
    """Empty SGLang's prefix cache of what no running request holds, but for the ``mask_tokens`` that were used last.

    Entries belong to the version under which their conversations began, and those that begin later ask for a newer
    one. SGLang itself would keep them until its KV cache is full: hundreds of versions of a small model, a kilobyte of
    Python objects an entry.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tokens = cache.evictable_size() - mask_tokens
    if tokens > 0:
        cache.evict(EvictParams(num_tokens=tokens))  # SGLang begins with what was used longest ago


def _load(model: torch.nn.Module, area: bytes, sheet: LoadSheet, rank: int, make_plan: MakePlan, copy: bool) -> None:
    started = time.perf_counter_ns()
    # Enqueued steps read the parameters that are overwritten next.
    finish_device(next(model.parameters()).device)
    layout, plan = _plans.get(model, (b"", None))
    planned = plan is not None and layout == sheet.layout and plan.fits(model)
    if plan is None or not planned:
        plan = make_plan(model, attach(area), sheet.specs)
        _plans[model] = sheet.layout, plan
    sheet.boxes[rank] = plan.boxes
    blocks, sources, device = plan.checksums.blocks, plan.sources_in(area), plan.device
    # A core finds in its cache what it has just copied; a device is kept busy by long runs of calls.
    fused = device.type == "cpu" and plan.derive is None
    groups = [slice(i, i + 1) for i in range(len(blocks))] if fused else [slice(None)]
    copied, summed, before = time.perf_counter_ns() - started, 0, time.perf_counter_ns()
    for group in groups:
        if planned and copy:
            for block, source in zip(blocks[group], sources[group], strict=True):
                torch._foreach_copy_(block.data, source)
            if plan.derive is not None:
                plan.derive()
            finish_device(device)  # the copy is timed, and its end is reported to another process
        between = time.perf_counter_ns()
        for block in blocks[group]:
            block.add()
        after = time.perf_counter_ns()
        copied, summed, before = copied + between - before, summed + after - between, after
    sheet.checksums[rank] = plan.take_checksums()
    sheet.state[rank, load_report.COPY_NANOSECONDS] = copied
    sheet.state[rank, load_report.CHECKSUM_NANOSECONDS] = summed + time.perf_counter_ns() - before
    sheet.state[rank, load_report.BYTES] = plan.nbytes


# -- tracing: where each tensor lives in an engine rank, by watching SGLang's own loader fill the model ---------------
# SGLang's parameters are not Hugging Face's: q, k and v are fused, experts are stacked, the vocabulary is padded, and
# each rank of a tensor-parallel engine holds its rows or columns. Its models know how to load Hugging Face tensors,
# so ``model.load_weights`` is called on views of an area while a dispatch mode notes each copy from the area into a
# parameter. This works for any model whose loader only copies.

_verified: WeakKeyDictionary[torch.nn.Module, frozenset[str]] = WeakKeyDictionary()
"""By model: parameters that no version fills, of which checksums were taken before the first version."""


class RestOfModel(Enum):
    """What the parameters are that a set of tensors leaves alone."""

    REFUSED = "there may be none"
    TO_COME = "every version will fill them"
    VERIFIED = "their checksums have been taken, to be compared, and nothing has changed them since"


class _CopyTrace(TorchDispatchMode):
    """Notes every ``copy_`` from one storage into the storages of parameters.

    Unless it is to ``write``, nothing that would change a parameter is done.
    """

    def __init__(self, source: torch.Tensor, parameters: dict[int, str], write: bool) -> None:
        super().__init__()
        self._write = write
        self._source = source.untyped_storage().data_ptr()
        self._parameters = parameters
        self._joined: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """By address: tensors that the loader made of several of the source, one after the other, by rows."""
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Destination and source of each."""
        self.written: set[str] = set()
        self.converted: dict[str, str] = {}
        """Parameters that were written otherwise than by a copy or a fill, and how."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is not None and name.endswith("_") and not name.endswith("__"):
            parameter = self._parameters.get(target.untyped_storage().data_ptr())
            if parameter is not None:
                self._note(parameter, name, target, args[1] if name == "copy_" else None)
                if not self._write:
                    return target
        result = func(*args, **(kwargs or {}))
        by_rows = name == "cat" and args[1:] in ((), (0,))
        if by_rows and all(part.untyped_storage().data_ptr() == self._source for part in args[0]):
            self._joined[result.untyped_storage().data_ptr()] = result, [part.detach() for part in args[0]]
        return result

    def _note(self, parameter: str, operation: str, target: torch.Tensor, source: torch.Tensor | None) -> None:
        """An in-place operation on a parameter; ``source`` if it is a copy."""
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
        """The tensors that all of ``source`` was made of, if the loader did so."""
        whole, parts = self._joined.get(source.untyped_storage().data_ptr(), (None, []))
        return parts if whole is not None and whole.shape == source.shape else []


def load_and_plan(
    model: torch.nn.Module,
    area: torch.Tensor,
    specs: tuple[TensorSpec, ...],
    write: bool = True,
    rest: RestOfModel = RestOfModel.REFUSED,
) -> CopyPlan:
    """Load through the model's own loader and note where everything went, or would go.

    Args:
        model: SGLang's.
        area: uint8, holds all tensors.
        specs: of the tensors.
        write: change the parameters.
        rest: what the parameters are that no tensor fills.

    Raises UnsupportedModel where a later commit could not simply copy, or the checksum not be compared, or where the
    parameters that are left alone are not what ``rest`` says.
    """
    parameters = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
    _check_dtypes(model, specs)
    named = [(spec.name, spec.view(area)) for spec in specs]  # before the mode looks at each operation
    with _CopyTrace(area, parameters, write) as trace:
        cast(Any, model).load_weights(named)
    if trace.converted:
        raise UnsupportedModel(
            f"the engine's loader changes these parameters instead of copying into them: "
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
    # Some models compute from their parameters; their load_weights calls this itself.
    return plan_copies(model, specs, placements, getattr(model, "post_load_weights", None))


def _check_dtypes(model: torch.nn.Module, specs: tuple[TensorSpec, ...]) -> None:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    foreign = [spec.name for spec in specs if spec.dtype not in dtypes]
    if foreign:
        raise UnsupportedModel(
            f"sent in a dtype that the engine does not serve ({list_names(foreign)}); the engine holds "
            f"{sorted(map(str, dtypes))}. Serve in the dtype that is sent, or send in the dtype that is served."
        )


def _place(
    area: torch.Tensor, specs: tuple[TensorSpec, ...], destination: torch.Tensor, source: torch.Tensor
) -> Placement:
    start = (source.data_ptr() - area.data_ptr()) if source.numel() else 0
    index = bisect_right(specs, start, key=lambda spec: spec.offset) - 1
    spec = specs[index]
    box = _find_box(source, (start - spec.offset) // spec.dtype.itemsize, matrix_shape(spec.shape)[1])
    held = _as_rows(destination, box) if box is not None and destination.shape == source.shape else None
    if box is None or held is None or not source.dtype == destination.dtype == spec.dtype:
        raise UnsupportedModel(
            f"{spec.name} is not held row by row in {spec.dtype}: the engine's loader takes shape "
            f"{tuple(source.shape)}, strides {source.stride()}, {source.dtype} from the area and stores "
            f"{tuple(destination.shape)}, strides {destination.stride()}, {destination.dtype}. Transposed, broadcast "
            "or converted parameters cannot be committed."
        )
    return Placement(index, box, held)


def _find_box(source: torch.Tensor, first: int, width: int) -> Box | None:
    """The box that a view of a tensor with rows of ``width`` elements takes up, from element ``first`` on."""
    runs = _runs(source.shape, source.stride())
    first_row, first_column = divmod(first, width)
    if len(runs) == 2 and runs[0][1] == width and runs[1][1] == 1:
        rows, columns = runs[0][0], runs[1][0]
    elif len(runs) == 1 and runs[0][1] == 1:
        elements = runs[0][0]
        rows, columns = (elements // width, width) if elements % width == 0 else (1, elements)
    elif len(runs) == 1 and runs[0][1] == width:
        rows, columns = runs[0][0], 1
    elif not runs:
        rows, columns = 1, 1
    else:
        return None
    return Box(first_row, rows, first_column, columns) if first_column + columns <= width else None


def _runs(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides without dimensions of size one, neighbours that lie in one line taken together."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs


def _as_rows(destination: torch.Tensor, box: Box) -> torch.Tensor | None:
    try:
        held = destination.view(box.rows, box.columns)
    except RuntimeError:
        return None
    if box.columns == 1:
        return held.as_strided(held.shape, (held.stride(0), 1))
    return held if held.stride(1) == 1 else None
