"""Computes scores in separate processes, each with a deadline.

A score function may be slow, may hang in C code and may crash; none of this may affect the event loop that runs the
episodes. It therefore runs in a pool of processes (pebble), which are forked by the host's fork server, or spawned if
there is none. A process that exceeds its deadline is killed and replaced, and the caller gets :class:`ScoringFailed`
with the traceback of the exception, or with the stack of the killed process.

A score whose process died is computed once more, because something else may have killed the process, such as the kernel
when memory ran out. So is a score that exceeded its deadline while this process was stopped or the machine had no cores
for the run; its second deadline is longer by the lost time, up to half of :data:`STUCK_S` (``runtime/deadlines.py``).
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import faulthandler
import functools
import itertools
import math
import multiprocessing.util
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any, NoReturn, TypeVar

from pebble import ProcessExpired, ProcessPool
from pebble.common.process import process_exit

from monarch_rl.episode.failure import UNUSABLE
from monarch_rl.errors import ScorerBroken, ScoreTookTooLong, ScoringFailed, UnusableReward, is_infrastructure
from monarch_rl.rollout.tracebacks import describe, exception_message, process_stack
from monarch_rl.runtime import wait_registry
from monarch_rl.runtime.by_value import ByValue, from_bytes, run_recipe_code, to_bytes
from monarch_rl.runtime.deadlines import DeadlineClock, done_or_late
from monarch_rl.runtime.forking.fork_context import ForkContext
from monarch_rl.runtime.gathered_calls import GatheredCalls
from monarch_rl.runtime.process import die_with_parent, exit_code_of, freeze_heap, signal_name
from monarch_rl.tasks.task import Outcome, as_outcome, as_outcomes, returned_by
from monarch_rl.user_code import definition

T = TypeVar("T")
ScoreFunction = Callable[..., Any]
"""Scores one answer, or all answers of a group."""
Convert = Callable[[Any], Any]
"""Converts a function's return value to plain values, in the scoring process; raises TypeError or ValueError if it is
invalid."""
FUNCTIONS_KEPT = 64
"""Number of functions whose pickled bytes are cached: the newest ones that hold no state."""
STUCK_S = 30.0
"""Seconds beyond a score's deadline after which the processes count as stuck, if neither it nor a score requested
before it has ended by then. A new process needs seconds for its imports and its data."""
TOGETHER_S = 0.2
"""Seconds within which several scores of one call have to begin (:meth:`Scorer.score_each`). Later ones are computed by
all processes at once."""
TOGETHER_DEADLINE_S = 2.0
"""Deadline in seconds of a call with several scores: longer ones are scored call by call, with their own deadline."""
APART = 16
"""Number of groups that are scored call by call after one whose scores were slow or ended their process; and number of
fast scores of a function before calls of it are gathered (:meth:`Scorer.score`)."""
FAST_S = 0.001
"""Seconds up to which a score is fast. A call of the pool costs a worker a third of that."""
MOST_GATHERED = 32
"""Maximum number of gathered calls that one process computes, so that the other processes share the work."""
LOST_SHARE = 0.5
"""Share of a late score's time that the process was stopped, or had no core, from which on the score is computed once
more. On a busy machine every process waits at times."""

EXIT_BY_SCORE = 159
"""Exit code of a scoring process whose score calls ``os._exit(0)``: pebble waits until the deadline of the score if a
process ends with 0."""

PRELOAD = "rollout"
"""Name of the fork server's preload for scoring processes."""


class _DeadlinePassed(TimeoutError):
    """A score exceeded its deadline; for ``lost_share`` of the time this process was stopped or had no core."""

    def __init__(self, lost_share: float) -> None:
        super().__init__()
        self.lost_share = lost_share


class Scorer:
    """A pool of scoring processes. They end with this process, however it ends.

    Args:
        processes: number of scores that are computed at once.
        deadline_s: deadline in seconds of one score, from its start in a process.
        warm_up: called once in every new process before its first score (imports, data); pickled by value.
        fork_server: name of the fork server; "" is the one in this process's environment.
    """

    def __init__(
        self, processes: int, deadline_s: float, warm_up: Callable[[], object] | None = None, fork_server: str = ""
    ) -> None:
        self.deadline_s = deadline_s
        self._processes = processes
        self._functions: dict[int, _Function] = {}
        """The newest functions that hold no state, by identity."""
        self._gathered = GatheredCalls(self._compute_gathered, MOST_GATHERED)
        self._output = ScorerOutput()
        self._make_pool = functools.partial(
            ProcessPool,
            max_workers=processes,
            initializer=_start,
            initargs=(os.getpid(), self._output.ends, None if warm_up is None else ByValue(warm_up, "warm_up")),
            context=ForkContext(PRELOAD, "scorer", fork_server),
        )
        self._pool = self._make_pool()
        self._works = False
        """Whether the pool has computed a score."""
        self._starting: tuple[ProcessPool, asyncio.Task[None]] | None = None
        """The pool whose processes are being started, or were started last."""
        self._replacing = asyncio.Lock()
        self._pending = PendingCalls()
        self._unanswered = 0
        """Number of calls that the pool has not answered."""
        self._apart = 0
        """Number of groups to score call by call."""

    @property
    def queue(self) -> str:
        """Describes the calls that wait for a process; "" if none does."""
        waiting = self._unanswered - self._processes
        return f"{waiting} calls wait for the {self._processes} scoring processes of the worker" if waiting > 0 else ""

    async def score(self, function: ScoreFunction, *args: Any) -> Outcome:
        """Run ``function(*args)`` in the pool. The function is pickled by value, with the state it holds at the time of
        the call; its global variables have the values with which they first arrived in the process.

        Calls of a function whose last scores were fast are gathered for one iteration of the event loop, because a call
        of the pool takes longer than they do. If a score then takes too long or ends its process, those without a
        result are computed call by call.

        Raises:
            ScoringFailed: the function raised, exceeded the deadline, or its process died twice.
            ScorerBroken: the processes do not start.
            TypeError: the function or its arguments cannot be pickled.
        """
        known, result = self._known(function), None
        call = _calls(known, [args], as_outcome)
        if known.fast_scores >= APART:
            result = await self._gathered.result(known, _GatheredCall(call))  # waits: its scores have deadlines
        if result is None:
            seconds = math.inf
            try:
                (result,), seconds = await self._compute(call)
            finally:
                known.fast_scores = known.fast_scores + 1 if seconds <= FAST_S else min(known.fast_scores, 0)
        outcome: Outcome = _returned(result)
        return outcome

    async def score_group(self, function: ScoreFunction, *args: Any) -> list[Outcome]:
        """Like :meth:`score`, for a function that returns one reward per episode of a group."""
        return await self.call(function, args, as_outcomes)  # waits: its scores have deadlines

    async def call(self, function: ScoreFunction, args: tuple[Any, ...], convert: Callable[[Any], T]) -> T:
        """``convert(function(*args))``, computed in the pool. Raises as :meth:`score` does."""
        (result,), _ = await self._compute(_calls(self._known(function), [args], convert))
        converted: T = _returned(result)
        return converted

    async def score_each(
        self,
        function: ScoreFunction,
        calls: Sequence[tuple[Any, ...]],
        take: Callable[[int, Outcome | ScoringFailed], None],
    ) -> None:
        """Like :meth:`score`, for several calls of a function. Each has its own copies of its arguments, and fails by
        itself.

        Fast ones are computed one after the other in one process, because a call of the pool takes longer than they do.
        What has not begun after :data:`TOGETHER_S` is scored call by call, and so is everything if the process is ended
        meanwhile: a score may then be computed twice.

        Args:
            take: receives the place of a call and its outcome or failure.

        Raises:
            ScorerBroken: the processes do not start.
            TypeError: the function or its arguments cannot be pickled.
        """
        done: list[Any] = []
        if self._apart or len(calls) == 1:
            self._apart = max(0, self._apart - 1)
        else:
            done, _ = await self._together(_calls(self._known(function), calls, as_outcome, TOGETHER_S))
            if len(done) < len(calls):
                self._apart = APART
        for place, result in enumerate(done):
            take(place, result.failure if isinstance(result, Raised) else result)

        async def score_alone(place: int) -> None:
            try:
                take(place, await self.score(function, *calls[place]))  # waits: it has a deadline
            except ScoringFailed as failed:
                take(place, failed)

        await asyncio.gather(*map(score_alone, range(len(done), len(calls))))  # waits: each score has a deadline

    async def _together(self, calls: _Calls) -> tuple[list[Any], float]:
        """Results of calls in one process, and their seconds: those that begin in time; none if the process is ended
        meanwhile."""
        try:
            return await self._try(self._pool, calls, min(self.deadline_s, TOGETHER_DEADLINE_S))
        except (_DeadlinePassed, ProcessExpired, BrokenProcessPool, ScoringFailed):  # each call will tell its own
            self._output.take_stack()  # it does not tell which score it is of
            return [], 0.0

    async def _compute_gathered(self, function: _Function, calls: list[_GatheredCall]) -> None:
        results = list[Any]()
        try:
            if len(calls) > 1:
                args = [args for each in calls for args in each.call.args]
                together = replace(calls[0].call, args=args, begin_within_s=TOGETHER_S)
                results, seconds = await self._together(together)
                if len(results) < len(calls):
                    function.fast_scores = -APART * MOST_GATHERED
                elif seconds > FAST_S * len(calls):
                    function.fast_scores = 0
        finally:
            for each, result in itertools.zip_longest(calls, results):
                if not each.done.done():
                    each.done.set_result(result)

    def _known(self, function: ScoreFunction) -> _Function:
        """What is known of a function: of one that holds state, which may have changed since the last call, nothing."""
        if not _is_stateless(function):
            return _Function(function)
        cached = self._functions.get(id(function))
        if cached is None:
            cached = self._functions[id(function)] = _Function(function)
            if len(self._functions) > FUNCTIONS_KEPT:
                del self._functions[next(iter(self._functions))]
        return cached

    async def _compute(self, call: _Calls) -> tuple[list[Any], float]:
        """A score, or :class:`Raised` if it raised, and its seconds; computed twice if necessary. Raises as
        :meth:`score` does."""
        error: Exception | None = None
        deadline_s = self.deadline_s
        for attempt in range(2):
            pool = self._pool
            try:
                return await self._try(pool, call, deadline_s)
            except _DeadlinePassed as late:
                if attempt == 0 and late.lost_share >= LOST_SHARE:
                    self._output.take_stack()  # the second attempt may leave another stack
                    longest_s = deadline_s + STUCK_S / 2  # so that calls behind it do not treat the pool as stuck
                    deadline_s = min(deadline_s / max(1 - late.lost_share, 0.01), longest_s)
                    continue
                place, stack = process_stack(self._output.take_stack())
                report = f"{stack}\nIf a score may take longer, raise --rollout.score-deadline-s.".lstrip()
                infrastructure = late.lost_share >= LOST_SHARE  # the machine had no time for the score, twice
                raise ScoreTookTooLong(
                    f"score took over {self.deadline_s:g} s", "", place, report, infrastructure
                ) from None
            except ProcessExpired as expired:
                error = expired
            except BrokenProcessPool as broken:
                await self._replace(pool, broken)
                error = broken
        how = _describe_exit(error.exitcode) if isinstance(error, ProcessExpired) else ("", str(error))
        place, stack = process_stack(self._output.take_stack())
        report = f"{stack}\nIt was computed twice, each time by another process, and each time: {how[1]}.".lstrip()
        # A score's own code ends its process by an exit code or a fault; what kills it is the machine.
        killed = not isinstance(error, ProcessExpired) or error.exitcode in (-signal.SIGKILL, -signal.SIGTERM)
        raise ScoringFailed(f"score ended its process{how[0]}", f"{error}, twice", place, report, killed) from error

    async def _try(self, pool: ProcessPool, call: _Calls, deadline_s: float) -> tuple[list[Any], float]:
        """Results of calls in a process of the pool, and their seconds.

        Raises:
            _DeadlinePassed: the call exceeded its deadline.
            ProcessExpired: the process died.
            BrokenProcessPool: the pool does not run.
            ScoringFailed: shared memory is full.
        """
        if not self._works:
            await self._wait_until_started(pool)
        if not pool.active:
            raise BrokenProcessPool("the pool has ended")
        future = asyncio.wrap_future(pool.schedule(_run, args=(call,), timeout=deadline_s))
        clock = DeadlineClock(deadline_s, "a score")
        self._unanswered += len(call.args)
        try:
            limit_s, half_s = self.deadline_s + STUCK_S, self.deadline_s / 2
            await self._pending.ends(future, pool, limit_s, half_s, clock.lost_share)
            results: tuple[list[Any], float] = future.result()
        except TimeoutError as error:
            raise _DeadlinePassed(clock.lost_share()) from error
        finally:
            self._unanswered -= len(call.args)
            future.cancel()
        self._works = True
        return results

    async def _wait_until_started(self, pool: ProcessPool) -> None:
        """Wait until the processes of a pool have started, which pebble does at the first use of the pool.

        This happens on a thread, because it waits for the fork server, which may be busy with imports or stuck for
        minutes.
        """
        if self._starting is None or self._starting[0] is not pool or _has_failed(self._starting[1]):
            starting = asyncio.ensure_future(asyncio.to_thread(_start_processes, pool))
            self._starting = pool, starting
        starting = self._starting[1]
        if not starting.done():
            with wait_registry.waiting("scoring processes to be started by the fork server"):
                await asyncio.shield(starting)  # waits: EpisodeRunner has a deadline for an episode's code
        starting.result()

    async def _replace(self, pool: ProcessPool, error: BrokenProcessPool) -> None:
        """Make another pool if ``pool`` has worked before.

        A pool breaks when a process is killed while it takes a task. It waits without a deadline for a process that was
        stopped before it took one.
        """
        async with self._replacing:
            if self._pool is not pool:  # another call has replaced it
                return
            if not self._works:
                printed = await asyncio.to_thread(self._output.tail)
                message = f"the scoring processes do not start; the end of their output:\n{printed}"
                raise ScorerBroken(message) from error
            # The old pool must end first: its threads may still read from pipes whose numbers a new pool would get.
            await asyncio.to_thread(_end_pool, pool)
            self._pool, self._works = self._make_pool(), False
            self._pending.give_up(pool)

    def close(self) -> None:
        """End the processes. Blocks for a moment; do not call it on the event loop."""
        _end_pool(self._pool)
        self._output.close()


@dataclass(eq=False)
class _Function:
    """A function, and how fast its scores were."""

    function: ScoreFunction
    fast_scores: int = 0
    """Number of fast scores since the last one that was not; negative after gathered calls that failed together."""

    @functools.cached_property
    def by_value(self) -> ByValue[ScoreFunction]:
        """Its pickled form. Raises TypeError if it cannot be pickled."""
        return ByValue(self.function)


@dataclass(eq=False)
class _GatheredCall:
    """A call that is computed together with others, and its result: None if it has to be computed by itself."""

    call: _Calls
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def _is_stateless(function: ScoreFunction) -> bool:
    """Whether a function is only code: no closure, no defaults, no attributes, not another callable object."""
    if not isinstance(function, FunctionType):
        return False
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__)


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and task.exception() is not None


def _start_processes(pool: ProcessPool) -> None:
    try:
        _ = pool.active  # reading it starts the pool; the caller checks whether it is active
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        detail = "their locks are in /dev/shm, which is full: free space there, or enlarge it (docker --shm-size)"
        raise ScoringFailed("scoring processes could not start", detail, infrastructure=True) from error


def _end_pool(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()  # waits: stop() kills what does not end


def _describe_exit(exit_code: int) -> tuple[str, str]:
    """How a process ended, as a suffix of the reason and as a sentence of the report."""
    if exit_code >= 0:
        return "", f"it ended with exit code {0 if exit_code == EXIT_BY_SCORE else exit_code}"
    name = signal_name(-exit_code)
    return f" by {name}", f"it was ended by {name}"


def _start(parent: int, output: tuple[Connection, Connection], warm_up: ByValue[Callable[[], object]] | None) -> None:
    die_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGTERM, _end)
    print_into(output)
    read_nothing()
    run_recipe_code()
    # As in a script: the default start method, and exit handlers, which pebble skips when it ends a process.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.util.Finalize(None, atexit._run_exitfuncs, exitpriority=0)
    os.setpgid(0, 0)  # what a score starts is killed with its process (runtime/process.py:end_group)
    os.register_at_fork(after_in_child=_as_forked_by_a_script)
    if warm_up is not None:
        warm_up.load()()
    freeze_heap()


def _end(number: int, _: object) -> None:
    """Handle SIGTERM as pebble does, but let a process that is ending already, because its channel was closed, finish
    its exit handlers: pebble's own handler would leave out the rest of them."""
    if not multiprocessing.util.is_exiting():
        process_exit(number)


def _as_forked_by_a_script() -> None:
    """In a process that a score forks: end by SIGTERM at once, without writing a stack for the score's failure."""
    faulthandler.unregister(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class Raised:
    """Description of an exception that a score raised; the exception itself cannot always be pickled."""

    reason: str
    message: str
    place: str
    report: str
    """Its traceback, or the value that is not a reward."""
    infrastructure: bool
    """As :func:`~monarch_rl.errors.is_infrastructure` finds."""

    @property
    def failure(self) -> ScoringFailed:
        """The exception that the caller gets."""
        return ScoringFailed(self.reason, self.message, self.place, self.report, self.infrastructure)


@dataclass(frozen=True, slots=True)
class _Calls:
    """A function and the arguments of its calls, for a scoring process. They are unpickled on arrival, before the
    deadline of the score starts: unpickling a function may import modules for seconds."""

    function: bytes
    """By value (:class:`ByValue`)."""
    args: list[bytes]
    """The arguments of each call."""
    convert: Convert
    begin_within_s: float
    """Seconds after which no further call begins."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _load_calls, (self.function, self.args, self.convert, self.begin_within_s)


def _calls(
    function: _Function, calls: Sequence[tuple[Any, ...]], convert: Convert, begin_within_s: float = math.inf
) -> _Calls:
    what = f"the arguments of {getattr(function.function, '__name__', function.function)}"
    pickled = [to_bytes(args, what) for args in calls]
    return _Calls(function.by_value.data, pickled, convert, begin_within_s)


def _load_calls(function: bytes, args: list[bytes], convert: Convert, begin_within_s: float) -> Any:
    """The function, the arguments of each call, ``convert`` and ``begin_within_s``. The error of unpickling some of
    them, which must cost only these scores, takes their place. Each call has its own copies of its arguments, which it
    may change."""
    try:
        return ByValue.of_bytes(function).load(), list(map(_load_args, args)), convert, begin_within_s
    except BaseException as error:
        return error


def _load_args(args: bytes) -> tuple[Any, ...] | BaseException:
    try:
        loaded: tuple[Any, ...] = from_bytes(args)
        return loaded
    except BaseException as error:
        return error


def compute(function: ScoreFunction, args: tuple[Any, ...], convert: Convert) -> Any:
    """``convert(function(*args))``; :class:`Raised` if either raised."""
    process = os.getpid()
    try:
        # Converted to plain numbers here: they are written as JSON, and an invalid one must cost only this episode.
        return returned_by(function, function(*args), convert)
    except UnusableReward as error:
        return Raised(f"score {UNUSABLE}", str(error), error.place, str(error), infrastructure=False)
    except BaseException as error:  # SystemExit, too, must not end the scoring process's event loop
        if os.getpid() != process:  # a forked copy ends as one of a script does
            os._exit(exit_code_of(functools.partial(_raise, error)))
        raised = _raised(error)
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # its arguments do not fit
            raised = replace(raised, place=definition(function)[1] or raised.place)
        return raised


def _returned(result: Any) -> Any:
    """A result of a call. Raises the failure of a call that raised."""
    if isinstance(result, Raised):
        raise result.failure
    return result


def _raised(error: BaseException) -> Raised:
    reason = f"score raised {type(error).__name__}"
    return Raised(reason, exception_message(error), *describe(error), is_infrastructure(error))


def _run(
    calls: tuple[ScoreFunction, list[tuple[Any, ...] | BaseException], Convert, float] | BaseException,
) -> tuple[list[Any], float]:
    """Compute scores, at least one; each is :class:`Raised` if it raised. Also returns the seconds that they took."""
    process, exits, began = os.getpid(), os._exit, time.monotonic()
    os._exit = functools.partial(_exit_of, process, exits)
    outcomes: list[Any] = []
    try:
        if isinstance(calls, BaseException):
            raise calls
        function, arguments, convert, begin_within_s = calls
        for args in arguments:
            outcomes.append(_raised(args) if isinstance(args, BaseException) else compute(function, args, convert))
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is left would interrupt another score
            if os.getpid() != process or time.monotonic() - began > begin_within_s:
                break
    except BaseException as error:  # of unpickling the function, or of an alarm that the last score left
        outcomes = outcomes or [_raised(error)]
    finally:
        os._exit = exits
        signal.setitimer(signal.ITIMER_REAL, 0)
    if os.getpid() != process:  # a forked copy, which would also send an answer and take the next call
        os._exit(0)
    return outcomes, time.monotonic() - began


def _exit_of(process: int, exits: Callable[[int], NoReturn], status: int) -> NoReturn:
    """``os._exit`` in a score; processes that it forks end with their own status."""
    exits(EXIT_BY_SCORE if status == 0 and os.getpid() == process else status)


def _raise(error: BaseException) -> NoReturn:
    raise error


# -- output of scoring processes, up to a limit, and their stacks when they are killed --------------------------------

SHOWN_BYTES = 2**16
"""Bytes that the scoring processes of a worker may print in :data:`WINDOW_S` seconds."""
WINDOW_S = 60.0
TAIL_BYTES = 4096
"""Newest bytes of output that are kept for the error of processes that do not start."""
DRAIN_S = 1.0
"""Maximum seconds for reading the remaining output of ended processes."""


class ScorerOutput:
    """The output of one worker's scoring processes, which it prints on stderr, up to a limit.

    Without a limit, a score that prints for each answer would bury the run's own output. A pipe replaces the standard
    output and error of the processes, so that programs that a score starts are limited, too.
    """

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        stacks = os.memfd_create("monarch_rl-stacks")
        self.ends = Connection(writer, readable=False), Connection(stacks)
        """The descriptors that a scoring process gets (:func:`print_into`); they can be pickled while a process is
        started."""
        self._owner = wait_registry.current_name()
        self._tail = b""
        self._left, self._window_ends = 0, -math.inf
        self._left_out = 0
        """Dropped bytes in this window."""
        self._thread = threading.Thread(target=self._forward, name="scorer-output", daemon=True)
        self._thread.start()

    def take_stack(self) -> str:
        """Stacks that processes wrote since the last call when they were killed or crashed; may be empty.

        If several processes end at the same time, one call may return all stacks, and the next call none: pebble does
        not report which process computed a score that took too long.
        """
        stacks = self.ends[1].fileno()
        text = os.pread(stacks, 2**20, 0).decode(errors="replace")
        # All processes write at one offset, because they share the open file.
        os.ftruncate(stacks, 0)
        os.lseek(stacks, 0, os.SEEK_SET)
        return text

    def tail(self) -> str:
        """The end of the output. May wait for a moment: do not call it on the event loop."""
        poll, deadline = select.poll(), time.monotonic() + DRAIN_S
        poll.register(self._reader, select.POLLIN)
        while poll.poll(0) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._tail.decode(errors="replace").strip()

    def close(self) -> None:
        """Close it once the processes have ended. May wait for a moment: do not call it on the event loop."""
        for end in self.ends:
            end.close()
        self._thread.join(DRAIN_S)  # a program that a score has started may still hold the pipe

    def _forward(self) -> None:
        """On its own thread: read all output, so that no process blocks, and print it up to the limit."""
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
                self._print_notice(f"the scoring processes of {self._owner} have printed {limit}: the rest is left out")
            self._left_out += len(data) - len(shown)
            self._left -= len(shown)
        self._report_dropped()
        os.close(self._reader)

    def _report_dropped(self) -> None:
        if self._left_out:
            self._print_notice(
                f"{self._left_out:,} bytes that the scoring processes of {self._owner} printed were left out"
            )
            self._left_out = 0

    def _print_notice(self, sentence: str) -> None:
        _print(f"\n[{sentence}]\n".encode())


def _print(data: bytes) -> None:
    with suppress(OSError):  # nobody reads this process's output any more
        os.write(2, data)


def read_nothing() -> None:
    """Let code and programs that read the standard input find its end: nobody writes to it, and they would wait."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def print_into(ends: tuple[Connection, Connection]) -> None:
    """In a scoring process: print into the pipe from now on, and write the stack when the process crashes or is killed.

    Call it after the handler of SIGTERM is set. The stack is then written before that handler runs, even if the handler
    has to wait for a C call to return.
    """
    writer, stacks = ends
    for stream in (sys.stdout, sys.stderr):  # first, since it asks for the position of a file
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    for standard in (1, 2):
        os.dup2(writer.fileno(), standard)
    faulthandler.enable(file=stacks.fileno())
    faulthandler.register(signal.SIGTERM, file=stacks.fileno(), chain=True)


# -- pending calls of the pool, and when its processes count as stuck -------------------------------------------------


class PendingCalls:
    """Waits for calls of pools. A pool ends a call that exceeds its deadline, except if its process was stopped before
    it reported that it took the call, or if the pool itself has ended."""

    def __init__(self) -> None:
        self._pools: dict[asyncio.Future[Any], ProcessPool] = {}
        """Pool of each call, in the order of the calls."""

    async def ends(
        self, future: asyncio.Future[Any], pool: ProcessPool, limit_s: float, half_s: float, on_half: Callable[[], Any]
    ) -> None:
        """Wait until a call ends.

        Args:
            future: the call, which the pool has just been given.
            limit_s: seconds, not counting time without cores for the run, within which this call or one before it has
                to end.
            half_s: seconds after which ``on_half`` is called, unless the call has ended.

        Raises:
            BrokenProcessPool: ``limit_s`` has passed, or the pool was given up.
        """
        self._pools[future] = pool
        try:
            await done_or_late(future, half_s)
            if not future.done():
                on_half()
                stuck, ahead = DeadlineClock(limit_s - half_s, "any score"), self._ahead_of(future)
            while not future.done():
                # Only calls before it count: calls after it may end while the process that took it is stopped.
                if (left := self._ahead_of(future)) < ahead:
                    stuck, ahead = DeadlineClock(limit_s, "any score"), left
                window_s = stuck.next_window_s()
                if window_s is None:
                    raise BrokenProcessPool(f"no score has ended for {limit_s:g} s")
                await done_or_late(future, window_s)
        finally:
            del self._pools[future]
        if future.cancelled():
            raise BrokenProcessPool("the pool was given up")

    def give_up(self, pool: ProcessPool) -> None:
        """Cancel the calls of a pool that has ended."""
        for future in [future for future, of in self._pools.items() if of is pool]:
            future.cancel()

    def _ahead_of(self, future: asyncio.Future[Any]) -> int:
        """Number of pending calls that the same pool was given before this one."""
        pool = self._pools[future]
        before = itertools.takewhile(lambda other: other is not future, self._pools)
        return sum(self._pools[other] is pool for other in before)
