"""Lets a program take a recipe's settings and its ``train`` where the recipe would launch its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Taken = Callable[[Any, Any], None]
"""Called with ``train`` and the settings."""

_takers: list[Taken] = []


@contextmanager
def capturing(take: Taken) -> Iterator[None]:
    """During the block ``launch`` hands ``train`` and its settings to ``take``, and runs nothing."""
    _takers.append(take)
    try:
        yield
    finally:
        _takers.pop()


def captures(train: Any, settings: Any) -> bool:
    """Whether somebody has taken them: then nothing is to be launched."""
    if _takers:
        _takers[-1](train, settings)
    return bool(_takers)
