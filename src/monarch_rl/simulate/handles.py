"""Handles of actors that live in this very process: what ``ProcMesh.spawn`` gives, without Monarch's processes.

The loop, the publisher, the workers and the trainer know the others only by such handles, so they cannot tell.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any


class LocalMesh:
    """Calls go to the ``actors``: objects with endpoints, or plain coroutine methods."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)
        self.extent = SimpleNamespace(labels=["rank"], sizes=[len(self._actors)])

    def slice(self, rank: int) -> LocalMesh:
        """A mesh of one actor."""
        return LocalMesh([self._actors[rank]])

    def __getattr__(self, name: str) -> _Calls:
        calls = _Calls([(actor, _function(type(actor), name)) for actor in self._actors])
        setattr(self, name, calls)  # found at once the next time
        return calls


class _Calls:
    """One endpoint of a mesh."""

    def __init__(self, targets: list[tuple[Any, Callable[..., Coroutine[Any, Any, Any]]]]) -> None:
        self._targets = targets

    def call_one(self, *args: Any) -> Coroutine[Any, Any, Any]:
        ((actor, function),) = self._targets
        return function(actor, *args)

    async def call(self, *args: Any) -> dict[int, Any]:
        answers = await asyncio.gather(*(function(actor, *args) for actor, function in self._targets))
        return dict(enumerate(answers))


def _function(kind: type, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The coroutine function behind an endpoint: Monarch keeps what it wraps in ``_method``."""
    found = getattr(kind, name)
    return inspect.unwrap(getattr(found, "_method", found))
