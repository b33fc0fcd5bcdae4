"""What a scheduler failed with, told to its engine's process: else it would stand in the scheduler's output alone.

The engine and its schedulers share an anonymous file, which outlives each of them. The first to fail is the cause:
other ranks of the engine then fail because it is gone. Imports nothing heavy.
"""

from __future__ import annotations

import os
import traceback
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

MAX_CHARACTERS = 1600
"""Of a longer message the beginning and, twice as much, the end are passed on."""
_END = "\0"
_file: int | None = None
"""In a scheduler: the descriptor to write to."""


class ErrorFile:
    """The engine's end: make one before its schedulers are started."""

    def __init__(self) -> None:
        self._file = os.memfd_create("monarch_rl-error-file", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def first(self) -> str:
        """The error of the first scheduler that failed; empty if none has recorded one."""
        text = os.pread(self._file, 4 * MAX_CHARACTERS + len(_END), 0).decode(errors="replace")
        return text.partition(_END)[0]

    def for_scheduler(self) -> Any:
        """What a process that is just being started needs for :func:`use`."""
        return DupFd(self._file)


def use(file: Any) -> None:
    """In a scheduler: have :func:`record` write to what :meth:`ErrorFile.for_scheduler` gave."""
    global _file
    _file = file.detach()


def record(error: BaseException) -> None:
    """In a scheduler: this is what it ends with."""
    if _file is None:
        return
    from monarch_rl.generator.settings import recipe_flags

    text = recipe_flags("".join(traceback.format_exception_only(error)).strip()).replace(_END, " ")
    if len(text) > MAX_CHARACTERS:
        text = f"{text[: MAX_CHARACTERS // 3]} [...] {text[-2 * MAX_CHARACTERS // 3 :]}"
    # All schedulers share one position in the file, so none writes over another's error.
    os.write(_file, f"{text}{_END}".encode(errors="replace"))
