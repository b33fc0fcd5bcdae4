"""Passes a scheduler's error to the engine's process; otherwise it would appear only in the scheduler's output.

The engine and its schedulers share an anonymous file that outlives each of them. The first error is the cause: other
ranks of the engine then fail because that rank is gone. This module must not import anything heavy.
"""

from __future__ import annotations

import os
import traceback
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

MAX_CHARACTERS = 1600
"""Maximum characters of a message. Of a longer one the first third and the last two thirds of this length are kept."""
_END = "\0"
_file: int | None = None
"""In a scheduler: the file descriptor to write to."""


class ErrorFile:
    """The engine's end. Create it before the engine's schedulers are started."""

    def __init__(self) -> None:
        self._file = os.memfd_create("monarch_rl-error-file", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def first(self) -> str:
        """The error of the first scheduler that failed; "" if none has recorded one."""
        text = os.pread(self._file, 4 * MAX_CHARACTERS + len(_END), 0).decode(errors="replace")
        return text.partition(_END)[0]

    def for_scheduler(self) -> Any:
        """A picklable reference for a scheduler process that is being started; it passes it to :func:`use`."""
        return DupFd(self._file)


def use(file: Any) -> None:
    """In a scheduler: have :func:`record` write to the file of :meth:`ErrorFile.for_scheduler`."""
    global _file
    _file = file.detach()


def record(error: BaseException) -> None:
    """In a scheduler: record the error that ends it."""
    if _file is None:
        return
    from monarch_rl.generator.settings import recipe_flags

    text = recipe_flags("".join(traceback.format_exception_only(error)).strip()).replace(_END, " ")
    if len(text) > MAX_CHARACTERS:
        text = f"{text[: MAX_CHARACTERS // 3]} [...] {text[-2 * MAX_CHARACTERS // 3 :]}"
    # All schedulers share one file position, so none overwrites another's error.
    os.write(_file, f"{text}{_END}".encode(errors="replace"))
