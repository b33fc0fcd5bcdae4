"""Scores computed in processes of their own, each with a deadline.

A score function may be slow, may hang in C code and may crash; none of that may touch the event loop that plays
the episodes. So it runs in a pool of spawned processes (pebble), one that oversteps its deadline is killed and
replaced, and the caller learns it as :class:`ScoringFailed`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from monarch_rl.runtime.lifetime import die_with_parent


class ScoringFailed(Exception):
    """One score could not be had; ``reason`` is short, without details, so that failures can be counted by it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class ScorerBroken(RuntimeError):
    """No score can be had any more: the scoring processes do not start. Ends the run."""


class Scorer:
    """A pool of scoring processes. They end with this process, however it ends.

    Args:
        processes: how many scores are computed at once.
        deadline_s: seconds that one score may take, from when a process starts on it.
        warm_up: called once in every new process before its first score (imports, data); picklable.
    """

    def __init__(self, processes: int, deadline_s: float, warm_up: Callable[[], object] | None = None) -> None:
        self.deadline_s = deadline_s
        self._pool = ProcessPool(
            max_workers=processes,
            initializer=_start,
            initargs=(os.getpid(), warm_up),
            context=multiprocessing.get_context("spawn"),
        )

    async def score(self, function: Callable[..., float], *args: Any) -> float:
        """Run ``function(*args)`` in the pool; both are pickled.

        Raises:
            ScoringFailed: the function raised, overstepped the deadline, or took its process down.
            ScorerBroken: the processes do not start.
        """
        if not self._pool.active:
            raise ScorerBroken("the scoring processes do not run; what they said stands on stderr")
        future = self._pool.schedule(_run, args=(function, args), timeout=self.deadline_s)
        try:
            result: float | tuple[str, str] = await asyncio.wrap_future(future)  # waits: the pool has the deadline
        except TimeoutError:
            raise ScoringFailed(f"score took over {self.deadline_s:g} s") from None
        except ProcessExpired as error:
            raise ScoringFailed("score ended its process", f"exit code {error.exitcode}") from error
        except BrokenProcessPool as error:
            raise ScorerBroken("the scoring processes do not run; what they said stands on stderr") from error
        if isinstance(result, tuple):
            raise ScoringFailed(f"score raised {result[0]}", result[1])
        return result

    def close(self) -> None:
        """End the processes. Blocks for a moment; call it off the event loop."""
        self._pool.stop()
        self._pool.join()  # waits: stop() kills what does not end


def _start(parent: int, warm_up: Callable[[], object] | None) -> None:
    die_with_parent(signal.SIGKILL, parent)
    if warm_up is not None:
        warm_up()


def _run(function: Callable[..., float], args: tuple[Any, ...]) -> float | tuple[str, str]:
    """The score, or what was raised as (type, text): not every exception survives the way between processes, and
    SystemExit must not end the event loop over there."""
    try:
        return float(function(*args))
    except BaseException as error:
        return type(error).__name__, str(error)
