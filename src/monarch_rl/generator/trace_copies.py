"""Finds where each tensor lives in an engine rank, by watching SGLang's own loader fill the model.

SGLang's parameters are not Hugging Face's: q, k and v are fused, experts are stacked, the vocabulary is padded, and
each rank of a tensor-parallel engine holds its rows or columns. Its models know how to load Hugging Face tensors, so
``model.load_weights`` is called on views of an area while a dispatch mode notes each copy from the area into a
parameter. This works for any model whose loader only copies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_rl.generator.copy_plan import CopyPlan, Placement, UnsupportedModel, plan_copies
from monarch_rl.generator.load_report import Box, matrix_shape
from monarch_rl.weights.manifest import TensorSpec, list_names

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
