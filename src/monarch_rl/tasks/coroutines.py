"""Which of the functions that a task is made of are coroutine functions."""

from __future__ import annotations

import functools
import inspect


def is_coroutine_function(function: object) -> bool:
    """Whether calling it gives a coroutine; that of an object may, and so may a partial of either."""
    while isinstance(function, functools.partial):
        function = function.func
    called = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
