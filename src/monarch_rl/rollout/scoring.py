"""Scores computed in processes of their own, each with a deadline.

A score function may be slow, may hang in C code and may crash; none of that may touch the event loop that plays
the episodes. So it runs in a pool of spawned processes (pebble). A process that oversteps its deadline is killed and
replaced, and the caller gets :class:`ScoringFailed`. A score whose process ended is computed once more: something else
may have killed the process, such as a kernel that is out of memory.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from monarch_rl.runtime.deadlines import now
from monarch_rl.runtime.fork_context import ForkContext
from monarch_rl.runtime.lifetime import die_with_parent
from monarch_rl.tasks.task import Score

ScoreFunction = Callable[..., Score | float]
"""Scores one answer; a number is a reward without parts."""
STUCK_S = 30.0
"""If no score ends for its deadline and this many seconds more, the processes count as stuck: a new process needs
seconds for its imports and its data."""


PRELOAD = "rollout"
"""Name of the fork server's preload for scoring processes."""


class ScoringFailed(Exception):
    """One score could not be computed; ``reason`` is short, without details, so that failures can be counted by it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class ScorerBroken(RuntimeError):
    """No score can be computed any more: the scoring processes do not start. The worker is lost."""


class Scorer:
    """A pool of scoring processes. They end with this process, however it ends.

    Args:
        processes: how many scores are computed at once.
        deadline_s: seconds that one score may take, from when a process starts on it.
        warm_up: called once in every new process before its first score (imports, data); picklable.
    """

    def __init__(self, processes: int, deadline_s: float, warm_up: Callable[[], object] | None = None) -> None:
        self.deadline_s = deadline_s
        self._make_pool = functools.partial(
            ProcessPool,
            max_workers=processes,
            initializer=_start,
            initargs=(os.getpid(), warm_up),
            context=ForkContext(PRELOAD, "scorer"),
        )
        self._pool = self._make_pool()
        self._works = False
        """The pool has answered."""
        self._replacing = asyncio.Lock()
        self._pending = 0
        """Scores that are waited for."""
        self._progressed = 0.0
        """When the last of them ended, or the first one was asked for; seconds of the event loop's clock."""

    async def score(self, function: ScoreFunction, *args: Any) -> Score:
        """Run ``function(*args)`` in the pool; both are pickled.

        Raises:
            ScoringFailed: the function raised, overstepped the deadline, or its process ended twice.
            ScorerBroken: the processes do not start.
        """
        error: Exception | None = None
        for _ in range(2):
            pool = self._pool
            try:
                return await self._try(pool, function, args)
            except ProcessExpired as expired:
                error = expired
            except BrokenProcessPool as broken:
                await self._replace(pool, broken)
                error = broken
        raise ScoringFailed("score ended its process", f"{error}, twice") from error

    async def _try(self, pool: ProcessPool, function: ScoreFunction, args: tuple[Any, ...]) -> Score:
        """See :meth:`score`; raises ProcessExpired if the process ended, BrokenProcessPool if the pool does not run."""
        if not pool.active:
            raise BrokenProcessPool("the pool has ended")
        future = asyncio.wrap_future(pool.schedule(_run, args=(function, args), timeout=self.deadline_s))
        if not self._pending:
            self._progressed = now()
        self._pending += 1
        try:
            while not future.done():
                remaining_s = self._progressed + self.deadline_s + STUCK_S - now()
                if remaining_s <= 0:
                    raise BrokenProcessPool(f"no score was computed for {self.deadline_s + STUCK_S:g} s")
                await asyncio.wait({future}, timeout=remaining_s)
            self._progressed = now()
            result: Score | tuple[str, str] = future.result()
        except TimeoutError:
            raise ScoringFailed(f"score took over {self.deadline_s:g} s") from None
        finally:
            self._pending -= 1
            future.cancel()
        self._works = True
        if isinstance(result, tuple):
            raise ScoringFailed(f"score raised {result[0]}", result[1])
        return result

    async def _replace(self, pool: ProcessPool, error: BrokenProcessPool) -> None:
        """Make another pool if ``pool`` has worked before.

        A pool breaks when a process is killed while it takes a task. And it waits without a deadline for a process that
        was stopped before it took one.
        """
        async with self._replacing:
            if self._pool is not pool:  # another call has replaced it
                return
            if not self._works:
                raise ScorerBroken("the scoring processes do not run; their own errors are on stderr") from error
            # The old pool must end first: its threads may still read from pipes whose numbers a new pool would get.
            await asyncio.to_thread(_end, pool)
            self._pool, self._works, self._progressed = self._make_pool(), False, now()

    def close(self) -> None:
        """End the processes. Blocks for a moment; call it off the event loop."""
        _end(self._pool)


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()  # waits: stop() kills what does not end


def _start(parent: int, warm_up: Callable[[], object] | None) -> None:
    die_with_parent(signal.SIGKILL, parent)
    if warm_up is not None:
        warm_up()


def _run(function: ScoreFunction, args: tuple[Any, ...]) -> Score | tuple[str, str]:
    """The score, or (type, text) of what was raised: not every exception can be sent between processes, and
    SystemExit must not end the scoring process's event loop."""
    try:
        result = function(*args)
        score = result if isinstance(result, Score) else Score(result)
        # Plain numbers: they go into JSON, and a wrong one must cost this episode only.
        return Score(float(score.reward), {name: float(value) for name, value in score.parts.items()})
    except BaseException as error:
        return type(error).__name__, str(error)
