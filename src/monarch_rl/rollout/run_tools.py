"""Carries out what a policy calls: each call with a deadline, and a failure costs that call only."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch_rl.episode.failure import KINDS, Failure, shortened
from monarch_rl.model.messages import Message, ToolCall
from monarch_rl.model.tools import Tools, as_tools
from monarch_rl.rollout.tracebacks import REPORT_CHARACTERS, describe, place_of, said, suspended
from monarch_rl.runtime.deadlines import DeadlineExceeded, within

logger = logging.getLogger("monarch_rl")
DEADLINE_S = 30.0
"""Of one call."""
CHARACTERS = 20_000
"""Of one answer; more of a page than that is seldom read, and its tokens are paid for in every later turn."""
ERROR_CHARACTERS = 500
HUNG_THREADS = 64
"""Of one process, from which on it is replaced. Each keeps its stack and what its tool holds."""
_shown: set[tuple[str, str]] = set()
"""Kinds of failures that this process has shown."""
_left: list[tuple[threading.Thread, str]] = []
"""Threads for which nobody waits any more, and the tools that they carry out."""


class ToolsHang(RuntimeError):
    """So many calls of tools go on after their deadline that the worker has to be replaced."""


def check_hung_tools() -> None:
    """Raise ToolsHang if this process has :data:`HUNG_THREADS` threads whose tools do not return."""
    _left[:] = [(thread, tool) for thread, tool in _left if thread.is_alive()]
    if len(_left) >= HUNG_THREADS:
        named = ", ".join(
            f"{tool} ({count} times)" for tool, count in Counter(tool for _, tool in _left).most_common(3)
        )
        raise ToolsHang(
            f"{len(_left)} calls of tools go on though nobody waits for them any more: {named}. A thread cannot be "
            "ended: give what a tool waits for a deadline of its own, or make it a coroutine function"
        )


def show_once(failure: Failure) -> None:
    """Log the first failure of each kind with its traceback."""
    if failure.kind not in _shown and len(_shown) < KINDS:
        _shown.add(failure.kind)
        logger.warning("%s", failure)


async def run_tools(
    calls: Sequence[ToolCall],
    tools: Tools,
    *,
    deadline_s: float = DEADLINE_S,
    characters: int = CHARACTERS,
    failed: Callable[[Failure], None] = show_once,
) -> list[Message]:
    """Carry out calls, all at once, and return the answers in their order, for the policy to read.

    A coroutine function runs on the event loop, which it must not block. Any other function runs on a thread of its
    own. A thread cannot be ended: one that goes on after its deadline goes on beside the run, and its answer is lost;
    a worker that has many of them is replaced (:func:`check_hung_tools`). Code that is not trusted, or that hangs,
    belongs in a scoring process or a sandbox.

    Args:
        calls: of a reply. One with an ``error`` is answered with it.
        tools: those that the conversation was opened with.
        deadline_s: seconds that one call may take.
        characters: of one answer; of a longer one the middle is left out.
        failed: is told what went wrong in a tool. The policy reads that the tool failed, and the exception's words.
    """
    functions = as_tools(tools).functions
    for call in calls:
        if not call.error and call.name not in functions:
            raise LookupError(f"the tool {call.name!r} is given as a schema: carry its calls out yourself")
    answers = (_answer(call, functions, deadline_s, characters, failed) for call in calls)
    return list(await asyncio.gather(*answers))


async def _answer(
    call: ToolCall,
    functions: Mapping[str, Callable[..., Any]],
    deadline_s: float,
    characters: int,
    failed: Callable[[Failure], None],
) -> Message:
    if call.error:
        return call.answer(call.error)
    run = _Call(functions[call.name], call.arguments)
    try:
        result = await within(deadline_s, run.outcome(), f"the tool {call.name}", on="a tool")
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except DeadlineExceeded:
        failed(Failure(f"tool {call.name} took over {deadline_s:g} s", *run.stack()))
        return call.answer(f"The tool {call.name} gave no answer within {deadline_s:g} seconds.")
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():  # with the episode, not by the tool
            raise
        failed(Failure(f"tool {call.name} raised {type(error).__name__}", *describe(error)))
        words = shortened(said(error), ERROR_CHARACTERS)
        return call.answer(f"The tool {call.name} failed: {type(error).__name__}: {words}".removesuffix(": "))
    return call.answer(shortened(text, characters))


def _is_cancelled() -> bool:
    """Whether the running task was asked to end: else a CancelledError comes out of what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class ToolExit(Exception):
    """A tool ended itself in a way that would have ended the worker."""


class _Call:
    """One call under way."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function, self._arguments = function, arguments
        self._coroutine: Any = None
        self._thread: threading.Thread | None = None

    async def outcome(self) -> Any:
        """What the function returns. Raises what it raises."""
        if not inspect.iscoroutinefunction(self._function):
            result = await self._on_thread()
            if not inspect.isawaitable(result):  # an object whose call is a coroutine, for one
                return result
            self._coroutine = result
        else:
            self._coroutine = self._function(**self._arguments)
        try:
            return await self._coroutine  # waits: run_tools has a deadline for it
        except (SystemExit, KeyboardInterrupt) as error:
            raise _as_exit(error) from None

    async def _on_thread(self) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> None:
            result: Any = None
            failure: Exception | None = None
            try:
                result = context.run(self._function, **self._arguments)
            except Exception as error:
                failure = error
            except BaseException as error:
                failure = _as_exit(error)
            try:
                loop.call_soon_threadsafe(_finish, done, result, failure)
            except RuntimeError:  # the loop was closed meanwhile: nobody waits
                return

        self._thread = threading.Thread(target=run, name="tool", daemon=True)
        self._thread.start()
        try:
            return await done  # waits: run_tools has a deadline for it
        except asyncio.CancelledError:
            _left.append((self._thread, getattr(self._function, "__name__", str(self._function))))
            raise

    def stack(self) -> tuple[str, str]:
        """The place where the call is, and all calls that led there; empty if it is nowhere."""
        if self._coroutine is not None:
            return suspended(self._coroutine)
        frame = sys._current_frames().get(self._thread.ident or 0) if self._thread is not None else None
        if frame is None:
            return "", ""
        stack = list(traceback.walk_stack(frame))[::-1]
        lines = "".join(traceback.StackSummary.extract(iter(stack)).format()).rstrip()
        place = place_of((frame.f_code.co_filename, line) for frame, line in stack)
        return place, shortened(f"It was here (most recent call last):\n{lines}", REPORT_CHARACTERS)


def _as_exit(error: BaseException) -> ToolExit:
    return ToolExit(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def _finish(done: asyncio.Future[Any], result: Any, failure: Exception | None) -> None:
    if done.done():  # its deadline has passed
        return
    if failure is None:
        done.set_result(result)
    else:
        done.set_exception(failure)
