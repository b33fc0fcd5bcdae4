"""Functions by the names that settings give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Entry(Generic[F]):
    """One function that can be named on the command line."""

    make: Callable[[], F]
    """Makes the function: a new one for each run, because some remember."""
    about: str
    """Formula and paper, for the docs."""


def named(registry: Mapping[str, Entry[F]], name: str, kind: str) -> F:
    """The function of this name. Raises ValueError, with all names, if there is none; ``kind``: what it is."""
    if name not in registry:
        raise ValueError(f"there is no {kind} {name!r}: give one of {', '.join(registry)}, or a function")
    return registry[name].make()
