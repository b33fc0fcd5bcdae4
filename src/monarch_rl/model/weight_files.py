"""The safetensors files of a model folder, planned before anything is written, so that many processes can write them.

A safetensors file is 8 bytes with the length of a header, the header (JSON: dtype, shape and place of each tensor), and
the tensors' bytes, row-major. Once names and shapes are known, so is where each byte belongs.
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
"""A file holds at most this many bytes of tensors, or a single tensor that has more. Hugging Face's own are of a few
GB, too: loaders read them side by side."""
_ALIGNED = 8
"""Tensors begin at a multiple of this, as safetensors' own writer has it."""


@dataclass(frozen=True)
class WeightFile:
    """One file."""

    name: str
    header: bytes
    """All that comes before the tensors."""
    places: dict[str, int]
    """By tensor: where its bytes begin in the file."""
    nbytes: int
    """Of the whole file."""


def plan_files(tensors: Iterable[tuple[str, Shape]], dtype: str, most: int = FILE_BYTES) -> list[WeightFile]:
    """The files that hold ``tensors``, in their order.

    Args:
        tensors: names and shapes of all.
        dtype: of all of them, by safetensors' name, such as ``BF16``.
        most: bytes of tensors in a file.
    """
    groups: list[dict[str, Shape]] = [{}]
    held = 0
    for name, shape in tensors:
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        if groups[-1] and held + nbytes > most:
            groups.append({})
            held = 0
        groups[-1][name] = shape
        held += nbytes
    if len(groups) == 1:
        return [_file("model.safetensors", groups[0], dtype)]
    count = len(groups)
    return [_file(f"model-{i:05}-of-{count:05}.safetensors", group, dtype) for i, group in enumerate(groups, 1)]


def _file(name: str, tensors: dict[str, Shape], dtype: str) -> WeightFile:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for tensor, shape in tensors.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        entries[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        places[tensor] = begin
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNED)
    header = len(text).to_bytes(8, "little") + text
    return WeightFile(name, header, {t: len(header) + begin for t, begin in places.items()}, len(header) + end)


def index_of(files: list[WeightFile]) -> dict[str, str]:
    """The index of several files, by its file name; nothing for a single one, which needs none."""
    if len(files) == 1:
        return {}
    content = {
        "metadata": {"total_size": sum(file.nbytes - len(file.header) for file in files)},
        "weight_map": {tensor: file.name for file in files for tensor in file.places},
    }
    return {INDEX: json.dumps(content, indent=2) + "\n"}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError of the block, such as that of a full disk, name the file that it is about."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
