"""Looking at the members of an actor mesh one by one."""

from __future__ import annotations

from itertools import product
from typing import Any


def members(mesh: Any) -> list[Any]:
    """The mesh's actors, each as a mesh of one, by rank."""
    labels, sizes = mesh.extent.labels, mesh.extent.sizes
    places = product(*(range(size) for size in sizes))
    return [mesh.slice(**dict(zip(labels, place, strict=True))) for place in places]
