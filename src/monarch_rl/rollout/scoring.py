"""Scores computed in processes of their own, each with a deadline.

A score function may be slow, may hang in C code and may crash; none of that may touch the event loop that plays
the episodes. So it runs in a pool of processes (pebble), which the host's fork server forks; where there is none they
are spawned. A process that oversteps its deadline is killed and replaced, and the caller gets :class:`ScoringFailed`,
which has the traceback of what was raised, or the stack of a process that was ended. A score whose process ended is
computed once more: something else may have killed the process, such as a kernel that is out of memory. So is one that
overstepped its deadline while this process was stopped or the machine had no cores for the run: then with a deadline
that is longer by as much, up to half of :data:`STUCK_S` (``runtime/deadline_clock.py``).

A call of the pool costs some 0.2 ms, most scores a tenth of that. So scores that are asked for in one turn of the event
loop are one call, as long as the last ones took so little that these together do, too. If the call fails, for whatever
reason, each of them is computed alone. It fails soon (:data:`TOGETHER_DEADLINE_S`), so that a score that hangs costs
its deadline once and not twice.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import math
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from monarch_rl.rollout.scorer_output import ScorerOutput, print_into
from monarch_rl.rollout.scoring_calls import CallsUnderWay
from monarch_rl.rollout.scoring_failed import ScorerBroken, ScoringFailed
from monarch_rl.rollout.tracebacks import describe, of_process, said
from monarch_rl.runtime import presence
from monarch_rl.runtime.by_value import ByValue, to_bytes
from monarch_rl.runtime.deadline_clock import DeadlineClock
from monarch_rl.runtime.fork_context import ForkContext
from monarch_rl.runtime.heap import freeze_heap
from monarch_rl.runtime.lifetime import die_with_parent, signal_name
from monarch_rl.tasks.task import Outcome, as_outcome, as_outcomes

ScoreFunction = Callable[..., Any]
"""Scores one answer, or all of a group."""
Reading = Callable[[Any], Any]
"""Makes plain values of what a function returned, in its process; raises TypeError or ValueError if that cannot be."""
Computed = tuple[Any, float]
"""A score, or what was :class:`Raised`; and the seconds that it took."""
Call = tuple["_Sent", "_Sent", Reading]
"""A function and its arguments, on their way."""
FUNCTIONS_KEPT = 64
"""Functions of which the bytes are kept; the newest ones that hold nothing."""
TOGETHER_S = 0.02
"""Seconds that the scores of one call may take, judged by the longest of the last :data:`REMEMBERED`."""
TOGETHER_DEADLINE_S, TOGETHER_DEADLINE_SHARE = 0.4, 0.1
"""Deadline of a call of several scores: this, or this share of the deadline of one score if that is more."""
REMEMBERED = 64
STUCK_S = 30.0
"""If for its deadline and this many seconds more neither a score ends nor one that was asked for before, the processes
count as stuck: a new process needs seconds for its imports and its data."""
LOST_SHARE = 0.5
"""Share of the time that the machine, or a stop, must take from a score that is late for it to be computed once more:
on a busy machine every process waits at times."""

PRELOAD = "rollout"
"""Name of the fork server's preload for scoring processes."""


class _Overstepped(TimeoutError):
    """A score overstepped its deadline; for ``lost_share`` of the time this process was stopped or had no core."""

    def __init__(self, lost_share: float) -> None:
        super().__init__()
        self.lost_share = lost_share


class Scorer:
    """A pool of scoring processes. They end with this process, however it ends.

    Args:
        processes: how many scores are computed at once.
        deadline_s: seconds that one score may take, from when a process starts on it.
        warm_up: called once in every new process before its first score (imports, data); it travels by value.
    """

    def __init__(self, processes: int, deadline_s: float, warm_up: Callable[[], object] | None = None) -> None:
        self.deadline_s = deadline_s
        self._processes = processes
        self._unsent: list[_Asked] = []
        """Scores of this turn of the event loop, for calls of several."""
        self._calls: set[asyncio.Task[None]] = set()
        """Those calls."""
        self._functions: dict[int, tuple[ScoreFunction, ByValue[ScoreFunction]]] = {}
        """By identity: the newest functions, and what is sent of them."""
        self._recent: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds that scores took."""
        self._output = ScorerOutput()
        self._make_pool = functools.partial(
            ProcessPool,
            max_workers=processes,
            initializer=_start,
            initargs=(os.getpid(), self._output.ends, None if warm_up is None else ByValue(warm_up, "warm_up")),
            context=ForkContext(PRELOAD, "scorer"),
        )
        self._pool = self._make_pool()
        self._works = False
        """The pool has answered."""
        self._starting: tuple[ProcessPool, asyncio.Task[None]] | None = None
        """The pool whose processes are being started, or were last."""
        self._replacing = asyncio.Lock()
        self._under_way = CallsUnderWay()

    @property
    def queue(self) -> str:
        """Calls that wait for a process, in words; "" if none does."""
        waiting = len(self._under_way) - self._processes
        return f"{waiting} calls wait for the {self._processes} scoring processes of the worker" if waiting > 0 else ""

    async def score(self, function: ScoreFunction, *args: Any) -> Outcome:
        """Run ``function(*args)`` in the pool; the function travels by value, with what it holds at the time of the
        call; but the global variables of a function that holds nothing else are those of its first call.

        Raises:
            ScoringFailed: the function raised, overstepped the deadline, or its process ended twice.
            ScorerBroken: the processes do not start.
            TypeError: the function or its arguments cannot be pickled.
        """
        call = self._call(function, args, as_outcome)
        computed = await self._score_with_others(call) if self._most_together() > 1 else None
        return self._read(computed or await self._score_alone(call))  # type: ignore[no-any-return]

    async def score_group(self, function: ScoreFunction, *args: Any) -> list[Outcome]:
        """As :meth:`score`, with a function that returns a reward for each of several episodes."""
        computed = await self._score_alone(self._call(function, args, as_outcomes))
        return self._read(computed)  # type: ignore[no-any-return]

    def _call(self, function: ScoreFunction, args: tuple[Any, ...], reading: Reading) -> Call:
        given = to_bytes(args, f"what {getattr(function, '__name__', function)} is given")
        return _Sent(self._sent(function)), _Sent(given), reading

    def _sent(self, function: ScoreFunction) -> ByValue[ScoreFunction]:
        if not _holds_nothing(function):  # what it holds may have changed since the call before
            return ByValue(function)
        known = self._functions.get(id(function))
        if known is None:
            known = self._functions[id(function)] = function, ByValue(function)
            if len(self._functions) > FUNCTIONS_KEPT:
                del self._functions[next(iter(self._functions))]
        return known[1]

    def _read(self, computed: Computed) -> Any:
        result, seconds = computed
        self._recent.append(seconds)
        if isinstance(result, Raised):
            raise ScoringFailed(f"score raised {result.kind}", result.said, result.place, result.report)
        return result

    async def _score_alone(self, call: Call) -> Computed:
        """See :meth:`score`."""
        error: Exception | None = None
        deadline_s = self.deadline_s
        for attempt in range(2):
            pool = self._pool
            try:
                computed: Computed = await self._try(pool, _run, call, deadline_s)
                return computed
            except _Overstepped as late:
                if attempt == 0 and late.lost_share >= LOST_SHARE:
                    self._output.take_stack()  # it may leave another
                    longest_s = deadline_s + STUCK_S / 2  # those that wait for its process must not take it for stuck
                    deadline_s = min(deadline_s / max(1 - late.lost_share, 0.01), longest_s)
                    continue
                place, stack = of_process(self._output.take_stack())
                report = f"{stack}\nIf a score may take longer, raise --rollout.score-deadline-s.".lstrip()
                raise ScoringFailed(f"score took over {self.deadline_s:g} s", "", place, report) from None
            except ProcessExpired as expired:
                error = expired
            except BrokenProcessPool as broken:
                await self._replace(pool, broken)
                error = broken
        how = _end_of(error.exitcode) if isinstance(error, ProcessExpired) else ("", str(error))
        place, stack = of_process(self._output.take_stack())
        report = f"{stack}\nIt was computed twice, each time by another process, and each time: {how[1]}.".lstrip()
        raise ScoringFailed(f"score ended its process{how[0]}", f"{error}, twice", place, report) from error

    def _most_together(self) -> int:
        """Scores that one call may compute."""
        if len(self._recent) < REMEMBERED // 8:
            return 1
        return int(TOGETHER_S / max(*self._recent, TOGETHER_S / REMEMBERED))

    async def _score_with_others(self, call: Call) -> Computed | None:
        """The outcome, in one call with all others of this turn; None if the call failed."""
        loop = asyncio.get_running_loop()
        if not self._unsent:
            loop.call_soon(self._send)
        asked = _Asked(call, loop.create_future())
        self._unsent.append(asked)
        return await asked.computed  # waits: as long as _try, which has a deadline

    def _send(self) -> None:
        asked, self._unsent = self._unsent, []
        size = max(1, min(self._most_together(), math.ceil(len(asked) / self._processes)))
        for first in range(0, len(asked), size):
            call = asyncio.ensure_future(self._score_together(asked[first : first + size]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _score_together(self, asked: list[_Asked]) -> None:
        all_computed: list[Computed] | list[None] = [None] * len(asked)
        try:
            limit_s = min(self.deadline_s, max(TOGETHER_DEADLINE_S, TOGETHER_DEADLINE_SHARE * self.deadline_s))
            all_computed = await self._try(self._pool, _run_all, ([each.call for each in asked],), limit_s)
        except Exception:  # one of them caused it and will raise it, when each is computed alone
            self._recent.clear()
            self._output.take_stack()  # that one leaves another
        finally:
            for each, computed in zip(asked, all_computed, strict=True):
                if not each.computed.done():
                    each.computed.set_result(computed)

    async def _try(
        self, pool: ProcessPool, function: Callable[..., Any], args: tuple[Any, ...], deadline_s: float
    ) -> Any:
        """What ``function`` returns in a process of the pool.

        Raises _Overstepped if it oversteps the deadline, ProcessExpired if the process ended, BrokenProcessPool if
        the pool does not run, ScoringFailed if shared memory is full.
        """
        if not self._works:
            await self._started(pool)
        if not pool.active:
            raise BrokenProcessPool("the pool has ended")
        future = asyncio.wrap_future(pool.schedule(function, args=args, timeout=deadline_s))
        clock = DeadlineClock(deadline_s, "a score")
        try:
            limit_s, half_s = self.deadline_s + STUCK_S, self.deadline_s / 2
            await self._under_way.ends(future, pool, limit_s, half_s, clock.lost_share)
            result = future.result()
        except TimeoutError as error:
            raise _Overstepped(clock.lost_share()) from error
        finally:
            future.cancel()
        self._works = True
        return result

    async def _started(self, pool: ProcessPool) -> None:
        """Wait until the processes of a pool are started, which pebble does where it is first asked for anything.

        On a thread: it waits for the fork server, which may be at its imports, or stuck for minutes.
        """
        if self._starting is None or self._starting[0] is not pool or _has_failed(self._starting[1]):
            starting = asyncio.ensure_future(asyncio.to_thread(_start_processes, pool))
            self._starting = pool, starting
        starting = self._starting[1]
        if not starting.done():
            with presence.waiting("scoring processes to be started by the fork server"):
                await asyncio.shield(starting)  # waits: EpisodePlayer has a deadline for an episode's code
        starting.result()

    async def _replace(self, pool: ProcessPool, error: BrokenProcessPool) -> None:
        """Make another pool if ``pool`` has worked before.

        A pool breaks when a process is killed while it takes a task. And it waits without a deadline for a process that
        was stopped before it took one.
        """
        async with self._replacing:
            if self._pool is not pool:  # another call has replaced it
                return
            if not self._works:
                printed = await asyncio.to_thread(self._output.tail)
                message = f"the scoring processes do not run; the last that they printed:\n{printed}"
                raise ScorerBroken(message) from error
            # The old pool must end first: its threads may still read from pipes whose numbers a new pool would get.
            await asyncio.to_thread(_end, pool)
            self._pool, self._works = self._make_pool(), False
            self._under_way.give_up(pool)

    def close(self) -> None:
        """End the processes. Blocks for a moment; call it off the event loop."""
        _end(self._pool)
        self._output.close()


def _holds_nothing(function: ScoreFunction) -> bool:
    """Whether a function is its code alone: no closure, no defaults, no attributes, no object."""
    if not isinstance(function, FunctionType):
        return False
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__)


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and task.exception() is not None


def _start_processes(pool: ProcessPool) -> None:
    try:
        _ = pool.active  # what asks for it has to find it started; whether it is comes later
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        detail = "their locks lie in /dev/shm, which is full: make room there, or enlarge it (docker --shm-size)"
        raise ScoringFailed("scoring processes could not start", detail) from error


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()  # waits: stop() kills what does not end


def _end_of(exit_code: int) -> tuple[str, str]:
    """How a process ended, for a reason and for a report."""
    if exit_code >= 0:
        return "", f"it ended with exit code {exit_code}"
    name = signal_name(-exit_code)
    return f" by {name}", f"it was ended by {name}"


def _start(parent: int, output: tuple[Connection, Connection], warm_up: ByValue[Callable[[], object]] | None) -> None:
    die_with_parent(signal.SIGKILL, parent)
    print_into(output)
    if warm_up is not None:
        warm_up.load()()
    freeze_heap()


@dataclass(eq=False, slots=True)
class _Asked:
    """A score that is computed with others."""

    call: Call
    computed: asyncio.Future[Computed | None]


@dataclass(frozen=True, slots=True)
class Raised:
    """What a score raised, in words: not every exception can be sent between processes."""

    kind: str
    """The exception's type."""
    said: str
    place: str
    report: str
    """Its traceback."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Something on its way to a scoring process. It is read on arrival, before the deadline of a score begins: a
    function may import for seconds."""

    content: ByValue[ScoreFunction] | bytes

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrived, (self.content,)


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """What could not be read: it must cost its own score only."""

    error: BaseException


def _arrived(content: ByValue[ScoreFunction] | bytes) -> Any:
    try:
        return pickle.loads(content) if isinstance(content, bytes) else content.load()
    except BaseException as error:
        return _Unreadable(error)


def _run(
    function: ScoreFunction | _Unreadable, args: tuple[Any, ...] | _Unreadable, reading: Reading = as_outcome
) -> Computed:
    """The score, or what was raised: SystemExit, too, must not end the scoring process's event loop."""
    started, process = time.perf_counter(), os.getpid()
    outcome: Any
    try:
        for part in (function, args):
            if isinstance(part, _Unreadable):
                raise part.error
        # Plain numbers: they go into JSON, and a wrong one must cost this episode only.
        outcome = reading(function(*args))  # type: ignore[operator, misc]
    except BaseException as error:
        place, report = describe(error)
        outcome = Raised(type(error).__name__, said(error), place, report)
    if os.getpid() != process:  # a copy that the function has forked: two would answer, and take what comes next
        os._exit(0)
    return outcome, time.perf_counter() - started


def _run_all(calls: list[tuple[Any, Any, Reading]]) -> list[Computed]:
    return [_run(*call) for call in calls]
