"""Values that come from a user's data or tools, as JSON values: one rule for rows, tools' answers and messages.

This module imports nothing of the package, and no NumPy or pandas: their values are recognised by what they can do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """``value`` as a JSON value of Python's own types: None, bool, int, float, str, list and dict.

    ==================================  =====================================================
    scalars of NumPy, pandas, PyTorch   the number, text or bool (``item()``)
    their arrays, series and tensors    nested lists (``tolist()``)
    NumPy's records (named fields)      mappings of their fields
    tuples                              lists
    dates and times                     ISO 8601, as text
    ``Decimal``                         its digits, as text, without an exponent
    enum members                        their value, also as keys
    dataclasses and pydantic models     mappings of their fields
    ==================================  =====================================================

    Raises:
        ValueError: it is or contains something else, NaN or infinity, a missing value of pandas, a key that is not
            text, or text that is not Unicode (:func:`lone_surrogate`). Names the place in the value, and the type.
    """
    try:
        return _plain(value, "")
    except RecursionError:
        raise ValueError(f"a {_name(value)} is nested too deeply for JSON, or contains itself") from None


def lone_surrogate(text: str) -> str:
    """Describes the first half of a surrogate pair in ``text``, which no tokenizer and no file can encode; "" if there
    is none. Such text comes from names of files that are not UTF-8, and from an emoji cut in two."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.start + 20]
        return f"{text[error.start]!a} in {around!a} is half of a surrogate pair, not a character of Unicode"
    return ""


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, path)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if problem := lone_surrogate(value):
            raise ValueError(f"{_at(path)}{problem}")
        return str(value)  # subclasses, such as numpy.str_
    if isinstance(value, int):
        return int(value)
    if getattr(getattr(value, "dtype", None), "is_floating_point", False):  # a tensor of PyTorch
        array = value.detach().cpu()
        numpys = str(array.dtype) in ("torch.float16", "torch.float64")  # NumPy has no bfloat16
        return _plain((array if numpys else array.float()).numpy(), path)
    if isinstance(value, float) or (_kind(value) == "f" and not value.shape):  # numpy.longdouble is its own item()
        if not math.isfinite(value):
            raise ValueError(f"{_at(path)}{value} is not a number of JSON")
        # The shortest in its own precision: 0.1, not 0.10000000149011612.
        return float(value) if isinstance(value, float) else float(str(value))
    if isinstance(value, Mapping):
        return {_key(key, path): _plain(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, date | time) and value == value:  # NaT of pandas is a date that differs from itself
        return value.isoformat()
    if isinstance(value, Decimal) and value.is_finite():
        return format(value, "f")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, path)
    if callable(getattr(type(value), "model_dump", None)):
        return _plain(value.model_dump(), path)
    dates = _kind(value) in tuple("mM")  # NumPy turns some of its dates and durations into bare integers
    if names := getattr(getattr(value, "dtype", None), "names", None):  # so does ``tolist()``, and drops the names
        return _plain(list(value) if value.shape else {name: value[name] for name in names}, path)
    if (dates or _kind(value) == "f") and value.shape:
        # The items of a series of pandas have double precision.
        return _plain(list(value.to_numpy() if _kind(value) == "f" and hasattr(value, "to_numpy") else value), path)
    if hasattr(value, "dtype") and hasattr(value, "tolist") and not dates and not isinstance(value, type):
        return _plain(value.tolist(), path)
    if dates and value.dtype.kind == "M" and value == value:
        return str(value)  # ISO 8601
    raise ValueError(f"{_at(path)}{value!r:.60} of type {_name(value)} is not a JSON value")


def _kind(value: Any) -> str:
    """NumPy's kind of a scalar or array; "" for anything else."""
    return getattr(getattr(value, "dtype", None), "kind", "")


def _key(key: Any, path: str) -> str:
    key = key.value if isinstance(key, Enum) else key
    if not isinstance(key, str):
        raise ValueError(f"{_at(path)}the key {key!r:.60} of type {_name(key)} is not text")
    if problem := lone_surrogate(key):
        raise ValueError(f"{_at(path)}a key is not text: {problem}")
    return str(key)


def _at(path: str) -> str:
    return f"{path}: " if path else ""


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
