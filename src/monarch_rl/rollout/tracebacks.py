"""Where an environment or a score has failed, as text: without the frames of the code that calls it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

from monarch_rl.episode.failure import shortened

REPORT_CHARACTERS = 6000
"""Of one traceback: an exception may quote megabytes."""
_CALLERS = tuple(str(Path(__file__).parents[1] / room) for room in ("rollout", "runtime"))
_STACK_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in ', re.MULTILINE)
"""Of a stack that faulthandler has written."""
_FATAL = re.compile(r"^Fatal Python error: .*", re.MULTILINE)


def describe(error: BaseException) -> tuple[str, str]:
    """File and line that raised ``error``, and its traceback from the first frame on that is not this package's."""
    start = error.__traceback__
    while start is not None and start.tb_next is not None and _calls(start):
        start = start.tb_next
    text = "".join(traceback.format_exception(type(error), error, start)).rstrip()
    return _place(start), shortened(text, REPORT_CHARACTERS)


def said(error: BaseException) -> str:
    """The exception's own words, without its type."""
    last = "".join(traceback.format_exception_only(type(error), error)).strip()
    return shortened(last.partition(": ")[2], REPORT_CHARACTERS)


def suspended(coroutine: Coroutine[Any, Any, Any]) -> tuple[str, str]:
    """File and line at which a coroutine waits, and the calls that led there; empty if it does not wait."""
    frames = []
    awaited: Any = coroutine
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        awaited = awaited.cr_await
    if not frames:
        return "", ""
    lines = traceback.StackSummary.extract(iter(frames)).format()
    last, number = frames[-1]
    text = "It waited here (most recent call last):\n" + "".join(lines).rstrip()
    return f"{last.f_code.co_filename}:{number}", shortened(text, REPORT_CHARACTERS)


def of_process(stack: str) -> tuple[str, str]:
    """File and line where a process was when it ended, and its calls, most recent first, as faulthandler wrote them.

    Left out are the frames of what called the score. Both are empty if nothing was written.
    """
    before, current, calls = stack.rpartition("Current thread ")
    lines = _FATAL.findall(before)[-1:]
    for line in (current + calls).strip().splitlines():
        if any(caller in line for caller in _CALLERS):
            break
        lines.append(line)
    text = "\n".join(lines)
    first = _STACK_LINE.search(text)
    return (f"{first['file']}:{first['line']}" if first else ""), shortened(text, REPORT_CHARACTERS)


def _calls(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_CALLERS)


def _place(start: TracebackType | None) -> str:
    if start is None:
        return ""
    while start.tb_next is not None:
        start = start.tb_next
    return f"{start.tb_frame.f_code.co_filename}:{start.tb_lineno}"
