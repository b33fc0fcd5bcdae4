"""The actors of an actor mesh, one by one."""

from __future__ import annotations

from itertools import product
from typing import Any, TypeVar, cast

T = TypeVar("T")


def members(mesh: T) -> list[T]:
    """The mesh's actors by rank, each as a mesh of one. ``mesh``: a handle, typed as its actor's class."""
    monarch_mesh = cast(Any, mesh)
    labels, sizes = monarch_mesh.extent.labels, monarch_mesh.extent.sizes
    places = product(*(range(size) for size in sizes))
    return [monarch_mesh.slice(**dict(zip(labels, place, strict=True))) for place in places]
