"""Plans the safetensors files of a model folder before anything is written, so that many processes can write them.

A safetensors file is 8 bytes that hold the header's length, the header (JSON: dtype, shape and offsets of each tensor),
and the tensors' bytes, row-major. So names and shapes alone determine the offset of every byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from monarch_rl.model.tensors import INDEX, ITEM_BYTES, Shape

FILE_BYTES = 4 << 30
"""Most bytes of tensors per file; only a single larger tensor exceeds it. Hugging Face's files also have a few GB each,
because loaders read several in parallel."""
FLOAT32 = ".e_score_correction_bias"
"""End of the names of routers' biases, which transformers and SGLang keep in float32, whatever the model's dtype is:
the choice of experts depends on small differences."""
_ALIGNED = 8
"""Tensors begin at a multiple of this many bytes, as in files of safetensors' own writer."""


@dataclass(frozen=True)
class WeightFile:
    """One planned file."""

    name: str
    header: bytes
    """Everything before the tensors, with the 8 bytes of its length."""
    places: dict[str, int]
    """Offset of each tensor's first byte in the file, by tensor name."""
    nbytes: int
    """Size of the whole file."""


def plan_files(tensors: Iterable[tuple[str, Shape]], dtype: str, most: int = FILE_BYTES) -> list[WeightFile]:
    """Plan the files that hold ``tensors``, in the given order.

    Args:
        tensors: name and shape of each tensor.
        dtype: the dtype of the tensors, by safetensors name, such as ``BF16``; see :func:`dtype_of`.
        most: most bytes of tensors per file.
    """
    groups: list[dict[str, Shape]] = [{}]
    filled = 0
    for name, shape in tensors:
        nbytes = _nbytes(name, shape, dtype)
        if groups[-1] and filled + nbytes > most:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += nbytes
    if len(groups) == 1:
        return [_file("model.safetensors", groups[0], dtype)]
    count = len(groups)
    return [_file(f"model-{i:05}-of-{count:05}.safetensors", group, dtype) for i, group in enumerate(groups, 1)]


def dtype_of(tensor: str, dtype: str) -> str:
    """Dtype of a tensor in a model of ``dtype``, both by safetensors name."""
    return "F32" if tensor.endswith(FLOAT32) and ITEM_BYTES[dtype] < ITEM_BYTES["F32"] else dtype


def _nbytes(tensor: str, shape: Shape, dtype: str) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype_of(tensor, dtype)]


def _file(name: str, tensors: dict[str, Shape], dtype: str) -> WeightFile:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for tensor, shape in tensors.items():
        begin, end = end, end + _nbytes(tensor, shape, dtype)
        entries[tensor] = {"dtype": dtype_of(tensor, dtype), "shape": list(shape), "data_offsets": [begin, end]}
        places[tensor] = begin
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNED)
    header = len(text).to_bytes(8, "little") + text
    return WeightFile(name, header, {t: len(header) + begin for t, begin in places.items()}, len(header) + end)


def index_of(files: list[WeightFile]) -> dict[str, str]:
    """File name and content of the index of several files; empty for a single file, which needs no index."""
    if len(files) == 1:
        return {}
    content = {
        "metadata": {"total_size": sum(file.nbytes - len(file.header) for file in files)},
        "weight_map": {tensor: file.name for file in files for tensor in file.places},
    }
    return {INDEX: json.dumps(content, indent=2) + "\n"}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's path to an OSError that the block raises, for example when the disk is full."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
