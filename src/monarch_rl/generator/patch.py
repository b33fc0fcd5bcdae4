"""Replaces functions of SGLang 0.5.23, and refuses to if their signatures have changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


def replace_method(owner: type, name: str, replacement: Callable[..., Any], parameters: str) -> None:
    """Replace a method by ``replacement(self, original, ...)``.

    Args:
        owner: the class.
        name: name of the method.
        replacement: receives the instance, the original method, and the call's arguments.
        parameters: expected names of the method's parameters, without ``self``, separated by spaces.

    Raises RuntimeError if the parameters differ.
    """
    original = getattr(owner, name)
    check_parameters(original, parameters)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(self, original, *args, **kwargs)

    setattr(owner, name, method)


def check_parameters(function: Callable[..., Any], expected: str) -> None:
    """Raise RuntimeError unless a function's parameter names, without ``self``, are those of SGLang 0.5.23.

    Args:
        function: the function.
        expected: the names, separated by spaces.
    """
    found = " ".join(name for name in inspect.signature(function).parameters if name != "self")
    if found != expected:
        raise RuntimeError(
            f"SGLang's {function.__module__}.{function.__qualname__} takes ({found}) instead of ({expected}), its "
            "parameters in SGLang 0.5.23, which monarch_rl requires: install the SGLang version of locks/cpu.txt or "
            "locks/gpu.txt"
        )
