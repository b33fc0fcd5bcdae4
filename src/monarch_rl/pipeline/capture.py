"""Lets a program intercept ``launch``: it receives the arguments, and no run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OnLaunch = Callable[[Any, Any, Any], None]
"""Called with the arguments of ``launch``."""

_callbacks: list[OnLaunch] = []


@contextmanager
def capturing(on_launch: OnLaunch) -> Iterator[None]:
    """Within the block, ``launch`` passes its arguments to ``on_launch`` instead of starting a run."""
    _callbacks.append(on_launch)
    try:
        yield
    finally:
        _callbacks.pop()


def is_capturing() -> bool:
    """Whether a launch would start no run."""
    return bool(_callbacks)


def intercept_launch(train: Any, settings: Any, task: Any) -> bool:
    """Pass a launch to the innermost :func:`capturing` block. Returns False outside of one: the run is to start."""
    if _callbacks:
        _callbacks[-1](train, settings, task)
    return is_capturing()
