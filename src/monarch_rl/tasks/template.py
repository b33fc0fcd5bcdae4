"""Prompts from a template and the fields of an item, and the text of typed values."""

from __future__ import annotations

import ast
import contextlib
import datetime
import functools
import math
import re
import string
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np

from monarch_rl.errors import SettingsError
from monarch_rl.values import lone_surrogate, plain

MAX_WIDTH = 10_000
"""Maximum width to which a template may pad a field; more is a typing error, and would take memory for every prompt."""

_TIMES = (datetime.datetime, datetime.time, datetime.timedelta, np.datetime64, np.timedelta64)
_KINDS = (str, int, float, np.floating, Decimal, Fraction, datetime.date, *_TIMES)
"""Types with a text of their own."""


class DoesNotFit(SettingsError):
    """A template and an item do not fit together.

    Args:
        problem: what is wrong, the same for all items with this fault.
        detail: more about this item, and what to do.
    """

    def __init__(self, problem: str, detail: str = "") -> None:
        super().__init__(problem + detail)
        self.problem, self._detail = problem, detail

    def of(self, field: str, advice: str = "") -> DoesNotFit:
        """The same of a field of the item."""
        return DoesNotFit(f"{field} {self.problem}", self._detail + advice)


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """The prompt of an item. Values are inserted as :func:`as_text` writes them.

    Raises DoesNotFit if a field is missing, null, or neither text nor a number; if the fields of the template have no
    text; or if the prompt is not valid Unicode.
    """
    try:
        # str.format takes a fraction of the formatter's time, and a run makes the prompts of all rows.
        simple = not _has_attributes(template) and all(type(value) in (str, int) for value in fields.values())
        prompt = template.format(**fields) if simple else _TextFormatter().vformat(template, (), fields)
    except DoesNotFit:
        raise
    except (LookupError, ValueError, AttributeError, TypeError, OverflowError, MemoryError) as error:
        names = ", ".join(sorted(map(str, fields)))
        problem = f"it has no {error}" if isinstance(error, KeyError) else repr(error)
        raise DoesNotFit(problem, f"; its fields are {names}") from error
    if "".join(prompt.split()) == _own_text(template):
        raise DoesNotFit("the fields of the template are empty")
    if problem := lone_surrogate(prompt):
        raise DoesNotFit("the prompt is not valid Unicode", f": {problem}. Remove or replace it")
    return prompt


def is_null(value: Any) -> bool:
    """Whether a value is missing: None, NaN, or pandas' NA and NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()  # a signalling NaN cannot be compared
    return isinstance(value, float | np.generic) and bool(value != value)


def as_text(value: Any, form: str = "") -> str:
    """The text of a value of an item.

    Numbers, also those of numpy, are written as decimals without an exponent or a fraction of 0: 0.00001, 3 for 3.0.
    Dates are written as 2026-05-01, members of enumerations as their value.

    Args:
        form: format specification, with which anything but text is written as Python does; fill, width and alignment
            alone do not change the above.

    Raises DoesNotFit if the value is null, not finite, a timestamp without a format, or neither text nor a number.
    """
    if isinstance(value, Enum):
        value = value.value
    if is_null(value):
        raise DoesNotFit("is null")
    if not isinstance(value, _KINDS):
        with contextlib.suppress(ValueError):
            value = plain(value)  # scalars of other libraries
    if isinstance(value, float | np.floating | Decimal):
        return _number_text(value, form)
    if isinstance(value, _TIMES):
        if "%" not in form:
            raise DoesNotFit("is a timestamp without a format")
        return format(value.astype("datetime64[us]").item() if isinstance(value, np.datetime64) else value, form)
    if not isinstance(value, str | int | datetime.date | Fraction):
        raise DoesNotFit(f"is a {type(value).__name__}, not text", f": {value!r:.80}")
    by_python = "%" in form if isinstance(value, datetime.date) else re.search("[%.,_]|[a-zA-Z]$", form)
    if isinstance(value, bool | datetime.date | Fraction) and not by_python:
        value = str(value)  # Python would pad True as 1, and write a date with the form >12 as ">12"
    return format(value, form)


def _number_text(value: float | np.floating[Any] | Decimal, form: str) -> str:
    if not math.isfinite(value):
        raise DoesNotFit(f"is {value}, not a finite number")
    if "." in form or form[-1:].isalpha() or form.endswith("%"):
        return format(value if isinstance(value, Decimal) else float(value), form)
    exact = Decimal(str(value))  # the shortest decimal that gives the value, in the value's own precision
    if not isinstance(value, Decimal) and exact == exact.to_integral_value():
        exact = exact.to_integral_value() or Decimal(0)
    return format(exact, form + "f")


class _TextFormatter(string.Formatter):
    """Inserts values as :func:`as_text`, except those for which the template requests Python notation (``!r``)."""

    def __init__(self) -> None:
        self._field = ""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Records the name of the next field."""
        self._field = field_name
        return super().get_field(field_name, args, kwargs)

    def convert_field(self, value: Any, conversion: str | None) -> Any:  # type: ignore[override]
        """Refuses null in Python notation, too, and writes what a value contains as its JSON value."""
        if is_null(value):
            raise DoesNotFit(f"{self._field} is null")
        if conversion:
            try:
                value = plain(value)  # numpy's numbers, and dates, which JSONL has as text
            except ValueError as error:
                # Mappings with numbers as keys, for example, are literals. Those of NumPy, NaN and objects are none.
                if not _is_literal(value):
                    raise DoesNotFit(f"{self._field} has no Python notation", f": {error}: convert it") from None
        return super().convert_field(value, conversion)  # type: ignore[arg-type]

    def format_field(self, value: Any, format_spec: str) -> str:
        """Raises DoesNotFit with the field."""
        field = self._field
        try:
            return as_text(value, format_spec)
        except DoesNotFit as error:
            if "timestamp" in error.problem:
                raise error.of(field, f": write it as {{{field}:%Y-%m-%d}}, for example") from None
            advice = (
                f". Select the text in it, such as {{{field}[0][content]}} for messages, write {{{field}!r}} if the "
                "model should read it in Python notation, or give it to the policy in your own episode (docs/tasks.md)"
            )
            raise error.of(field, advice if "not text" in error.problem else "") from None


def _is_literal(value: Any) -> bool:
    """Whether ``value`` consists of text, numbers and containers of Python."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except Exception:  # its notation may be anything
        return False


@functools.lru_cache
def _has_attributes(template: str) -> bool:
    """Whether a field is an attribute, such as ``{title.text}``: text and numbers have methods of many names."""
    return any("." in (field or "") for _, field, _, _ in string.Formatter().parse(template))


@functools.lru_cache
def _own_text(template: str) -> str:
    """The text between a template's fields, without white space."""
    return "".join("".join(text for text, *_ in string.Formatter().parse(template)).split())


def check_template(template: str, name: str) -> None:
    """Refuse a template without fields, or with an excessive field width. Raises ValueError."""
    fields = [(field, form or "") for _, field, form, _ in _fields_of(template, name) if field]
    if not fields:
        raise ValueError(
            f"{name} {template!r} has no field, so all prompts would be the same: add a field, such as {{question}}"
        )
    for field, form in fields:
        if "{" in form or any(float(width) > MAX_WIDTH for width in re.findall(r"\d+", form)):
            raise ValueError(
                f"{name} {template!r} gives {field} the width {form!r}: use a number of at most {MAX_WIDTH:,}"
            )


def _fields_of(template: str, name: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"{name} {template!r} is not a valid template ({error}): write {{{{ and }}}} for literal braces"
        ) from error
