"""Runs inside SGLang's scheduler: puts a version that lies in a shared area into the engine's parameters.

SGLang's parameters are not Hugging Face's: q, k and v are fused, experts are stacked, the vocabulary is padded, and
each rank of a tensor-parallel engine holds its rows or columns. Its models know how to load Hugging Face tensors, so
the first commit calls ``model.load_weights`` on views of the area while a dispatch mode notes each copy from the area
into a parameter. That is the plan: for every tensor, which box of it lies where in this rank. It holds for any model
whose loader only copies, and for any area that is laid out alike. Later commits replay it: each piece is copied and,
while it is still in the core's cache, read back from the parameter into its checksum.

Nothing may be raised here: an exception in the scheduler ends the engine. Answers go through :class:`LoadSheet`.
"""

from __future__ import annotations

import base64
import json
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_rl.generator import load_report as answers
from monarch_rl.generator.load_report import Box, LoadSheet, matrix_shape
from monarch_rl.weights.area import attach
from monarch_rl.weights.checksum import Checksums, TensorBox
from monarch_rl.weights.manifest import TensorSpec, list_names

AREAS = 2
"""Areas whose mappings are kept; versions arrive in them in turn."""


class UnsupportedModel(ValueError):
    """The model's loader does more than copy, so that what it loads cannot be replayed or verified."""


@dataclass(frozen=True, slots=True)
class Place:
    """A box of a tensor and where this rank holds it."""

    tensor: int
    """Index into the manifest."""
    box: Box
    destination: torch.Tensor
    """View of a parameter, ``[rows, columns]`` of the box."""


@dataclass(slots=True)
class Plan:
    """All places of a model, for any area of one layout."""

    specs: tuple[TensorSpec, ...]
    addresses: tuple[int, ...]
    """Of the model's parameters when the plan was made: if one has moved, the plan is void."""
    places: tuple[Place, ...]
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
            boxes = [box_of(buffer, self.specs[place.tensor], place.box) for place in self.places]
            self.sources[area] = [boxes[piece.box][piece.rows] for piece in self.checksums.blocks]
        return self.sources[area]

    @property
    def nbytes(self) -> int:
        return sum(place.destination.nbytes for place in self.places)


Planner = Callable[[torch.nn.Module, torch.Tensor, tuple[TensorSpec, ...]], Plan]
"""Loads a version from an area (uint8) for the first time, and says where everything went."""
_plans: WeakKeyDictionary[torch.nn.Module, Plan] = WeakKeyDictionary()
_seen: WeakKeyDictionary[torch.nn.Module, frozenset[str]] = WeakKeyDictionary()
"""Parameters of which :func:`verify_rest` took the checksums."""
_open = lru_cache(maxsize=2)(LoadSheet.open)
_last: list[tuple[LoadSheet, int]] = []
"""The sheet of the last load, which says whether decoding may go on, and this rank's row in it."""


def write_order(rank: int, area: bytes, sheet: bytes) -> str:
    """What :func:`load` is asked to do, as a name: the one thing that SGLang hands over beside tensors.

    Args:
        rank: of the engine rank that is asked.
        area: handle of the area that holds the version.
        sheet: handle of the :class:`LoadSheet`.
    """
    return json.dumps([rank, *(base64.b64encode(handle).decode() for handle in (area, sheet))])


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's ``custom_weight_loader``; the name of the only tensor is the order, see :func:`write_order`."""
    run_order(model, named_tensors, _load_and_plan)


def verify(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A ``custom_weight_loader`` that loads nothing: checksums of what the engine holds already.

    Takes orders like :func:`load`. Of the area only the size counts: its bytes are neither read nor copied.
    """
    run_order(model, named_tensors, partial(_load_and_plan, write=False), copy=False)


def load_part(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Like :func:`load`, of a version that fills some parameters: :func:`verify_rest` must have seen the rest."""
    run_order(model, named_tensors, partial(_load_and_plan, rest=_Rest.VERIFIED))


def verify_rest(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Like :func:`verify`, of some of the parameters: those that no version fills."""
    run_order(model, named_tensors, partial(_load_and_plan, write=False, rest=_Rest.TO_COME), copy=False)


def run_order(
    model: torch.nn.Module,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    make_plan: Planner,
    copy: bool = True,
) -> None:
    """Do what an order says and answer on its sheet; the first load of a layout is done by ``make_plan``."""
    ((order, _),) = named_tensors
    rank, *handles = json.loads(order)
    area, sheet = base64.b64decode(handles[0]), _open(base64.b64decode(handles[1]))
    _last[:] = [(sheet, rank)]
    try:
        with torch.no_grad():
            _load(model, area, sheet, rank, make_plan, copy)
        sheet.state[rank, answers.STATUS] = answers.LOADED
    except Exception as error:  # whatever it is, the engine must live to say it
        known = isinstance(error, UnsupportedModel)
        sheet.fail(rank, str(error) if known else "".join(traceback.format_exception(error, limit=-6)))


def continue_if_verified(scheduler: Any, original: Callable[..., None], *args: Any) -> None:
    """In the place of SGLang's ``Scheduler.continue_generation``: decode on only if the last load is the trainer's.

    SGLang lets its ranks meet after a load, so all of them see the answers of all, and come to one verdict: a rank that
    went on alone would wait for the others in the middle of a layer.
    """
    if not _last:
        original(scheduler, *args)
        return
    sheet, rank = _last[0]
    if sheet.judge() is not None:
        return
    stood = time.monotonic() - scheduler._pause_started_at if scheduler._pause_started_at is not None else 0.0
    original(scheduler, *args)
    sheet.state[rank, answers.STOOD_NANOSECONDS] = int(stood * 1e9)


def _load(model: torch.nn.Module, area: bytes, sheet: LoadSheet, rank: int, make_plan: Planner, copy: bool) -> None:
    started = time.perf_counter_ns()
    plan = _plans.get(model)
    planned = plan is not None and plan.fits(model, sheet.specs)
    if plan is None or not planned:
        plan = _plans[model] = make_plan(model, attach(area), sheet.specs)
    sheet.boxes[rank] = plan.boxes
    pieces, sources = plan.checksums.blocks, plan.sources_in(area)
    device = plan.places[0].destination.device
    # A core finds in its cache what it has just copied; a device is kept busy by long runs of calls.
    fused = device.type == "cpu" and plan.derive is None
    groups = [slice(i, i + 1) for i in range(len(pieces))] if fused else [slice(None)]
    copied, summed, before = time.perf_counter_ns() - started, 0, time.perf_counter_ns()
    for group in groups:
        if planned and copy:
            for piece, source in zip(pieces[group], sources[group], strict=True):
                piece.data.copy_(source)
            if plan.derive is not None:
                plan.derive()
            _synchronize(device)
        between = time.perf_counter_ns()
        for piece in pieces[group]:
            piece.add()
        after = time.perf_counter_ns()
        copied, summed, before = copied + between - before, summed + after - between, after
    sheet.checksums[rank] = _by_tensor(plan, plan.checksums.take().cpu())
    sheet.state[rank, answers.COPY_NANOSECONDS] = copied
    sheet.state[rank, answers.CHECKSUM_NANOSECONDS] = summed + time.perf_counter_ns() - before
    sheet.state[rank, answers.BYTES] = plan.nbytes


def _by_tensor(plan: Plan, by_place: torch.Tensor) -> Any:
    tensors = torch.tensor([place.tensor for place in plan.places])
    return torch.zeros(len(plan.specs), dtype=torch.int64).index_add_(0, tensors, by_place).numpy()


def _synchronize(device: torch.device) -> None:
    """Another process reads the results: they must be there, not only enqueued."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _addresses(model: torch.nn.Module) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())


def box_of(area: torch.Tensor, spec: TensorSpec, box: Box) -> torch.Tensor:
    """A box of a tensor as a view of the area that holds it: ``[rows, columns]``."""
    matrix = spec.view(area).view(matrix_shape(spec.shape))
    return matrix[box.first_row : box.first_row + box.rows, box.first_column : box.first_column + box.columns]


# ---- finding where each tensor lives -------------------------------------------------------------------------


class _Copies(TorchDispatchMode):
    """Notes every ``copy_`` from one storage into the storages of parameters.

    Unless it is to ``write``, nothing that would change a parameter is done.
    """

    def __init__(self, source: torch.Tensor, parameters: dict[int, str], write: bool) -> None:
        super().__init__()
        self._write = write
        self._source = source.untyped_storage().data_ptr()
        self._parameters = parameters
        self._joined: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """By place in memory: tensors that the loader made of several of the source, one after the other, by rows."""
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.written: set[str] = set()
        self.converted: dict[str, str] = {}
        """Parameters that were written otherwise than by a copy or a fill, and how."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is not None and name.endswith("_") and not name.endswith("__"):
            parameter = self._parameters.get(target.untyped_storage().data_ptr())
            source = args[1] if name == "copy_" else None
            parts = self._parts(source) if source is not None else []
            if parameter and source is not None and parts and target.shape == source.shape:
                rows = [len(part) for part in parts]
                self.seen += zip(target.detach().split(rows), parts, strict=True)
                self.written.add(parameter)
            elif parameter and source is not None and source.untyped_storage().data_ptr() == self._source:
                self.seen.append((target.detach(), source.detach()))
                self.written.add(parameter)
            elif parameter and name not in ("fill_", "zero_"):
                self.converted[parameter] = name
            if parameter and not self._write:
                return target
        result = func(*args, **(kwargs or {}))
        by_rows = name == "cat" and args[1:] in ((), (0,))
        if by_rows and all(part.untyped_storage().data_ptr() == self._source for part in args[0]):
            self._joined[result.untyped_storage().data_ptr()] = result, [part.detach() for part in args[0]]
        return result

    def _parts(self, source: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that all of ``source`` was made of, if the loader did so."""
        whole, parts = self._joined.get(source.untyped_storage().data_ptr(), (None, []))
        return parts if whole is not None and whole.shape == source.shape else []


class _Rest(Enum):
    """What the parameters are that a set of tensors leaves alone."""

    REFUSED = "there may be none"
    TO_COME = "every version will fill them"
    VERIFIED = "their checksums have been taken, to be compared, and nothing has changed them since"


def _load_and_plan(
    model: torch.nn.Module,
    area: torch.Tensor,
    specs: tuple[TensorSpec, ...],
    write: bool = True,
    rest: _Rest = _Rest.REFUSED,
) -> Plan:
    """Load through the model's own loader and note where everything went, or would go.

    Raises UnsupportedModel where a later commit could not simply copy, or the checksum not be compared, or where the
    parameters that are left alone are not what ``rest`` says.
    """
    parameters = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
    dtypes = {parameter.dtype for parameter in model.parameters()}
    foreign = [spec.name for spec in specs if spec.dtype not in dtypes]
    if foreign:
        raise UnsupportedModel(
            f"sent in a dtype that the engine does not serve ({list_names(foreign)}); the engine holds "
            f"{sorted(map(str, dtypes))}. Serve in the dtype that is sent, or send in the dtype that is served."
        )
    with _Copies(area, parameters, write) as copies:
        cast(Any, model).load_weights([(spec.name, spec.view(area)) for spec in specs])
    if copies.converted:
        raise UnsupportedModel(
            f"the engine's loader changes these parameters instead of copying into them: "
            f"{list_names(f'{name} ({how})' for name, how in copies.converted.items())}"
        )
    places = tuple(_place(area, specs, destination, source) for destination, source in copies.seen)
    if rest is _Rest.TO_COME:
        _seen[model] = frozenset(copies.written)
        return plan_of(model, specs, places, None)
    verified = _seen.get(model, frozenset()) if rest is _Rest.VERIFIED else frozenset()
    untouched = [name for name in parameters.values() if name not in copies.written | verified]
    if untouched:
        nor = ", nor were they verified before the first version" if rest is _Rest.VERIFIED else ""
        raise UnsupportedModel(
            f"no tensor that was sent fills these parameters of the engine{nor}: {list_names(untouched)}"
        )
    # Some models compute from their parameters; their load_weights calls this itself.
    return plan_of(model, specs, places, getattr(model, "post_load_weights", None))


def plan_of(
    model: torch.nn.Module, specs: tuple[TensorSpec, ...], places: Sequence[Place], derive: Callable[[], None] | None
) -> Plan:
    """The plan to copy to ``places``. Raises UnsupportedModel if they hold a tensor in several parts."""
    held = [TensorBox(place.destination, place.box.first_row, place.box.first_column) for place in places]
    return Plan(specs, _addresses(model), tuple(places), _boxes(specs, places), Checksums(held), derive)


def _place(area: torch.Tensor, specs: tuple[TensorSpec, ...], destination: torch.Tensor, source: torch.Tensor) -> Place:
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
    return Place(index, box, held)


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


def _boxes(specs: tuple[TensorSpec, ...], places: Sequence[Place]) -> np.ndarray:
    """int64[tensors, 4]: the box of each tensor that its places make up; all 0 if there is none."""
    boxes = np.zeros((len(specs), 4), np.int64)
    scattered = set()
    for place in sorted(places, key=lambda place: (place.tensor, place.box.first_row)):
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
