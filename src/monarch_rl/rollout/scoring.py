"""Scores computed in processes of their own, each with a deadline.

A score function may be slow, may hang in C code and may crash; none of that may touch the event loop that plays
the episodes. So it runs in a pool of processes (pebble), which the host's fork server forks; where there is none they
are spawned. A process that oversteps its deadline is killed and replaced, and the caller gets :class:`ScoringFailed`,
which has the traceback of what was raised, or the stack of a process that was ended. A score whose process ended is
computed once more: something else may have killed the process, such as a kernel that is out of memory. So is one that
overstepped its deadline while this process was stopped or the machine had no cores for the run: then with a deadline
that is longer by as much, up to half of :data:`STUCK_S` (``runtime/deadlines.py``).

A call of the pool costs some 0.2 ms, most scores a tenth of that. So scores that are asked for in one turn of the event
loop are one call, as long as the last ones took so little that these together do, too. If the call fails, for whatever
reason, each of them is computed alone. It fails soon (:data:`TOGETHER_DEADLINE_S`), so that a score that hangs costs
its deadline once and not twice.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import functools
import itertools
import math
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from monarch_rl.rollout.episode_failed import ScorerBroken, ScoringFailed
from monarch_rl.rollout.tracebacks import describe, of_process, said
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.by_value import ByValue, to_bytes
from monarch_rl.runtime.deadlines import DeadlineClock
from monarch_rl.runtime.forking.fork_context import ForkContext
from monarch_rl.runtime.process import die_with_parent, freeze_heap, signal_name
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
        self._under_way = PendingCalls()

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
            with wait_registry.waiting("scoring processes to be started by the fork server"):
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


# -- output of scoring processes, up to a bound, and their stacks when they are ended ---------------------------------

SHOWN_BYTES = 2**16
"""Bytes that the scoring processes of a worker may print in :data:`WINDOW_S` seconds."""
WINDOW_S = 60.0
TAIL_BYTES = 4096
"""Newest bytes that are kept for the message of processes that do not start."""
DRAIN_S = 1.0
"""Seconds in which what was printed by processes that have ended is read, at most."""


class ScorerOutput:
    """The output of the scoring processes of one worker, which it prints on stderr, up to a bound.

    A score that prints for each answer would otherwise bury what the run says, and may run programs that print, too.
    So it is a pipe that takes the place of the processes' standard output and error.
    """

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        stacks = os.memfd_create("monarch_rl-stacks")
        self.ends = Connection(writer, readable=False), Connection(stacks)
        """What a scoring process takes (:func:`print_into`); can be pickled while one is started."""
        self._owner = wait_registry.current_name()
        self._tail = b""
        self._left, self._window_ends = 0, -math.inf
        self._left_out = 0
        """Bytes of this window."""
        self._thread = threading.Thread(target=self._forward, name="scorer-output", daemon=True)
        self._thread.start()

    def take_stack(self) -> str:
        """What the processes wrote since the last call when they were killed or crashed: their stacks. May be empty.

        Of several that end at the same time, all stacks may be in one call's answer, and none in the next one's: pebble
        does not say which process computed a score that took too long.
        """
        stacks = self.ends[1].fileno()
        text = os.pread(stacks, 2**20, 0).decode(errors="replace")
        # All processes write at one offset, which belongs to the file that they share.
        os.ftruncate(stacks, 0)
        os.lseek(stacks, 0, os.SEEK_SET)
        return text

    def tail(self) -> str:
        """The end of what was printed. May wait for a moment: call it off the event loop."""
        poll, deadline = select.poll(), time.monotonic() + DRAIN_S
        poll.register(self._reader, select.POLLIN)
        while poll.poll(0) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        """End it once the processes have ended. May wait for a moment: call it off the event loop."""
        for end in self.ends:
            end.close()
        self._thread.join(DRAIN_S)  # a program that a score has started may still hold the pipe

    def _forward(self) -> None:
        """On a thread of its own: read all, so that no process waits, and print what may be printed."""
        while data := os.read(self._reader, 2**16):
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            moment = time.monotonic()
            if moment >= self._window_ends:
                self._report_dropped()
                self._left, self._window_ends = SHOWN_BYTES, moment + WINDOW_S
            shown = data[: self._left]
            if shown:
                _print(shown)
            if len(data) > self._left and not self._left_out:
                limit = f"more than {SHOWN_BYTES // 1024} KiB within {WINDOW_S:g} s"
                self._say(f"the scoring processes of {self._owner} have printed {limit}: the rest is left out")
            self._left_out += len(data) - len(shown)
            self._left -= len(shown)
        self._report_dropped()
        os.close(self._reader)

    def _report_dropped(self) -> None:
        if self._left_out:
            self._say(f"{self._left_out:,} bytes that the scoring processes of {self._owner} printed were left out")
            self._left_out = 0

    def _say(self, sentence: str) -> None:
        _print(f"\n[{sentence}]\n".encode())


def _print(data: bytes) -> None:
    with suppress(OSError):  # nobody reads what this process prints any more
        os.write(2, data)


def print_into(ends: tuple[Connection, Connection]) -> None:
    """In a scoring process: print into the pipe from here on, and leave the stack when it crashes or is ended.

    Call it once the handler of SIGTERM is set: that one runs after the stack is written, also where it must wait for a
    call in C to return.
    """
    writer, stacks = ends
    for standard in (1, 2):
        os.dup2(writer.fileno(), standard)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=stacks.fileno())
    faulthandler.register(signal.SIGTERM, file=stacks.fileno(), chain=True)


# -- calls of the pool that have not ended, and when its processes count as stuck -------------------------------------


class PendingCalls:
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
