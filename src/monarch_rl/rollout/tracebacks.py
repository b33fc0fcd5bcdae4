"""Describes where an episode, environment or score failed, without the frames of the code that called it."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from monarch_rl.episode.failure import shortened

REPORT_CHARACTERS = 6000
"""Maximum characters of a traceback: an exception may quote megabytes."""
_PACKAGE = f"{Path(__file__).parents[1]}/"
_CALLERS = tuple(_PACKAGE + path for path in ("rollout", "runtime", "tasks/task.py"))
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_IN_SCORER = "Only scores run in the main thread of a process: use policy.in_scorer."
_AWAIT = "An episode is a coroutine: await instead, or use asyncio.to_thread."
_WAYS_OUT = (
    ("signal only works in main thread", _IN_SCORER),
    ("set_wakeup_fd only works in main thread", _IN_SCORER),
    ("cannot be called from a running event loop", _AWAIT),
    ("event loop is already running", _AWAIT),
    ("while another loop is running", _AWAIT),
    ("Already running asyncio in this thread", _AWAIT),
    ("it's not the same object as", "Import that module within the function: its objects were sent here by value."),
    ("EOF when reading a line", "Nobody can answer: the processes of a run have no standard input."),
)
"""Messages of Python about what works in a script but not here, and what to do instead."""
_STACK_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in ', re.MULTILINE)
"""A line of a stack that faulthandler wrote."""
_FATAL = re.compile(r"^Fatal Python error: .*", re.MULTILINE)


def describe(error: BaseException) -> tuple[str, str]:
    """The last file and line before ``error`` outside libraries, and its traceback without the callers' frames."""
    start = error.__traceback__
    while start is not None and start.tb_next is not None and _calls(start):
        start = start.tb_next
    text = "".join(traceback.format_exception(type(error), error, start)).rstrip()
    last = exception_message(error)  # not str(), which the error's own class may have broken
    text = shortened(text, REPORT_CHARACTERS)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(start)]
    ways_out = [way_out for message, way_out in _WAYS_OUT if message in last]
    if isinstance(error, NameError) and frames and frames[-1][0] == "<string>":
        ways_out.append("Text that eval runs finds only what the function itself names: name it in the function.")
    return place_of(frames), "\n".join([text, *ways_out])


def exception_message(error: BaseException) -> str:
    """The exception's message, without its type."""
    last = "".join(traceback.format_exception_only(type(error), error)).strip()
    return shortened(last.partition(": ")[2], REPORT_CHARACTERS)


def suspended(coroutine: Coroutine[Any, Any, Any]) -> tuple[str, str]:
    """The last file and line outside libraries at which a coroutine waits, and its stack; empty if it does not wait."""
    frames = []
    awaited: Any = coroutine
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        awaited = awaited.cr_await
    if not frames:
        return "", ""
    lines = traceback.StackSummary.extract(iter(frames)).format()
    text = "It waited here (most recent call last):\n" + "".join(lines).rstrip()
    place = place_of((frame.f_code.co_filename, line) for frame, line in frames)
    return place, shortened(text, REPORT_CHARACTERS)


def process_stack(stack: str) -> tuple[str, str]:
    """The last file and line outside libraries at which a process ended, and its stack as faulthandler wrote it, most
    recent call first.

    The frames of the code that called the score are removed. Both are empty if ``stack`` is.
    """
    before, current, calls = stack.rpartition("Current thread ")
    lines = _FATAL.findall(before)[-1:]
    for line in (current + calls).strip().splitlines():
        if any(caller in line for caller in _CALLERS):
            break
        lines.append(line)
    text = "\n".join(lines)
    frames = [(match["file"], int(match["line"])) for match in _STACK_LINE.finditer(text)]
    return place_of(reversed(frames)), shortened(text, REPORT_CHARACTERS)


def _calls(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_CALLERS)


def place_of(frames: Iterable[tuple[str, int]]) -> str:
    """The last file and line outside libraries, or the last one at all; frames are ordered from the first call to the
    last."""
    places = list(frames)
    own = [place for place in places if not place[0].startswith((*_LIBRARIES, *_CALLERS, "<"))]
    file, line = (own or places or [("", 0)])[-1]
    return f"{file}:{line}" if file else ""
