"""How functions of SGLang 0.5.23 are replaced: only if they are still what the replacement was written for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


def replace_method(owner: type, name: str, replacement: Callable[..., Any], parameters: str) -> None:
    """Replace a method by ``replacement(self, original, ...)``.

    Raises RuntimeError if its parameters, without ``self``, are not named ``parameters``.
    """
    original = getattr(owner, name)
    check_parameters(original, parameters)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(self, original, *args, **kwargs)

    setattr(owner, name, method)


def check_parameters(function: Callable[..., Any], expected: str) -> None:
    """Compare the names of a function's parameters, without ``self``, with those that it has in SGLang 0.5.23.

    Raises RuntimeError if they differ.
    """
    found = " ".join(name for name in inspect.signature(function).parameters if name != "self")
    if found != expected:
        raise RuntimeError(
            f"SGLang's {function.__module__}.{function.__qualname__} takes ({found}), and not ({expected}) as in "
            "SGLang 0.5.23, for which generator/cpu is written: install the SGLang of locks/cpu.txt"
        )
