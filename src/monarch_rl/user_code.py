"""The code behind a user's callable: messages name it, digests contain it."""

from __future__ import annotations

import functools
import inspect
from types import CodeType
from typing import Any


def called(function: object) -> Any:
    """The function that runs: of a ``functools.partial`` its function, of an object the ``__call__`` of its class; None
    if the class has none."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__code__") else call_of(function)


def call_of(function: object) -> Any:
    """The ``__call__`` of an object's class or of one of its bases; None if there is none."""
    return next((vars(each)["__call__"] for each in type(function).__mro__ if "__call__" in vars(each)), None)


def code_behind(function: object) -> CodeType | None:
    """The code that runs when ``function`` is called; None if it is not written in Python."""
    code: CodeType | None = getattr(called(function), "__code__", None)
    return code


def definition(function: Any) -> tuple[str, str]:
    """Name of a callable, and ``file:line`` of its function, below decorators that use ``functools.wraps``; "" if the
    function is not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    # The line says in which function it was defined.
    name = getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
    # A decorator may also return an object with the function's name, as functools.cache does.
    code: CodeType | None = getattr(inspect.unwrap(called(inspect.unwrap(function))), "__code__", None)
    return name, "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def place_of(function: object) -> str:
    """``name (file:line)``, as in :func:`definition`; ``str`` of the callable if the place is unknown."""
    name, place = definition(function)
    return f"{name} ({place})" if place else str(function)
