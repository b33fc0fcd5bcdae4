r"""Checks mathematical answers with `math-verify`: 1/2, 0.5 and \frac{1}{2} are the same answer.

Questions(jsonl("math.jsonl"), MathReward(), template="{problem} Put the answer into \boxed{{}}.", held_out=500)
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Mapping
from typing import Any

_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")
"""Marks by which math-verify finds LaTeX."""


class MathReward:
    r"""1 if an answer is mathematically equal to the answer of its row, else 0; for :class:`Questions`.

    The answer is the last ``\boxed{...}`` in the text, or else the last expression. This is a plain function, so it
    runs in a scoring process: expressions such as 9^9^9^9 never finish, and cost their episode when its deadline has
    passed. The library's own time-outs are off, because they would turn this into a reward of 0.

    Args:
        column: column of the row with the right answer, as LaTeX or plain text.

    Raises ValueError if math-verify is not installed.
    """

    def __init__(self, column: str = "answer") -> None:
        self._column = column
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("a reward for mathematics needs the package math-verify: pip install 'monarch_rl[math]'")

    def __call__(self, row: Mapping[str, Any], answer: str) -> float:
        return float(are_equal(str(row[self._column]), answer))

    def warm_up(self) -> None:
        """Import the library, which takes seconds."""
        are_equal("1", "1")


def are_equal(right: str, answer: str) -> bool:
    """Whether the final answer in ``answer`` equals ``right``. May run forever.

    Raises ValueError if ``right`` is not an expression.
    """
    library = _library()
    return bool(library.verify(_parsed(right), library.parse(answer, parsing_timeout=None), timeout_seconds=None))


@functools.cache
def _library() -> Any:
    import math_verify

    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)  # they warn that their time-outs are off
    return math_verify


@functools.lru_cache(maxsize=256)
def _parsed(right: str) -> list[Any]:
    text = right if _MARKED.search(right) else f"${right}$"
    expressions: list[Any] = _library().parse(text, fallback_mode="no_fallback", parsing_timeout=None)
    if not expressions:
        raise ValueError(f"the row's answer {right[:80]!r} is not a mathematical expression")
    return expressions
