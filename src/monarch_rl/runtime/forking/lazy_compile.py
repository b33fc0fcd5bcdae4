"""Importing libraries that use ``@torch.compile`` without importing the compiler.

``@torch.compile`` imports TorchInductor when the function is defined, which costs 1.2 CPU-seconds for a compiler that a
run may never call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compiled_on_first_call() -> Iterator[None]:
    """Within the block, ``torch.compile`` defers the compilation of a function to its first call.

    Does nothing if torch is not imported yet.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    original = torch.compile
    torch.compile = functools.partial(_compile_later, original)
    try:
        yield
    finally:
        torch.compile = original


def _compile_later(original: Callable[..., Any], model: Any = None, **options: Any) -> Any:
    if model is None:  # a decorator with options
        return functools.partial(_compile_later, original, **options)
    if not hasattr(model, "__code__"):  # a module
        return original(model, **options)
    compiled: Callable[..., Any] | None = None

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            import torch

            if torch.compiler.is_compiling():  # it is compiled as part of its caller
                return model(*args, **kwargs)
            compiled = original(model, **options)
        return compiled(*args, **kwargs)

    return call
