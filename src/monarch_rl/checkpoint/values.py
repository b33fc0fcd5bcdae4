"""Plain values with NumPy arrays in them as bytes, without pickle.

    4 bytes length of the text, the text (JSON, in which an array is its dtype and shape), the arrays' bytes, in order

All little-endian. Tuples come back as lists; of a dataclass or named tuple there are its name and its fields, and
whoever reads it knows the class.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<I")
_ARRAY, _BYTES, _MAPPING, _DATACLASS = "array", "bytes", "mapping", "dataclass"
"""The one key of an object that stands for something else."""


def encode(value: Any) -> bytes:
    """The bytes of a value: None, numbers, text, bytes, arrays, and lists, mappings, dataclasses and named tuples
    of these.

    Raises TypeError for anything else, and for keys that are no text.
    """
    arrays: list[bytes] = []
    text = json.dumps(_plain(value, arrays), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *arrays])


def decode(data: bytes | memoryview, *classes: type) -> Any:
    """The inverse of :func:`encode`.

    Args:
        classes: the dataclasses and named tuples that there may be.

    Raises ValueError if that did not make ``data``, or a dataclass is another one, or has other fields.
    """
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise ValueError(f"{len(view)} bytes hold no value")
    start = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    reader = _Reader(view, start, {one.__name__: one for one in classes})
    value = reader.value(json.loads(bytes(view[_LENGTH.size : start])))
    if reader.place != len(view):
        raise ValueError(f"a value of {reader.place} bytes has {len(view)}")
    return value


def _plain(value: Any, arrays: list[bytes]) -> Any:
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"), copy=False)
        arrays.append(np.ascontiguousarray(little).tobytes())
        return {_ARRAY: [value.dtype.str[1:], *value.shape]}
    if isinstance(value, bytes | memoryview):
        arrays.append(bytes(value))
        return {_BYTES: len(value)}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"a mapping has keys that are no text: {list(value)[:3]}")
        return {_MAPPING: {key: _plain(item, arrays) for key, item in value.items()}}
    if names := _field_names(value):
        return {_DATACLASS: [type(value).__name__, {name: _plain(getattr(value, name), arrays) for name in names}]}
    if isinstance(value, list | tuple):
        return [_plain(item, arrays) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r:.80} is no plain value")


def _field_names(value: Any) -> list[str]:
    """Of a dataclass or a named tuple; none of anything else."""
    if is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in fields(value)]
    return list(getattr(value, "_fields", ()))


class _Reader:
    """Reads the arrays of a value in order."""

    def __init__(self, view: memoryview, place: int, classes: dict[str, type]) -> None:
        self._view, self.place, self._classes = view, place, classes

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, inner),) = plain.items()
        if kind == _MAPPING:
            return {key: self.value(item) for key, item in inner.items()}
        if kind == _BYTES:
            return bytes(self._take(inner))
        if kind == _DATACLASS:
            name, known = inner
            try:
                return self._classes[name](**{key: self.value(item) for key, item in known.items()})
            except (KeyError, TypeError) as error:
                raise ValueError(f"a {name} was written by another version of this program ({error})") from error
        dtype, *shape = inner
        little = np.dtype("<" + dtype)
        array = np.frombuffer(self._take(math.prod(shape) * little.itemsize), little)
        return array.reshape(shape).astype(little.newbyteorder("="))  # of its own memory

    def _take(self, nbytes: int) -> memoryview:
        start, self.place = self.place, self.place + nbytes
        if self.place > len(self._view):
            raise ValueError(f"a value of at least {self.place} bytes has {len(self._view)}")
        return self._view[start : self.place]
