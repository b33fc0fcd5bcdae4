"""Calls of pools of scoring processes that have not ended, and when the processes count as stuck."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessPool

from monarch_rl.runtime.deadline_clock import DeadlineClock


class CallsUnderWay:
    """Waits for calls. A pool ends a call that oversteps its deadline, but not one whose process was stopped before it
    said that it has taken it, and none after the pool itself has ended."""

    def __init__(self) -> None:
        self._pools: dict[asyncio.Future[Any], ProcessPool] = {}
        """In the order in which the pools were given the calls."""

    def __len__(self) -> int:
        return len(self._pools)

    async def ends(
        self, future: asyncio.Future[Any], pool: ProcessPool, limit_s: float, half_s: float, on_half: Callable[[], Any]
    ) -> None:
        """Wait until a call ends.

        Args:
            future: of the call, which the pool was given just now.
            limit_s: seconds of a machine that has cores for the run, within which this call ends or one before it does.
            half_s: seconds after which ``on_half`` is called, unless the call has ended.

        Raises:
            BrokenProcessPool: ``limit_s`` have passed, or the pool was given up.
        """
        self._pools[future] = pool
        try:
            await asyncio.wait({future}, timeout=half_s)
            if not future.done():
                on_half()
                stuck, ahead = DeadlineClock(limit_s - half_s, "any score"), self._ahead_of(future)
            while not future.done():
                # Calls behind it may end, while the process that took it was stopped.
                if (left := self._ahead_of(future)) < ahead:
                    stuck, ahead = DeadlineClock(limit_s, "any score"), left
                window_s = stuck.next_window_s()
                if window_s is None:
                    raise BrokenProcessPool(f"no score was computed for {limit_s:g} s")
                await asyncio.wait({future}, timeout=window_s)
        finally:
            del self._pools[future]
        if future.cancelled():
            raise BrokenProcessPool("the pool was given up")

    def give_up(self, pool: ProcessPool) -> None:
        """End the calls of a pool that has ended."""
        for future in [future for future, of in self._pools.items() if of is pool]:
            future.cancel()

    def _ahead_of(self, future: asyncio.Future[Any]) -> int:
        """Calls that the same pool was given before, and that have not ended."""
        pool = self._pools[future]
        before = itertools.takewhile(lambda other: other is not future, self._pools)
        return sum(self._pools[other] is pool for other in before)
