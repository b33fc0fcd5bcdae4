r"""Checks mathematical answers with `math-verify`: 1/2, 0.5 and \frac{1}{2} are the same answer.

Questions(jsonl("math.jsonl"), MathReward(), template="{problem} Put the answer into \boxed{{}}.", held_out=500)
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import re
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np

from monarch_rl.tasks.template import DoesNotFit, as_text

NO_ANSWERS = ("", "None", "nan", "NaN", "NaT", "<NA>", "null")
"""Answers that say that there is none, of which math-verify would make products of letters."""
_MARKED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
"""Marks by which math-verify finds LaTeX. ``\\$`` is the dollar of an amount."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_OPENED = re.compile(r"\\(?:boxed|fbox)\s*{")
"""The beginning of a box, in any spelling."""
_BRACE = re.compile(r"\\[{}\\]|[{}]")
"""A brace, or one that is text (``\\{``)."""
_SCIENTIFIC = re.compile(r"(?<![\w.\\])\d+(?:\.\d*)?[eE][+-]?\d{1,3}(?![\w.]*\w)")
"""A number such as 1e-05, which math-verify would read as a product with Euler's number."""
_GROUPED = re.compile(r"(?<=\d)(?:\\,|\\ |~)\s*(?=\d{3}(?!\d))")
"""A space of LaTeX between the thousands of a number, of which math-verify would make the sum of its parts."""
_STOP = re.compile(r"(?<=\d)\.(?=\s*}$)")
"""A full stop after the number in a box, with which math-verify would take it for text."""


class MathReward:
    r"""1 if an answer is mathematically equal to the answer of its row, else 0; for :class:`Questions`.

    The answer is the content of the last ``\boxed{...}`` or ``\fbox{...}`` in the text, or else the last expression.
    So is the row's answer, which may be a whole solution. This is a plain function, so it runs in a scoring process:
    expressions such as 9^9^9^9 never finish, and cost their episode when its deadline has passed. The library's own
    time-outs are off, because they would turn this into a reward of 0.

    Args:
        column: column of the row with the right answer: LaTeX, plain text or a number.

    Raises ValueError if math-verify is not installed.
    """

    success_reward = 1.0

    def __init__(self, column: str = "answer") -> None:
        self._column = column
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("a reward for mathematics needs the package math-verify: pip install 'monarch_rl[math]'")

    def __call__(self, row: Mapping[str, Any], answer: str) -> float:
        """Raises ValueError if the row's answer is not an expression."""
        self.check_row(row)
        try:
            return float(are_equal(self._right(row), answer))
        except ValueError as error:
            raise ValueError(f"column {self._column}: {error}") from error

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError if the row has no answer. Whether it is an expression shows only when it is used."""
        if _BOX.sub("", _final(self._right(row))).strip(" {}") in NO_ANSWERS:
            raise ValueError(f"the row's answer (column {self._column}) is {str(row[self._column])[-80:]!r}")

    def _right(self, row: Mapping[str, Any]) -> str:
        if self._column not in row:
            raise ValueError(f"the row has no column {self._column}; it has {', '.join(map(str, row)) or 'none'}")
        value = row[self._column]
        try:
            if isinstance(value, bool | np.bool_ | date):
                raise DoesNotFit(f"is {value!r}, not a number")
            return as_text(value)
        except DoesNotFit as error:
            raise error.of(f"the row's answer (column {self._column})") from None

    def warm_up(self) -> None:
        """Import the library, which takes seconds."""
        are_equal("1", "1")


def are_equal(right: str, answer: str) -> bool:
    """Whether the final answer in ``answer`` equals that in ``right``. May run forever.

    Raises ValueError if ``right`` is not an expression.
    """
    library, expected = _library(), _parsed(right)
    given = library.parse(_final(answer), parsing_timeout=None)
    return bool(library.verify(expected, given, float_rounding=_decimals(expected[0]), timeout_seconds=None))


@functools.cache
def _library() -> Any:
    import math_verify

    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)  # they warn that their time-outs are off
    return math_verify


@functools.lru_cache(maxsize=256)
def _parsed(right: str) -> list[Any]:
    text = _final(right)
    text = text if _MARKED.search(text) else f"${text}$"
    expressions: list[Any] = _library().parse(text, fallback_mode="no_fallback", parsing_timeout=None)
    if not expressions:
        raise ValueError(f"the row's answer {right[:80]!r} is not a mathematical expression")
    return expressions


def _final(text: str) -> str:
    """The last box of a text, or all of it. math-verify would combine boxes that are near each other into a set."""
    start = end = 0
    closings = _closings(text)
    for box in _BOX.finditer(text):
        if box.start() >= end:  # not within another box
            start, end = box.start(), closings.get(box.end(), box.end())
    # A box without braces has no end of its own, and one that is cut off is not an answer.
    text = text[start:end] if text[end - 1 : end] == "}" else text[start:]
    text = _OPENED.sub(r"\\boxed{", text)  # the only one that math-verify finds
    text = _STOP.sub("", _GROUPED.sub("", text))
    return _SCIENTIFIC.sub(lambda number: format(Decimal(number[0]), "f"), text)


def _closings(text: str) -> dict[int, int]:
    """For each brace that is closed: the position after the one that closes it. Linear: a policy may repeat a box
    thousands of times."""
    opened, closings = list[int](), dict[int, int]()
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closings[opened.pop()] = brace.end()
    return closings


def _decimals(right: Any) -> int:
    """Decimals to which numbers are compared: 6 digits of a right answer below 1, where the library's 6 decimals would
    make 0.0000001 and 0.0000002 equal."""
    try:
        size = abs(float(right))
    except (TypeError, ValueError, OverflowError, AttributeError):  # not a number
        return 6
    return max(6, 5 - math.floor(math.log10(size))) if 0 < size < 1 else 6
