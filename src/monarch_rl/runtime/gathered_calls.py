"""Calls that several coroutines make in the same iteration of the event loop, made together."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Hashable
from contextvars import Context
from typing import Any, Generic, Protocol, TypeVar


class AwaitedCall(Protocol):
    """A call, with the future on which its caller waits."""

    done: asyncio.Future[Any]


K = TypeVar("K", bound=Hashable)
C = TypeVar("C", bound=AwaitedCall)


class GatheredCalls(Generic[K, C]):
    """Gathers the calls with equal keys of one iteration of the event loop, such as the first turns of a group's
    episodes, and makes them together. Each caller gets its result as soon as that is there.

    Args:
        make: called with a key and its calls, in their order. Completes their futures, and must not raise. It runs in a
            context of its own, and is cancelled when no caller waits any more.
        most: maximum number of calls that are made together.
    """

    def __init__(self, make: Callable[[K, list[C]], Coroutine[Any, Any, None]], most: int = sys.maxsize) -> None:
        self._make, self._most = make, most
        self._open: dict[K, _Gathering[C]] = {}
        """By key: the calls of this iteration."""
        self._making: set[asyncio.Task[None]] = set()
        """The event loop itself holds no references to tasks."""

    async def result(self, key: K, call: C) -> Any:
        """Make a call; returns the result of its future, or raises its exception."""
        gathering = self._open.get(key)
        if gathering is None or len(gathering.calls) == self._most:
            gathering = self._open[key] = _Gathering()
            # In a context of its own, not in that of the first caller.
            asyncio.get_running_loop().call_soon(self._begin, key, gathering, context=Context())
        gathering.calls.append(call)
        try:
            return await call.done  # waits: for `make`, whose waits have deadlines
        except asyncio.CancelledError:
            gathering.end_if_abandoned()
            raise

    def _begin(self, key: K, gathering: _Gathering[C]) -> None:
        if self._open.get(key) is gathering:
            del self._open[key]
        gathering.calls = [call for call in gathering.calls if not call.done.cancelled()]
        if gathering.calls:
            gathering.making = asyncio.ensure_future(self._make(key, gathering.calls))
            self._making.add(gathering.making)
            gathering.making.add_done_callback(self._making.discard)


class _Gathering(Generic[C]):
    """Calls that are made together."""

    def __init__(self) -> None:
        self.calls: list[C] = []
        self.making: asyncio.Task[None] | None = None

    def end_if_abandoned(self) -> None:
        """Make the calls no longer if no caller waits for one any more."""
        if self.making is not None and all(call.done.done() for call in self.calls):
            self.making.cancel()
