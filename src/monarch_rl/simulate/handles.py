"""Handles of actors that live in this very process: what ``ProcMesh.spawn`` returns, without Monarch's processes.

The loop, the publisher, the workers and the trainer know the others only by such handles, so they run unchanged.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any


class LocalMesh:
    """Calls go to the ``actors``, objects with endpoints or plain coroutine methods, and cost ``call_s`` seconds."""

    def __init__(self, actors: Sequence[Any], call_s: float = 0.0) -> None:
        self._actors = list(actors)
        self._call_s = call_s
        self.extent = SimpleNamespace(labels=["rank"], sizes=[len(self._actors)])

    def slice(self, rank: int) -> LocalMesh:
        """A mesh of one actor."""
        return LocalMesh([self._actors[rank]], self._call_s)

    def __getattr__(self, name: str) -> _Calls:
        calls = _Calls([(actor, _function(type(actor), name)) for actor in self._actors], self._call_s)
        setattr(self, name, calls)  # found at once the next time
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
        answers = await asyncio.gather(*calls)  # waits: the caller has the deadline
        return dict(enumerate(answers))

    async def _later(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        await asyncio.sleep(self._call_s)
        return await function(*args)  # waits: as above


def _function(kind: type, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The coroutine function behind an endpoint: Monarch keeps what it wraps in ``_method``."""
    found = getattr(kind, name)
    return inspect.unwrap(getattr(found, "_method", found))
