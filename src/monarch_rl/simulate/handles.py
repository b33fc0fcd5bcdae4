"""Handles of actors in this process, which replace the handles that ``ProcMesh.spawn`` returns.

The loop, the publisher, the workers and the trainer access other actors only through handles, so they run unchanged.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any


class LocalMesh:
    """A mesh of local actors.

    Args:
        actors: objects with endpoints or plain coroutine methods.
        call_s: seconds that each call takes.
    """

    def __init__(self, actors: Sequence[Any], call_s: float = 0.0) -> None:
        self._actors = list(actors)
        self._call_s = call_s
        self.extent = SimpleNamespace(labels=["rank"], sizes=[len(self._actors)])

    def slice(self, rank: int) -> LocalMesh:
        """A mesh of only the actor with this rank."""
        return LocalMesh([self._actors[rank]], self._call_s)

    def __getattr__(self, name: str) -> _Calls:
        calls = _Calls([(actor, _function(type(actor), name)) for actor in self._actors], self._call_s)
        setattr(self, name, calls)  # cached: the next access does not reach __getattr__
        return calls


class _Calls:
    """One endpoint of a mesh."""

    def __init__(self, targets: list[tuple[Any, Callable[..., Coroutine[Any, Any, Any]]]], call_s: float) -> None:
        self._targets = targets
        self._call_s = call_s

    def call_one(self, *args: Any) -> Coroutine[Any, Any, Any]:
        ((actor, function),) = self._targets
        return self._later(function, actor, *args) if self._call_s else function(actor, *args)

    async def call(self, *args: Any) -> dict[int, Any]:
        if self._call_s:
            await asyncio.sleep(self._call_s)
        calls = [function(actor, *args) for actor, function in self._targets]
        answers = await asyncio.gather(*calls)  # waits: the caller enforces the deadline
        return dict(enumerate(answers))

    async def _later(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        await asyncio.sleep(self._call_s)
        return await function(*args)  # waits: the caller enforces the deadline


def _function(kind: type, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The coroutine function behind an endpoint: Monarch keeps the wrapped function in ``_method``."""
    found = getattr(kind, name)
    return inspect.unwrap(getattr(found, "_method", found))
