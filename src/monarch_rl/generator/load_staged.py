"""Runs inside SGLang's scheduler: puts a staged version into the engine's parameters.

SGLang's parameters are not Hugging Face's: q, k and v are fused, experts are stacked, the vocabulary is padded.
Its models know how to load Hugging Face tensors, so the first commit calls ``model.load_weights`` on views of
staging while a dispatch mode notes each copy from staging into a parameter. That is the plan: for every staged
tensor, where each run of its rows lives in the engine. It holds for any model whose loader only copies. Later
commits replay the plan, one local copy, and checksum the same places in the engine's own memory.

Nothing may be raised here: an exception in the scheduler ends the engine. Answers go through ``Staging``.
"""

from __future__ import annotations

import time
import traceback
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_rl.weights import staging as answers
from monarch_rl.weights.checksum import tensor_checksum
from monarch_rl.weights.manifest import TensorSpec, list_names


class UnsupportedModel(ValueError):
    """The model's loader does more than copy, so that what it loads cannot be replayed or verified."""


@dataclass(frozen=True, slots=True)
class Place:
    """Whole rows of a staged tensor and where the engine holds them."""

    tensor: int
    """Index into the manifest."""
    first_row: int
    source: torch.Tensor
    """View of staging."""
    destination: torch.Tensor
    """View of a parameter; same shape and dtype as ``source``."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All places of a model, for one staging area."""

    staging: torch.Tensor
    """Kept, so that the mapping of the shared memory stays too."""
    addresses: tuple[int, ...]
    """Of the model's parameters when the plan was made: if one has moved, the plan is void."""
    places: tuple[Place, ...]

    def fits(self, model: torch.nn.Module, staging: torch.Tensor) -> bool:
        return staging.data_ptr() == self.staging.data_ptr() and _addresses(model) == self.addresses


_plans: WeakKeyDictionary[torch.nn.Module, Plan] = WeakKeyDictionary()


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's ``custom_weight_loader``: ``named_tensors`` are those of ``Staging.named_tensors``."""
    given = dict(named_tensors)
    report, message = given["report"], given["message"]
    try:
        with torch.no_grad():
            _load(model, given)
        report[answers.STATUS] = answers.LOADED
    except Exception as error:  # whatever it is, the engine must live to say it
        known = isinstance(error, UnsupportedModel)
        text = str(error) if known else "".join(traceback.format_exception(error, limit=-6))
        data = text.encode()[: message.numel()]
        message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(message.device)
        report[answers.STATUS] = answers.FAILED
    _synchronize(report)


def _load(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> None:
    staging, report = given["buffer"], given["report"]
    started = time.perf_counter_ns()
    plan = _plans.get(model)
    if plan is None or not plan.fits(model, staging):
        plan = _load_and_plan(model, staging, answers.decode_specs(bytes(given["header"].cpu().numpy())))
        _plans[model] = plan
    else:
        for place in plan.places:
            place.destination.copy_(place.source)
        derive = getattr(model, "post_load_weights", None)
        if callable(derive):
            derive()  # what some models compute from their parameters; their load_weights calls it itself
    _synchronize(staging)
    copied = time.perf_counter_ns()
    checksums = given["checksums"]
    checksums.zero_()
    for place in plan.places:
        checksums[place.tensor] += tensor_checksum(place.destination, place.first_row)
    _synchronize(staging)
    report[answers.COPY_NANOSECONDS] = copied - started
    report[answers.CHECKSUM_NANOSECONDS] = time.perf_counter_ns() - copied
    report[answers.COPIED_BYTES] = sum(place.source.nbytes for place in plan.places)


def _synchronize(tensor: torch.Tensor) -> None:
    """Another process reads the results: they must be there, not only enqueued."""
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)


def _addresses(model: torch.nn.Module) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())


# ---- finding where each tensor lives -------------------------------------------------------------------------


class _Copies(TorchDispatchMode):
    """Notes every ``copy_`` from one storage into the storages of parameters."""

    def __init__(self, source: torch.Tensor, parameters: dict[int, str]) -> None:
        super().__init__()
        self._source = source.untyped_storage().data_ptr()
        self._parameters = parameters
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
            if parameter and source is not None and source.untyped_storage().data_ptr() == self._source:
                self.seen.append((target.detach(), source.detach()))
                self.written.add(parameter)
            elif parameter and name not in ("fill_", "zero_"):
                self.converted[parameter] = name
        return func(*args, **(kwargs or {}))


def _load_and_plan(model: torch.nn.Module, staging: torch.Tensor, specs: tuple[TensorSpec, ...]) -> Plan:
    """Load through the model's own loader and note where everything went.

    Raises UnsupportedModel where a later commit could not simply copy, or the checksum not be compared.
    """
    parameters = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
    dtypes = {parameter.dtype for parameter in model.parameters()}
    foreign = [spec.name for spec in specs if spec.dtype not in dtypes]
    if foreign:
        raise UnsupportedModel(
            f"staged in a dtype that the engine does not serve ({list_names(foreign)}); the engine holds "
            f"{sorted(map(str, dtypes))}. Serve in the dtype that is sent, or send in the dtype that is served."
        )
    with _Copies(staging, parameters) as copies:
        cast(Any, model).load_weights([(spec.name, spec.view(staging)) for spec in specs])
    if copies.converted:
        raise UnsupportedModel(
            f"the engine's loader changes these parameters instead of copying into them: "
            f"{list_names(f'{name} ({how})' for name, how in copies.converted.items())}"
        )
    places = tuple(_place(staging, specs, destination, source) for destination, source in copies.seen)
    _check_complete(specs, places)
    untouched = [name for name in parameters.values() if name not in copies.written]
    if untouched:
        raise UnsupportedModel(f"no staged tensor fills these parameters of the engine: {list_names(untouched)}")
    return Plan(staging, _addresses(model), places)


def _place(
    staging: torch.Tensor, specs: tuple[TensorSpec, ...], destination: torch.Tensor, source: torch.Tensor
) -> Place:
    start = (source.data_ptr() - staging.data_ptr()) if source.numel() else 0
    index = bisect_right(specs, start, key=lambda spec: spec.offset) - 1
    spec = specs[index]
    row = spec.nbytes // spec.shape[0] if spec.shape else spec.nbytes
    whole_rows = source.is_contiguous() and (start - spec.offset) % row == 0 and source.nbytes % row == 0
    if source.dtype != spec.dtype or destination.dtype != spec.dtype or not whole_rows:
        raise UnsupportedModel(
            f"{spec.name} is not held row by row in {spec.dtype}: the engine's loader takes shape "
            f"{tuple(source.shape)}, strides {source.stride()}, {source.dtype} from staging and stores "
            f"{destination.dtype}. Transposed or converted parameters, and splits along columns (tensor parallel), "
            "cannot be committed yet."
        )
    if destination.shape != source.shape:
        raise UnsupportedModel(f"{spec.name} is broadcast from {tuple(source.shape)} to {tuple(destination.shape)}")
    rows = (source.nbytes // row, *spec.shape[1:])
    if source.shape != rows:
        # A loader may drop or add dimensions of size one; rows are counted in Hugging Face's shape.
        source, destination = source.view(rows), destination.view(rows)
    return Place(index, (start - spec.offset) // row, source, destination)


def _check_complete(specs: tuple[TensorSpec, ...], places: tuple[Place, ...]) -> None:
    """Every row of every tensor must lie in the engine exactly once."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for place in places:
        rows = place.source.shape[0] if place.source.dim() else 1
        runs.setdefault(place.tensor, []).append((place.first_row, rows))
    incomplete = []
    for index, spec in enumerate(specs):
        end = 0
        for first, rows in sorted(runs.get(index, [])):
            end = end + rows if first == end else -1
            if end < 0:
                break
        if end != (spec.shape[0] if spec.shape else 1):
            incomplete.append(spec.name)
    if incomplete:
        raise UnsupportedModel(
            f"the engine's loader did not copy all of these tensors as they are: {list_names(incomplete)}. Either the "
            "engine has no such parameter (tied weights are sent once), or it stores it in another form."
        )
