"""Functions by the names that settings give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def named(registry: Mapping[str, T], name: str, kind: str) -> T:
    """What has this name. Raises ValueError, with all names, if nothing has; ``kind``: what it is."""
    if name not in registry:
        raise ValueError(f"there is no {kind} {name!r}: give one of {', '.join(registry)}, or a function")
    return registry[name]
