"""Runs the tool calls of a policy. Each call has a deadline, and a failure affects only that call."""

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
from dataclasses import replace
from typing import Any

from monarch_rl.episode.failure import KINDS, Failure, shortened
from monarch_rl.errors import DeadlineExceeded, ToolExit, ToolsHang
from monarch_rl.model.messages import Message, ToolCall
from monarch_rl.model.tools import Tools, as_tools
from monarch_rl.rollout.episode_clock import tools_running
from monarch_rl.rollout.tracebacks import REPORT_CHARACTERS, describe, exception_message, place_of, suspended
from monarch_rl.runtime.deadlines import within
from monarch_rl.user_code import definition
from monarch_rl.values import plain

logger = logging.getLogger("monarch_rl")
DEADLINE_S = 30.0
"""Deadline in seconds of one call."""
CHARACTERS = 20_000
"""Maximum characters of one answer. More of a page is seldom read, and its tokens are processed again in every later
turn."""
ERROR_CHARACTERS = 500
HUNG_THREADS = 64
"""Number of hung threads at which a process is replaced. Each keeps its stack and the objects of its tool."""
_shown: set[tuple[str, str]] = set()
"""Kinds of failures that this process has logged."""
_left: list[tuple[threading.Thread, str]] = []
"""Threads that nobody waits for any more, with the name of their tool."""


def check_hung_tools() -> None:
    """Raise ToolsHang if this process has :data:`HUNG_THREADS` threads whose tools do not return."""
    _left[:] = [(thread, tool) for thread, tool in _left if thread.is_alive()]
    if len(_left) >= HUNG_THREADS:
        named = ", ".join(
            f"{tool} ({count} times)" for tool, count in Counter(tool for _, tool in _left).most_common(3)
        )
        raise ToolsHang(
            f"{len(_left)} tool calls are still running after their deadline: {named}. Threads cannot be ended: give "
            "whatever the tool waits for a deadline of its own, or make the tool a coroutine function"
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
    """Run tool calls concurrently and return the answers in their order, for the policy to read.

    Text is answered as it is, any other value as JSON, by the rule of :func:`monarch_rl.values.plain`; a value without
    a JSON form fails the call. The answer to a call whose tool raised, hung or returned such a value has a
    :attr:`~monarch_rl.model.messages.Message.failed`.

    A coroutine function runs on the event loop and must not block it. Any other function runs on its own thread. A
    thread cannot be ended: after its deadline it continues in the background, and its answer is discarded. A worker
    with many such threads is replaced (:func:`check_hung_tools`). Untrusted code, or code that may hang, belongs in a
    scoring process or a sandbox.

    Args:
        calls: tool calls of a reply. A call with an ``error`` is answered with that error.
        tools: the tools that the conversation was opened with.
        deadline_s: deadline in seconds of one call.
        characters: maximum characters of one answer; a longer one loses its middle.
        failed: called with the failure of a tool. The policy reads that the tool failed, and the exception's message.

    Raises:
        LookupError: a called tool was given as a schema only.
        InfrastructureFailed, JudgeFailed, SandboxFailed: a tool raised it, which costs the episode.
    """
    functions = as_tools(tools).functions
    for call in calls:
        if not call.error and call.name not in functions:
            raise LookupError(f"the tool {call.name!r} is only a schema, without a function: run its calls yourself")
    answers = [asyncio.ensure_future(_answer(call, functions, deadline_s, characters, failed)) for call in calls]
    with tools_running():
        try:
            return list(await asyncio.gather(*answers))
        finally:
            for answer in answers:  # if one raised, nobody waits for the others
                answer.cancel()


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
    except DeadlineExceeded:
        failed(Failure(f"tool {call.name} took over {deadline_s:g} s", *run.stack()))
        reason = f"no answer within {deadline_s:g} seconds"
        return replace(call.answer(f"The tool {call.name} gave {reason}."), failed=reason)
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():  # the episode was cancelled, not the tool
            raise
        # The policy must not be judged by what it does without the service. Exceptions of other libraries may be the
        # fault of its arguments, such as a host that does not exist: it reads those.
        if getattr(error, "infrastructure", False):
            raise
        failed(Failure(f"tool {call.name} raised {type(error).__name__}", *describe(error)))
        message = shortened(_encodable(exception_message(error)), ERROR_CHARACTERS)
        reason = f"{type(error).__name__}: {message}".removesuffix(": ")
        return replace(call.answer(f"The tool {call.name} failed: {reason}"), failed=reason)
    try:
        value = plain(result)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except Exception as error:  # ValueError; the value's own methods may raise anything
        reason = f"it returned no JSON value: {_encodable(exception_message(error))}"
        _, place = definition(functions[call.name])
        failed(Failure(f"tool {call.name} returned no JSON value", place, f"{place}: {error}".removeprefix(": ")))
        return replace(call.answer(f"The tool {call.name} failed: {reason}"), failed=reason)
    return call.answer(shortened(text, characters))


def _encodable(text: str) -> str:
    """``text``, with halves of surrogate pairs escaped: a message of an OSError contains the file's name."""
    return text.encode(errors="backslashreplace").decode()


def _is_cancelled() -> bool:
    """Whether the running task was cancelled; otherwise a CancelledError comes from something it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Call:
    """One running call."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function, self._arguments = function, arguments
        self._coroutine: Any = None
        self._thread: threading.Thread | None = None

    async def outcome(self) -> Any:
        """Result of the function. Raises what the function raises."""
        if not inspect.iscoroutinefunction(self._function):
            result = await self._on_thread()
            if not inspect.isawaitable(result):  # it is awaitable, for example, if ``__call__`` is a coroutine function
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
            except RuntimeError:  # the loop has been closed: nobody waits for the result
                return

        self._thread = threading.Thread(target=run, name="tool", daemon=True)
        self._thread.start()
        try:
            return await done  # waits: run_tools has a deadline for it
        except asyncio.CancelledError:
            _left.append((self._thread, getattr(self._function, "__name__", str(self._function))))
            raise

    def stack(self) -> tuple[str, str]:
        """Place of the running call, and its stack; empty if the call is not running."""
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
